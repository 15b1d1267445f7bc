"""Runs on a GPU that are disturbed: kill -9, a hang of host or device, memory that runs out, SIGTERM, Ctrl-C.

The curve of each must be that of an undisturbed run. All of them train beside each other.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from meshwright.train.step import Stepper
from tests.gpu.parts.cases import Cases, Result
from tests.runs import Running, curve, events, last_step, rows, warm, words, write_corpus

STEPS = 24
LARGE = (
    *("--model", "llama", "--model.layers", "16", "--model.width", "1024", "--model.heads", "16"),
    *("--model.kv-heads", "16", "--model.ffn", "2816", "--data.sequence", "512", "--train.batch", "8"),
    *("--train.steps", "60", "--checkpoint.every", "0", "--optimizer.lr", "1e-4"),
)
"""A llama of 206 million parameters."""
STUCK, CYCLES = 9, 60 * 1_980_000_000
"""Step in which the device gets a kernel that runs for a minute or more, at 1.98 GHz at most."""
STOP_S = 30.0
"""Within which a run ends that was asked to."""
SMALL_SHARE = 0.02
"""Of the device's memory, 1.6 GB of an H100's: what the run that runs out may use."""


def main() -> int:
    """Starts the runs that need nobody, disturbs the others, and compares."""
    cases = Cases.from_arguments(limit_s=95.0)
    write_corpus(cases.out / "corpus.txt", 3000)
    warm()  # before transformers, whose import would ask CUDA for devices
    importlib.import_module("transformers.models.llama.modeling_llama")
    runs = Runs(cases)
    runs.start("whole")
    runs.start("fault", "--recovery.faults", "kill:rank=0,step=10,phase=backward", "--recovery.snapshot-every", "1")
    runs.start("hang", "--recovery.faults", "hang:rank=0,step=9,phase=forward", "--recovery.hang-s", "4")
    runs.start("term", "--train.steps", "4000", "--schedule.shape", "constant")
    runs.start("ctrlc", "--train.steps", "4000", "--schedule.shape", "constant")
    stuck = ("--recovery.snapshot-every", "1", "--recovery.hang-s", "4")
    runs.start("device-hang", *stuck, before=partial(occupy_device, cases.out / "device-hang"))
    for name, layout in (("memory", "precision=bf16"), ("memory-auto", "auto")):
        runs.start(name, *LARGE, "--train.steps", "3", layout=layout, before=partial(allow_little, cases.out / name))
    cases.run("sigterm", lambda: stopped(runs, "term", signal.SIGTERM, 143, 15))
    runs.start("term", "--train.steps", str(runs.steps("term") + 10), "--schedule.shape", "constant")
    cases.run("kill -9", lambda: kill_rank(runs, "ctrlc"))
    cases.run("ctrl-c", lambda: stopped(runs, "ctrlc", signal.SIGINT, 1, 15))
    cases.run("kill -9 in backward", lambda: equal_to_whole(runs, "fault"))
    cases.run("a hang", lambda: equal_to_whole(runs, "hang"))
    cases.run("a hang of the device", lambda: equal_to_whole(runs, "device-hang"))
    cases.run("out of memory", lambda: out_of_memory(runs, "memory", 1))
    cases.run("out of memory, layout auto", lambda: out_of_memory(runs, "memory-auto", 0))
    cases.run("sigterm, gone on", lambda: gone_on(runs, "term"))
    runs.end()
    return cases.status


class Runs:
    """The runs of this part by name."""

    def __init__(self, cases: Cases) -> None:
        self.cases, self.root = cases, cases.out
        self._running: dict[str, Running] = {}

    def start(
        self, name: str, *more: str, layout: str = "replicate=1", before: Callable[[], None] = lambda: None
    ) -> None:
        """Starts a run in a process of its own."""

        def prepare() -> None:
            warnings.simplefilter("ignore")
            before()

        argv = words(self.root, name, "--train.steps", str(STEPS), *more, layout=layout)
        log = self.root / f"{name}-{time.monotonic_ns()}.log"
        self._running[name] = Running(argv, log, prepare)

    def running(self, name: str) -> Running:
        """Returns the newest process of a run."""
        return self._running[name]

    def wait(self, name: str) -> Result:
        """Waits for a run; returns its status and last words where it failed."""
        running = self._running[name]
        status = running.wait(max(1.0, self.cases.left_s))
        return {"status": status} | ({} if status == 0 else {"last": running.text()[-1500:]})

    def wait_for_step(self, name: str, step: int) -> None:
        """Waits until the metrics show a step."""
        while last_step(self.root / name) < step:
            assert self._running[name].poll() is None, self._running[name].text()[-800:]
            assert self.cases.left_s > 5, f"step {step} wasn't reached: {self._running[name].text()[-800:]}"
            time.sleep(0.05)

    def steps(self, name: str) -> int:
        """Returns the last step of a run."""
        return last_step(self.root / name)

    def end(self) -> None:
        """Kills what is left."""
        for running in self._running.values():
            running.end()


def allow_little(run: Path) -> None:
    """Lets ranks under a run's first plan use little of the device: the real allocator refuses what they ask for."""
    step_of = Stepper.run

    def limited(self: Stepper, step: int, *args: Any, **kwargs: Any) -> Any:
        if "ran out of memory" not in (run / "plan.json").read_text(encoding="utf-8"):
            torch.cuda.set_per_process_memory_fraction(SMALL_SHARE)
        return step_of(self, step, *args, **kwargs)

    Stepper.run = limited  # type: ignore[method-assign]


def occupy_device(run: Path) -> None:
    """Has the first rank of a run queue a kernel that keeps the device at work far longer than anybody waits."""
    step_of = Stepper.run

    def stuck(self: Stepper, step: int, *args: Any, **kwargs: Any) -> Any:
        if step == STUCK and not events(run, "rank_lost"):
            torch.cuda._sleep(CYCLES)
        return step_of(self, step, *args, **kwargs)

    Stepper.run = stuck  # type: ignore[method-assign]


def story(runs: Runs, name: str) -> Result:
    """Returns what a run's events tell of its recoveries."""
    run = runs.root / name
    return {
        "lost": [row["why"][:300] for row in events(run, "rank_lost")],
        "restored": [
            {key: row[key] for key in ("step", "tier", "bytes", "seconds")} for row in events(run, "restored")
        ],
        "recovered_s": [round(row["seconds"], 2) for row in events(run, "recovered")],
        "devices": sorted({row["device"] for row in events(run, "rank_started")}),
    }


def compared(runs: Runs, one: str, other: str) -> Result:
    """Compares two curves."""
    a, b = curve(runs.root / one), curve(runs.root / other)
    worst = max((abs(a[step][0] - b[step][0]) / abs(a[step][0]) for step in a if step in b), default=float("inf"))
    return {"equal": a == b, "steps": [len(a), len(b)], "worst": worst, "ok": sorted(a) == sorted(b) and worst < 1e-4}


def equal_to_whole(runs: Runs, name: str) -> Result:
    """Waits for a disturbed run and compares it with the whole one."""
    told = runs.wait("whole") | runs.wait(name) | story(runs, name)
    told |= compared(runs, "whole", name)
    told["ok"] &= told["status"] == 0 and len(told["recovered_s"]) == 1
    return told


def stopped(runs: Runs, name: str, number: int, wanted: int, step: int) -> Result:
    """Sends a signal to the command of a run under way."""
    runs.wait_for_step(name, step)
    began = time.monotonic()
    runs.running(name).kill(number)
    while runs.running(name).poll() is None and time.monotonic() - began < STOP_S:
        time.sleep(0.05)
    if runs.running(name).poll() is None:
        return {"ok": False, "step": runs.steps(name), "signals": masks(runs.running(name)), "last":
                runs.running(name).text()[-600:]}  # fmt: skip
    told = runs.wait(name)
    saved = events(runs.root / name, "checkpoint_saved")
    reached = runs.steps(name)
    told |= {"ended_after_s": round(time.monotonic() - began, 2), "step": reached, "saved": saved[-1]["step"]}
    return told | {"ok": told["status"] == wanted and saved[-1]["step"] == reached, "last": told.get("last", "")[-300:]}


def masks(running: Running) -> dict[int, list[str]]:
    """Returns what each process of a run does with signals, and for what it waits, as the kernel tells it."""
    found = {}
    for pid in running.alive():
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            kept = [line.replace("\t", " ") for line in lines if line.startswith(("Sig", "Shd", "PPid", "State"))]
            found[pid] = [*kept, Path(f"/proc/{pid}/wchan").read_text()]
    return found


def gone_on(runs: Runs, name: str) -> Result:
    """Waits for the same command after a signal; each step was done once."""
    told = runs.wait(name)
    steps = [row["step"] for row in rows(runs.root / name)]
    begun = [row["step"] for row in events(runs.root / name, "run_started")]
    return told | {"ok": told["status"] == 0 and steps == list(range(1, len(steps) + 1)), "begun": begun}


def kill_rank(runs: Runs, name: str) -> Result:
    """Kills the rank of a run under way, and waits until its successor has taken a step."""
    runs.wait_for_step(name, 5)
    began, run = time.monotonic(), runs.root / name
    os.kill(events(run, "rank_started")[-1]["pid"], signal.SIGKILL)
    while not events(run, "recovered"):
        assert runs.cases.left_s > 5, runs.running(name).text()[-800:]
        time.sleep(0.02)
    return {"until_seen_s": round(time.monotonic() - began, 2)} | story(runs, name)


def out_of_memory(runs: Runs, name: str, status: int) -> Result:
    """Returns how a run ended that ran out of memory: told the plan's bytes, or under a plan that needs less."""
    told = runs.wait(name)
    text = runs.running(name).text()
    lines = [line for line in text.splitlines() if "out of memory" in line or "needs less" in line or "planned" in line]
    told |= {"lines": [line[:500] for line in lines[:8]], "dropped": events(runs.root / name, "plan_dropped")}
    is_told = "out of memory in" in text and "planned" in text if status else len(told["dropped"]) == 1
    return told | {"ok": is_told and "Traceback" not in text and told["status"] == status, "tail": text[-1200:]}


if __name__ == "__main__":
    sys.exit(main())
