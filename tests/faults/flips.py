"""Flips of bits at random places of small runs: each must be noticed, or harmless: ``python -m tests.faults.flips``.

    python -m tests.faults.flips --cases 200 --seed 1 [--only 17] [--json]

A layout is planned once, in a process of its own; each case is a run of 28 steps forked from it. It is judged by the
same run without a flip: the last step's loss, the loss over held-out text, and every tensor of every checkpoint that
stands at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.jobs import train as command
from meshwright.train.faults import FLIPPED, Fault
from tests.runs import Running, happened, rows, words, write_corpus

LAYOUTS = {
    "replicate=1": 1,
    "replicate=2": 2,
    "shard=2,zero=3": 2,
    "tp=2": 2,
    "pp=2,microbatches=2": 2,
    "shard=2,replicate=2,zero=3": 4,
}
"""Layouts to their ranks. The model's embedding is tied to its head: under pp the first and the last stage hold it."""
PHASES = {
    "weights": ("", "forward", "backward", "reduce", "optimizer"),
    "gradients": ("backward", "reduce", "optimizer"),
    "moments": ("", "forward", "optimizer"),
    "activations": ("forward",),
}
"""Where within a step each kind of memory is hit."""
STEPS = 28
SAVED = 4
"""Steps between checkpoints."""
NOTICED = ("step_repeated", "step_skipped", "damaged", "copies_rounded", "copies_left", "limits_left", "rank_lost")
"""Events that say that something was seen."""
NEAR = 0.02
"""Share of the clean run's loss by which the curve of a harmless flip may end above it."""
WILD = 30.0
"""A checkpoint is bad when an element is over so many times the largest of the clean run's tensor."""


@dataclass(frozen=True)
class Case:
    """One flip."""

    number: int
    layout: str
    fault: str
    """As `Fault.parse` takes it."""


@dataclass(frozen=True)
class Finding:
    """What became of a case."""

    case: Case
    verdict: str
    """``noticed``, ``harmless``, ``missed`` (it never struck), or what must not be: ``silent``, ``wrecked``."""
    events: tuple[str, ...] = ()
    excess: float = 0.0
    """Loss at the end over the clean run's, as a share of it; the larger of the last step's and held-out text's."""
    wild: float = 0.0
    """Largest element of a checkpoint, of the largest of the clean run's tensor; infinite for what isn't finite."""
    why: str = ""


def draw_cases(count: int, seed: int) -> list[Case]:
    """Returns so many cases: layouts and kinds of memory take turns, everything else is drawn."""
    found = []
    for number in range(count):
        draw = random.Random(f"{seed}/{number}")
        layout = list(LAYOUTS)[number % len(LAYOUTS)]
        of = FLIPPED[number // len(LAYOUTS) % len(FLIPPED)]
        # Every other flip hits sign or exponent, where few bits of a number are but most of the harm.
        bit = draw.randrange(23, 32) if draw.random() < 0.5 else draw.randrange(32)
        fault = Fault(
            kind="flip", rank=draw.randrange(LAYOUTS[layout]), step=draw.randrange(1, STEPS + 1),
            phase=draw.choice(PHASES[of]), of=of, bit=bit, seed=draw.randrange(10**6),
        )  # fmt: skip
        found.append(Case(number, layout, str(fault)))
    return found


def judge_cases(root: Path, cases: Sequence[Case]) -> Iterator[Finding]:
    """Runs cases, a layout at a time, and yields what became of each."""
    if not (root / "corpus.txt").exists():
        write_corpus(root / "corpus.txt")
    for layout in dict.fromkeys(case.layout for case in cases):
        chosen = [case for case in cases if case.layout == layout]
        name = layout.replace("=", "").replace(",", "-")
        argv = words(
            root, name, "--train.steps", str(STEPS), "--checkpoint.every", str(SAVED), "--checkpoint.keep", "99",
            "--recovery.snapshot-every", "2", "--recovery.back-s", "1e-6",
            layout=layout, devices=LAYOUTS[layout],
        )  # fmt: skip
        receive, send = os.pipe()
        running = Running(argv, root / f"{name}.log", before=_tells(chosen, receive, send))
        os.close(send)
        with os.fdopen(receive) as lines:
            told = 0
            for line in lines:
                values = json.loads(line)
                yield Finding(**values | {"case": Case(**values["case"]), "events": tuple(values["events"])})
                told += 1
        assert running.wait() == 0 and told == len(chosen), running.text()


def _tells(cases: Sequence[Case], receive: int, send: int) -> Callable[[], None]:
    """Returns what makes a command run each of some cases once it has planned, and write its finding to a pipe."""

    def plant() -> None:
        os.close(receive)
        train = command._run_ranks

        def ranks_result(config: Any, model: Any, job: Any, launcher: Any, machines: Any, say: Any) -> dict[str, Any]:
            def run(name: str, faults: str) -> tuple[str, dict[str, Any]]:
                own = dataclasses.replace(config, recovery=dataclasses.replace(config.recovery, faults=faults))
                folder = job.run_dir.parent / name
                folder.mkdir()
                return folder.name, train(
                    own, model, dataclasses.replace(job, config=own, run_dir=folder), launcher, machines, say
                )

            def clean() -> None:
                name, result = run(f"{job.run_dir.name}-clean", "")
                (job.run_dir.parent / name / "result.json").write_text(json.dumps(result))

            def judged(case: Case) -> None:
                name, why, result = f"{job.run_dir.name}-{case.number}", "", {}
                try:
                    result = run(name, case.fault)[1]
                except MeshwrightError as error:
                    why = str(error).splitlines()[0]
                finding = _judge(case, job.run_dir.parent, job.run_dir.name, result, why)
                os.write(send, json.dumps(asdict(finding)).encode() + b"\n")

            _forked(clean)
            for case in cases:
                _forked(lambda case=case: judged(case))
            os._exit(0)

        command._run_ranks = ranks_result

    return plant


def _forked(work: Callable[[], None]) -> None:
    """Does something in a forked process, and waits for it."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    os.waitpid(pid, 0)


def _judge(case: Case, root: Path, name: str, result: dict[str, Any], why: str) -> Finding:
    """Compares a run with the clean one of its layout."""
    run, clean = root / f"{name}-{case.number}", root / f"{name}-clean"
    if not happened(run, "flip"):
        return Finding(case, "missed", why=why)
    events = tuple(row["kind"] for row in rows(run, "events.jsonl") if row["kind"] in NOTICED)
    wild = _wildest(run / "checkpoints", clean / "checkpoints")
    if why:
        return Finding(case, "noticed" if wild < WILD else "wrecked", (*events, "error"), 0.0, wild, why)
    right = json.loads((clean / "result.json").read_text(encoding="utf-8"))
    excess = max(_over(result[part], right[part]) for part in ("loss", "validation_loss"))
    good = excess <= NEAR and wild < WILD
    verdict = ("noticed" if good else "wrecked") if events else ("harmless" if good else "silent")
    return Finding(case, verdict, events, excess, wild)


def _over(found: float, right: float) -> float:
    """Returns by what share of the right loss one is over it."""
    return (found - right) / right if math.isfinite(found) else math.inf


def _wildest(found: Path, right: Path) -> float:
    """Returns the largest element of any checkpoint, of the largest of its tensor in the clean run's checkpoints."""
    most = 0.0
    scale: dict[str, float] = {}
    for _, name, size in _sizes(right):
        scale[name] = max(scale.get(name, 0.0), size)
    for _, name, size in _sizes(found):
        most = max(most, size / scale[name] if scale[name] else size)
    return most


def _sizes(folder: Path) -> Iterator[tuple[int, str, float]]:
    """Yields (step, tensor's name, largest size of an element) of each checkpoint; infinite for what isn't finite."""
    from meshwright.checkpoint.store import CheckpointStore

    store = CheckpointStore(folder)
    for entry in store.entries():
        loaded = store.find(entry.step)
        assert loaded is not None
        for name, tensor in store.read_full(loaded):
            size = float(tensor.abs().max()) if tensor.numel() else 0.0
            yield entry.step, name, size if math.isfinite(size) else math.inf


def main(argv: Sequence[str] | None = None) -> int:
    """Runs cases and shows a table; exit status 1 when a flip was silent or wrecked a run."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.flips", description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, action="append", help="number of a case; may be given again")
    parser.add_argument("--json", action="store_true", help="a line of JSON each case")
    options = parser.parse_args(argv)
    cases = [
        case for case in draw_cases(options.cases, options.seed) if not options.only or case.number in options.only
    ]
    counts: Counter[tuple[str, str]] = Counter()
    bad = 0
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as root:
        for finding in judge_cases(Path(root), cases):
            counts[Fault.parse(finding.case.fault).of, finding.verdict] += 1
            bad += finding.verdict in ("silent", "wrecked")
            if options.json:
                print(json.dumps(asdict(finding)), flush=True)
            elif finding.verdict in ("silent", "wrecked", "missed"):
                print(finding, flush=True)
    if not options.json:
        verdicts = ("noticed", "harmless", "silent", "wrecked", "missed")
        print(f"{'':12}" + "".join(f"{verdict:>10}" for verdict in verdicts))
        for of in FLIPPED:
            print(f"{of:12}" + "".join(f"{counts[of, verdict]:10}" for verdict in verdicts))
    return 1 if bad else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
