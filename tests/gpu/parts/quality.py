"""What islands cost in validation loss: `meshwright train` on the same tokens, exactly and by islands, on one GPU.

    python -m tests.gpu.parts.quality --out FOLDER [--steps 3000] [--seeds 1,2,3] [--limit-s 230] [--words W] [--on-cpu]

A llama of 10 million parameters (`recipes/llama-10m.toml`, of 4 wide layers in place of 10 narrow ones: a GPU waits for
launches) on the Python source text of the interpreter. All runs train beside each other, since nothing is timed, and
ranks exchange through the host (`tests.gpu.staged_group`). The exact run is of one rank, which trains as `replicate=2`
does up to rounding; a short run of that gives the bytes that it sends in a step, and shows that losses are the same.
Each evaluation is told as it comes: validation loss, mean training loss since the one before, bytes that rank 0 sent.
Where the runs won't all end within the limit at their pace, the last ones in the order of importance are given up.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from tests.gpu.parts.cases import Cases, process_age_s, sharing_parser
from tests.gpu.staged_group import share_device
from tests.runs import Running, warm

EXACT, COPIES = "exact", "replicate=2"
ISLANDS = "islands=2 --outer.every 30"
WAYS = {
    EXACT: "replicate=1",
    "h30": ISLANDS,
    "h30-int8-w60": f"{ISLANDS} --outer.compress int8 --outer.warmup 60",
    "h30-w60": f"{ISLANDS} --outer.warmup 60",
    "h30-w150": f"{ISLANDS} --outer.warmup 150",
    "h30-int8": f"{ISLANDS} --outer.compress int8",
}
"""Layout and further words of `meshwright train`."""
FOR_ALL_SEEDS = 3
"""First ways, which run with every seed; the others with the first seed alone."""
RECIPE = "recipes/llama-10m.toml --model.layers 4 --model.width 384 --model.heads 6 --model.ffn 1024"
COMMON = (
    "--train.sample-tokens 0 --train.no-prove --monitor.display none --monitor.no-tensorboard --monitor.no-report "
    "--checkpoint.every 0 --recovery.snapshot-every 0"
)
BYTES_STEPS = 8
"""Steps after which the run of copies is ended."""
LEAST_RUNS = 3
"""First runs of islands and exact training, which aren't given up."""
SLOW_STEPS = 20
"""First steps, and first ones after those as one, whose pace says nothing."""
PACE_S = 12.0
"""Seconds over which the pace of a run is measured."""
END_S = 8.0
"""Seconds that a run takes from its last step to its last evaluation and end."""


class Tail:
    """Reads the JSON lines that are new in a growing file.

    Args:
        path: of the file, which may not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def read(self) -> Iterator[dict[str, Any]]:
        """Yields the whole lines since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text.rfind(b"\n") + 1
        self._offset += whole
        yield from map(json.loads, text[:whole].splitlines())


@dataclass(eq=False)
class Run:
    """A run under way."""

    name: str
    way: str
    seed: str
    ranks: int
    warmup: int
    """First steps, in which islands exchange each time, so that their pace says nothing of the others'."""
    running: Running
    metrics: Tail
    events: Tail
    ended: bool = False
    """Whether it was given up or has ended."""
    losses: list[float] = field(default_factory=list)
    """Of each step, in training."""
    sent: list[int] = field(default_factory=lambda: [0])
    """Bytes that rank 0 has sent after each number of steps."""
    validation: dict[int, float] = field(default_factory=dict)
    """Loss by step."""
    times: deque[tuple[float, int]] = field(default_factory=deque)
    """Moments of the last `PACE_S` with the step that was reached."""

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.losses)

    def left_s(self, steps: int) -> float:
        """Returns the seconds that its remaining steps take at its present pace; 0 where that isn't known yet."""
        (began_s, first), (now_s, last) = self.times[0], self.times[-1]
        if now_s - began_s < 0.8 * PACE_S or last == first or first < self.warmup + SLOW_STEPS:
            return 0.0
        return (steps - last) * (now_s - began_s) / (last - first)


class Comparison:
    """All runs of the part.

    Args:
        cases: tells what is found.
        root: folder for runs and prepared text.
        options: of the command line.
    """

    def __init__(self, cases: Cases, root: Path, options: argparse.Namespace) -> None:
        self._cases, self._root, self._options = cases, root, options
        self._began_s = time.monotonic()
        self.runs: list[Run] = []
        """In the order of importance."""

    def start_all(self) -> None:
        """Starts the runs, the most important first."""
        seeds = self._options.seeds.split(",")
        names = list(WAYS)
        self._start(COPIES, seeds[0], COPIES)
        for seed in seeds:
            for name in names[:FOR_ALL_SEEDS]:
                self._start(name, seed, WAYS[name])
        for name in names[FOR_ALL_SEEDS:]:
            self._start(name, seeds[0], WAYS[name])

    def _start(self, way: str, seed: str, words: str) -> None:
        layout, *more = shlex.split(words)
        name, ranks = f"{way} seed {seed}", int(layout[-1])
        warmup = int(more[more.index("--outer.warmup") + 1]) if "--outer.warmup" in more else 0
        run_dir, steps = self._root / name.replace(" ", "-").replace("=", "-"), self._options.steps
        # Where rounds end with and without their first steps as one: outer weights are then those of all islands.
        every = max(30, steps // 150 * 30)
        argv = [
            *("train", *shlex.split(RECIPE), *shlex.split(COMMON)),
            *("--layout", f"{layout},precision=float32", "--devices", str(ranks), "--run", str(run_dir)),
            *("--train.steps", str(steps), "--train.seed", seed, "--evaluation.every", str(every)),
            *("--data.cache", str(self._root / "prepared"), *more, *shlex.split(self._options.words)),
        ]
        running = Running(
            argv, self._cases.out / f"{run_dir.name}.log", partial(share_device, self._options.on_cpu, 0.0)
        )
        tails = Tail(run_dir / "metrics.jsonl"), Tail(run_dir / "events.jsonl")
        self.runs.append(Run(name, way, seed, ranks, warmup, running, *tails))

    def watch(self) -> None:
        """Tells each evaluation until all runs have ended, or until the limit."""
        shed_s = self._began_s
        while self._cases.left_s > 7.0:
            living = [run for run in self.runs if not run.ended]
            if not living:
                return
            for run in living:
                self._read(run)
                if run.running.poll() is not None:
                    self._read(run)
                    self._end(run, f"ended with {run.running.status}" if run.running.status else "")
            copies = self.runs[0]
            if copies.step >= BYTES_STEPS and not copies.ended:
                self._end(copies, "ended: its bytes and losses are known")
            if time.monotonic() - shed_s > PACE_S and self._give_up(living):
                shed_s = time.monotonic()
            time.sleep(0.5)
        for run in self.runs:
            if not run.ended:
                self._end(run, f"at step {run.step} when the limit came")

    def _give_up(self, living: list[Run]) -> bool:
        """Ends the least important runs, where all of them won't end in time; returns whether it did.

        Their pace is taken for one that goes by the ranks that train.
        """
        steps_s = max(run.left_s(self._options.steps) for run in living)
        if not steps_s:
            return False
        needed_s, ranks = steps_s + END_S, sum(run.ranks for run in living)
        most_ranks = ranks * max(0.0, self._cases.left_s) / needed_s
        dropped = False
        for run in sorted(living, key=self.runs.index, reverse=True):
            if ranks <= most_ranks or self.runs.index(run) <= LEAST_RUNS:
                break
            self._end(run, f"given up at step {run.step}, so that others end in time")
            ranks, dropped = ranks - run.ranks, True
        return dropped

    def _read(self, run: Run) -> None:
        for line in run.metrics.read():
            run.losses.append(line["loss"])
            run.sent.append(run.sent[-1] + sum(entry["bytes"] for entry in line["comm"]))
        for event in run.events.read():
            if event["kind"] == "evaluated":
                self._evaluated(run, event)
        now_s = time.monotonic()
        if run.step > 0:
            run.times.append((now_s, run.step))
            while now_s - run.times[0][0] > PACE_S:
                run.times.popleft()
        else:
            run.times.clear()
            run.times.append((now_s, 0))

    def _evaluated(self, run: Run, event: dict[str, Any]) -> None:
        step, before = event["step"], max(run.validation, default=0)
        run.validation[step] = event["loss"]
        fields: dict[str, Any] = {"step": step, "validation_loss": event["loss"], "sent_bytes": run.sent[step]}
        fields |= {"training_loss": mean(run.losses[before:step]), "targets": event["targets"]}
        self._cases.tell(run.name, **fields, at_s=round(time.monotonic() - self._began_s, 1))

    def _end(self, run: Run, why: str) -> None:
        run.ended = True
        run.running.end()
        failed = bool(run.running.status)
        last = {"last": run.running.text()[-1200:]} if failed else {}
        steps = {"steps": run.step, "sent_bytes": run.sent[-1], "end": why or "finished"}
        self._cases.tell(run.name, ok=not failed, **steps, **last)

    def compare(self) -> None:
        """Tells for each way and seed its distance from exact training at the last evaluation that both had."""
        copies = self.runs[0]
        step_bytes = copies.sent[-1] / max(1, copies.step)
        exact = {run.seed: run for run in self.runs if run.way == EXACT}
        pairs = zip(copies.losses, exact[copies.seed].losses)
        off_exact = [distance(loss, exact_loss) for loss, exact_loss in pairs]
        self._cases.tell("bytes of replicate=2", step_bytes=step_bytes, steps=copies.step, losses_off_exact=off_exact)
        for run in self.runs[1:]:
            common = sorted(run.validation.keys() & exact[run.seed].validation.keys())
            if run.way == EXACT or not common:
                continue
            off = {step: round(distance(run.validation[step], exact[run.seed].validation[step]), 5) for step in common}
            last = common[-1]
            fewer = step_bytes * last / max(1, run.sent[last])
            fields = {"step": last, "validation_loss": run.validation[last], "off_exact": off[last]}
            self._cases.tell(f"{run.name}, compared", **fields, times_fewer_bytes=round(fewer, 2), off_by_step=off)


def distance(loss: float, exact_loss: float) -> float:
    """Returns how far a loss is from another, as a share of that; a simulated GPU's are 0."""
    return loss / exact_loss - 1.0 if exact_loss else loss


def main() -> int:
    """Trains every way side by side, and compares."""
    parser = sharing_parser(230.0)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--words", default="", help="further words of `meshwright train` for every run")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    cases = Cases(options.out.resolve(), options.limit_s - process_age_s())
    warm()  # before transformers, whose import would ask CUDA for devices
    importlib.import_module("transformers.models.llama.modeling_llama")
    with tempfile.TemporaryDirectory() as root:
        comparison = Comparison(cases, Path(root), options)
        try:
            comparison.start_all()
            comparison.watch()
            comparison.compare()
        finally:
            for run in comparison.runs:
                run.running.end()
    return cases.finish()


if __name__ == "__main__":
    sys.exit(main())
