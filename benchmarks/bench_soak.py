"""A long run with a fault every so often: how much of its time it trained, and whether anything grew.

    python benchmarks/bench_soak.py [--minutes 30] [--ranks 4] [--layout shard=2,tp=2] [--seed 0] [--json OUT]

Every 20 to 60 seconds a random rank is killed, stopped, hung (also with the interpreter's lock held) or ended, at a
random place of a step; a stopped or hanging one is found within `--hang` seconds. Goodput is the steps that were
done times the median time of a step, over the wall time. The supervisor's memory, open files and shared memory are
looked at each second. The seed replays the faults.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from processes import kill_descendants

from meshwright.train.faults import Fault, ask

KINDS = ("kill", "kill", "kill", "stop", "hang", "gil", "exit")
PHASES = ("data", "forward", "backward", "collective", "reduce", "optimizer", "snapshot")
BETWEEN_S = (20.0, 60.0)
AHEAD = 3
"""Steps between asking for a fault and its place."""


def main() -> int:
    """Runs the soak and prints what came of it; exit status 1 when something grew or the run ended by itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layout", default="shard=2,tp=2")
    parser.add_argument("--hang", type=float, default=3.0, help="recovery.hang_s")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        found = _soak(Path(folder), options)
    _tell(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0 if found["alive"] else 1


def _soak(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    run, log = folder / "run", (folder / "log").open("w")
    command = subprocess.Popen(_words(folder, run, options), stdout=log, stderr=log, env=_variables(folder))
    looks: list[dict[str, int]] = []
    asked: list[str] = []
    try:
        _await(lambda: _rows(run / "metrics.jsonl")[3:], 300.0)
        began, draw = time.time(), random.Random(options.seed)
        end, due = began + 60 * options.minutes, time.time() + draw.uniform(*BETWEEN_S)
        while time.time() < end and command.poll() is None:
            time.sleep(1.0)
            looks.append(_look(command.pid))
            if time.time() >= due:
                step = _rows(run / "metrics.jsonl")[-1]["step"] + AHEAD
                fault = Fault(
                    kind=draw.choice(KINDS), rank=draw.randrange(options.ranks), step=step, phase=draw.choice(PHASES)
                )
                ask(run, fault)
                asked.append(str(fault))
                due = time.time() + draw.uniform(*BETWEEN_S)
        alive = command.poll() is None
        wall = time.time() - began
        command.send_signal(signal.SIGINT)
        command.wait(120)
        rows, events = _rows(run / "metrics.jsonl"), _rows(run / "events.jsonl")
        text = (folder / "log").read_text()[-2000:]
    finally:
        command.kill()
        kill_descendants()
    recovered = [event["seconds"] for event in events if event["kind"] == "recovered"]
    steps = [row for row in rows if row["step"] > rows[0]["step"]]
    return {
        "seed": options.seed,
        "wall_s": wall,
        "asked": asked,
        "lost": sum(event["kind"] == "rank_lost" for event in events),
        "recovered_s": recovered,
        "steps": len(steps),
        "goodput": len(steps) * statistics.median(row["step_s"] for row in steps) / wall,
        "looks": looks,
        "alive": alive,
        "log": "" if alive else text,
    }


def _words(folder: Path, run: Path, options: argparse.Namespace) -> list[str]:
    text = folder / "text.txt"
    text.write_bytes(b"".join(Path(os.__file__).with_name(name).read_bytes() for name in ("os.py", "typing.py")))
    return [
        *(sys.executable, "-m", "meshwright", "train", "--model", "gpt2", "--model.layers", "4"),
        *("--model.width", "128"),
        *("--data", str(text), "--data.tokenizer", "chars", "--data.sequence", "128", "--train.batch", "8"),
        *("--data.cache", str(folder / "prepared"), "--train.steps", "1000000", "--train.sample-tokens", "0"),
        *("--evaluation.every", "0", "--checkpoint.every", "200", "--monitor.display", "none"),
        *("--monitor.no-tensorboard", "--monitor.no-report", "--layout", options.layout, "--run", str(run)),
        *("--devices", str(options.ranks), "--recovery.hang-s", str(options.hang), "--recovery.back-s", "5"),
        *("--recovery.attempts", "10"),
    ]


def _variables(folder: Path) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}


def _look(pid: int) -> dict[str, int]:
    """Returns the supervisor's own memory, open files, and shared memory that it holds, in bytes."""
    try:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        held = [os.stat(path) for path in Path(f"/proc/{pid}/fd").iterdir() if "memfd" in os.readlink(path)]
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except (OSError, ValueError):
        return {}
    anonymous = int(status["RssAnon"].split()[0]) * 1024
    return {"anonymous": anonymous, "files": files, "shared": sum(one.st_size for one in held)}


def _rows(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def _await(condition: Any, limit_s: float) -> None:
    end = time.time() + limit_s
    while not condition():
        if time.time() > end:
            raise RuntimeError(f"it did not happen within {limit_s:g} s")
        time.sleep(0.2)


def _tell(found: dict[str, Any]) -> None:
    times = sorted(found["recovered_s"]) or [0.0]
    print(f"{found['wall_s'] / 60:.1f} minutes, {len(found['asked'])} faults asked, {found['lost']} failures seen")
    print(f"recovered {len(times)} times: median {statistics.median(times):.2f} s, longest {times[-1]:.2f} s")
    print(f"goodput {found['goodput']:.1%} over {found['steps']} steps")
    looks = [look for look in found["looks"] if look]
    for name in ("anonymous", "files", "shared"):
        values = [look[name] for look in looks]
        third = max(1, len(values) // 3)
        first, last = max(values[:third]), max(values[-third:])
        print(f"supervisor's {name}: {first} at most in the first third, {last} in the last")
    if not found["alive"]:
        print(f"the run ended by itself:\n{found['log']}")


if __name__ == "__main__":
    raise SystemExit(main())
