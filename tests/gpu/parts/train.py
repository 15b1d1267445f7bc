"""A new user's first hour on a GPU: the first recipe, its page, report and JSON, Ctrl-C and going on, what comes after.

Beside it what must be refused in a sentence: a run from a process that has used CUDA, or autograd, before.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
import time
import urllib.request
from pathlib import Path

from tests.gpu.parts.cases import Cases, Command, Result
from tests.runs import events, last_step, rows, warm, words, write_corpus

FEWER = ("--train.steps", "80", "--schedule.warmup", "10", "--evaluation.every", "40", "--checkpoint.every", "40")
LONGER = ("--train.steps", "400", "--schedule.warmup", "10", "--evaluation.every", "0", "--checkpoint.every", "50")
USED: dict[str, tuple[str, str | None]] = {
    "autograd": ("torch.ones(2, requires_grad=True).sum().backward()", "autograd engine has run in this process"),
    "is_available": ("torch.cuda.is_available()", "this process has used the GPU driver"),
    "transformers": ("import transformers.models.llama.modeling_llama", "import meshwright before transformers"),
    "meshwright-transformers": ("import meshwright, transformers.models.llama.modeling_llama", None),
}
"""What a process did before it starts a run, and what it is told; nothing where the run must start."""
BEFORE = "import sys, torch; {}; from meshwright.cli.main import main; sys.exit(main(sys.argv[1:]))"
MADE_STEPS = 30
"""Steps of `make train` before Ctrl-C."""


def main() -> int:
    """Trains, looks at the page meanwhile, and uses what was trained.

    ``--used``: also what must be refused, each of which imports all anew.
    """
    with_used = "--used" in sys.argv
    sys.argv = [word for word in sys.argv if word != "--used"]
    cases = Cases.from_arguments(limit_s=95.0)
    warm()
    out = cases.out
    write_corpus(out / "corpus.txt")
    made = start_make(cases)
    # Less text than the recipe's: 16 MB take 10 s to prepare.
    recipe = ("train", "recipes/first.toml", "--data.cache", str(out / "prepared"), "--data.limit-bytes", "4000000")
    first = cases.start("first", (*recipe, *FEWER, "--run", str(out / "first"), "--monitor.port", "0", "--json"))
    used = {
        name: cases.start(f"after-{name}", words(out, f"after-{name}"), (sys.executable, "-c", BEFORE.format(act)))
        for name, (act, _) in (USED.items() if with_used else ())
    }
    cases.run("live page", lambda: page(cases, first))
    cases.run("first train", lambda: trained(cases, first))
    doctor = cases.start("doctor", ("doctor", "recipes/first.toml", "--run", str(out / "first"), "--json"))
    after = {
        "generate": ("generate", str(out / "first"), "--prompt", "def ", "--max-tokens", "40", "--json"),
        "export": ("export", str(out / "first"), "--to", str(out / "exported"), "--json"),
        "status": ("status", str(out / "first"), "--json"),
    }
    begun = {name: cases.start(name, argv) for name, argv in after.items()}
    parted = cases.start("parted", (*recipe, *LONGER, "--run", str(out / "parted")))
    for name, command in begun.items():
        cases.run(name, lambda command=command: command.wait(cases.left_s) | {"printed": command.out()[-400:]})
    exported = cases.start("generate-exported", ("generate", str(out / "exported"), "--prompt", "def ", "--json"))
    cases.run("ctrl-c", lambda: interrupted(cases, parted, out / "parted", 20))
    again = cases.start("again", (*recipe, *LONGER, "--run", str(out / "parted")))
    if made is not None:
        cases.run("ctrl-c of make train", lambda: interrupted(cases, made, out / "made", MADE_STEPS, group=True))
    cases.run("generate from export", lambda: exported.wait(cases.left_s) | {"printed": exported.out()[-300:]})
    for name, command in used.items():
        cases.run(f"train after {name}", lambda command=command, name=name: refused(cases, command, USED[name][1]))
    cases.run("doctor", lambda: examined(cases, doctor))
    cases.run("resume", lambda: resumed(cases, again))
    return cases.finish()


def start_make(cases: Cases) -> Command | None:
    """Starts ``make train`` with this interpreter in place of the project's environment."""
    make = shutil.which("make")
    if make is None:
        cases.tell("ctrl-c of make train", skipped="there is no make")
        return None
    ready = cases.out / "ready"
    ready.touch()
    more = {"--run": "made", "--data.cache": "made-prepared"}
    recipe = " ".join(f"{key} {cases.out / name}" for key, name in more.items())
    recipe = f"recipes/first.toml --data.limit-bytes 4000000 {recipe}"
    folder = Path(sys.executable).parent
    bin_folder = folder if (folder / "python").exists() else Path(sys.prefix) / "bin"
    return cases.start("made", ("train", f"READY={ready}", f"BIN={bin_folder}", f"RECIPE={recipe}"), (make,))


def page(cases: Cases, command: Command) -> Result:
    """Reads the live page while the run trains."""
    address = None
    while address is None:
        assert command.alive() and cases.left_s > 20, command.err()[-800:]
        time.sleep(0.05)
        address = re.search(r"http://[^\s]+", command.err())
    seen: Result = {"address": address[0]}
    while "metrics" not in seen:
        assert cases.left_s > 15, "no step in time"
        text = _get(address[0])
        assert "<html" in text
        seen["bytes"] = len(text)
        metrics = _get(address[0].rstrip("/") + "/metrics")
        if re.search(r"^meshwright\w*step\w* [1-9]", metrics, re.MULTILINE):
            seen["metrics"] = len(metrics.splitlines())
        if not command.alive():
            break
        time.sleep(0.1)
    return seen


def _get(address: str) -> str:
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return str(answer.read().decode())
    except OSError as error:
        return f"<html {error}"


def trained(cases: Cases, command: Command) -> Result:
    """Reads the first run's result, report and metrics."""
    told = command.wait(cases.left_s)
    run = cases.out / "first"
    if not told["ok"]:
        return told
    result, found = command.json(), rows(run)
    started, finished = (events(run, kind)[0]["time"] for kind in ("rank_started", "run_finished"))
    report = (run / "report.html").stat().st_size
    header, printed = ("model", "data", "devices", "layout", "state"), command.err().splitlines()
    plan = json.loads((run / "plan.json").read_text())
    told |= {
        "device": events(run, "rank_started")[0]["device"],
        "result": {key: value for key, value in result.items() if key != "sample"},
        "layout": found[-1]["layout"], "reason": plan["reason"][:200], "losses": [found[0]["loss"], found[-1]["loss"]],
        "steps_per_s": round(1 / sorted(row["step_s"] for row in found)[len(found) // 2], 1), "report_bytes": report,
        "from_rank_to_end_s": round(finished - started, 1), "proof": events(run, "proved") or events(run, "proof"),
        "last_row": {key: found[-1][key] for key in ("step_s", "parts", "memory", "mfu", "mfu_of_measured")},
        "header": [line for line in printed if line.startswith(header)],
        "warnings": [line[:300] for line in printed if "arn" in line][:5],
    }  # fmt: skip
    is_whole = result["finished"] and found[-1]["step"] == 80 and report > 10_000
    told["ok"] = bool(is_whole and found[-1]["loss"] < found[0]["loss"] - 1 and told["device"] == "cuda:0")
    return told


def interrupted(cases: Cases, command: Command, run: Path, step: int, group: bool = False) -> Result:
    """Types Ctrl-C when the run is under way: a terminal sends it to the command's whole group."""
    while last_step(run) < step:
        assert command.alive() and cases.left_s > 15, command.err()[-800:]
        time.sleep(0.05)
    began = time.monotonic()
    command.signal(signal.SIGINT, group)
    told = command.wait(min(30.0, cases.left_s))
    reached, saved = last_step(run), events(run, "checkpoint_saved")
    is_clear = "goes on from there" in command.err() and bool(saved) and saved[-1]["step"] == reached
    # make waits for its command, and then ends by the signal.
    wanted = -signal.SIGINT if group else 1
    return told | {
        "ok": told["status"] == wanted and is_clear, "ended_after_s": round(time.monotonic() - began, 2),
        "last": command.err()[-400:], "step": reached,
    }  # fmt: skip


def resumed(cases: Cases, command: Command) -> Result:
    """Waits for the same command, which goes on from the checkpoint of the last step."""
    told = command.wait(cases.left_s)
    run = cases.out / "parted"
    begun = [event["step"] for event in events(run, "run_started")]
    found = rows(run)
    numbers = [row["step"] for row in found]
    told |= {"begun": begun, "losses": [row["loss"] for row in found[:1] + found[-1:]], "steps": len(numbers)}
    told["ok"] = told["ok"] and len(begun) == 2 and begun[1] >= 20 and numbers == list(range(1, 401))
    return told


def refused(cases: Cases, command: Command, sentence: str | None) -> Result:
    """Returns what a run was told that can't fork its ranks; one that could is as well, and must where none is said."""
    told = command.wait(cases.left_s)
    text = command.err()
    is_clear = told["status"] == 0 or (
        sentence and sentence in text and "Traceback" not in text and told["status"] in (1, 2)
    )
    return told | {"ok": bool(is_clear), "last": text[-400:]}


def examined(cases: Cases, command: Command) -> Result:
    """Returns what doctor found: 3 says that there are findings."""
    told = command.wait(cases.left_s)
    report = command.json()
    return told | {"ok": told["status"] in (0, 3), "report": report}


if __name__ == "__main__":
    sys.exit(main())
