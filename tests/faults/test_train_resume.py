"""Without a supervisor: runs killed at random moments go on to the bit; other layouts go on along the same curve."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

from meshwright.checkpoint.manifest import Manifest
from meshwright.train.trainer import Trainer
from tests.runs import Running, call, curve, events, last_step, wait_until, words, write_corpus
from tests.tiers import cases

LAYOUTS = {"one": ("replicate=1", 1), "copies": ("replicate=2", 2), "shards": ("shard=2,zero=3", 2)}
STEPS = 60
DROPOUT = ("--model.dropout", "0.1")
KILLS = 5
SPAN = 7
"""Steps after which a run waits to be killed: however late that comes, it is never over first."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("resume")
    write_corpus(root / "corpus.txt")
    return root


def command(root: Path, run: str, layout: str, devices: int, *more: str) -> list[str]:
    often = ("--train.steps", str(STEPS), "--checkpoint.every", "2", "--recovery.no-enabled")
    return words(root, run, *often, *DROPOUT, *more, layout=layout, devices=devices)


@pytest.fixture
def whole(root: Path, name: str) -> dict[int, tuple[float, float]]:
    """The curve of an uninterrupted run under the layout ``name``."""
    layout, devices = LAYOUTS[name]
    run = root / f"whole-{name}"
    if not run.exists():
        status, text = call(command(root, run.name, layout, devices), root / f"{run.name}.log")
        assert status == 0, text
    found = curve(run)
    assert sorted(found) == list(range(1, STEPS + 1))
    return found


def _kill(pids: list[int]) -> None:
    """Kills processes at once, as far as they still live."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _wait_after(step: int) -> None:
    """Makes every rank wait for ever once it has done ``step`` steps."""
    whole = Trainer._one_step

    def waiting(self: Trainer):  # type: ignore[no-untyped-def]
        if self.step >= step:
            time.sleep(10**6)
        return whole(self)

    Trainer._one_step = waiting  # type: ignore[method-assign]


def test_a_run_with_no_step_left_to_train_says_so(root: Path) -> None:
    said = "6 steps are done, and train.steps = {} asks for no more, so that none was left to train; to train on, set"

    def lines_of(steps: int, *more: str) -> tuple[str, list[dict]]:
        status, text = call(words(root, "short", "--train.steps", str(steps), *more), root / "short.log")
        assert status == 0, text
        return text, events(root / "short", "nothing_left")

    assert "left to train" not in lines_of(6)[0]
    for times, steps in enumerate((4, 6), 1):
        text, told = lines_of(steps, "--train.sample-tokens", "3")
        assert said.format(steps) + " train.steps above 6\n" in text
        assert len(told) == times and told[-1]["reason"].startswith(said.format(steps))
    text, told = lines_of(7)
    assert "left to train" not in text and len(told) == 2 and last_step(root / "short") == 7


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(LAYOUTS, (1,)))
def test_kill_at_random_moments_and_go_on_to_the_bit(name: str, root: Path, whole: dict) -> None:
    layout, devices = LAYOUTS[name]
    run, draw = root / f"killed-{name}", random.Random(name)
    argv = command(root, run.name, layout, devices)
    for number in range(KILLS):
        before, alone = last_step(run), number % 3 == 2
        moment = before - before % 2 + draw.choice((1, 2, 2, 3))
        # One process alone is a rank only once there are ranks; all of them may be killed while they start.
        moment = max(moment, before + 1) if alone else moment
        assert moment + SPAN < STEPS
        running = Running(argv, root / f"killed-{name}.log", before=lambda moment=moment: _wait_after(moment + SPAN))
        wait_until(lambda running=running, moment=moment: last_step(run) >= moment or running.poll() is not None)
        assert running.poll() is None, running.text()
        time.sleep(draw.uniform(0.0, 0.08))
        victims = [running.pid, *running.ranks()][:: draw.choice((1, -1))]
        _kill(victims[-1:] if alone else victims)
        assert running.wait() != 0, running.text()
        running.no_orphans()
    status, text = call(argv, root / f"killed-{name}.log")
    assert status == 0, text
    assert curve(run) == whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "devices"), cases([("shards", "shard=2,zero=2", 2), ("one", "replicate=1", 1)])
)
def test_kill_inside_a_save(name: str, layout: str, devices: int, root: Path, request: pytest.FixtureRequest) -> None:
    run, draw = root / f"save-{name}", random.Random(1)
    argv = command(root, run.name, layout, devices)
    for _ in range(3):
        running = Running(argv, root / f"save-{name}.log")
        seen = len(events(run, "checkpoint_saved"))
        while running.poll() is None:
            folders = {path.name for path in (run / "checkpoints").glob("*")} if run.exists() else set()
            beside = [folder for folder in folders if folder.startswith(".writing-")]
            if beside and len(events(run, "checkpoint_saved")) > seen:
                break
            time.sleep(0.001)  # a save takes ten times as long
        time.sleep(draw.uniform(0, 0.02))
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        running.no_orphans()
    status, text = call(argv, root / f"save-{name}.log")
    assert status == 0, text
    found = curve(run)
    assert sorted(found) == list(range(1, STEPS + 1))
    if name == "one":
        assert found == request.getfixturevalue("whole")


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "bound"), cases([("float64", 1e-9), ("float32", 1e-5)]))
def test_another_layout_goes_on_along_the_same_curve(precision: str, bound: float, root: Path) -> None:
    kind = f",precision={precision}"
    more = ("--train.steps", "9", "--evaluation.every", "2", *DROPOUT)
    argv = words(root, f"same-{precision}", *more, layout="replicate=1" + kind)
    assert call(argv, root / "same.log")[0] == 0
    chain = [("shard=2,zero=3", 2, 3), ("tp=2,sequence=true,recompute=full", 2, 6), ("cp=2,microbatches=2", 2, 9)]
    same, run = root / f"same-{precision}", root / f"changing-{precision}"
    for layout, devices, stop in chain:
        argv = words(root, run.name, *more, layout=layout + kind, devices=devices)
        running = Running(argv, root / "changing.log", before=lambda stop=stop: _end_after(stop))
        assert running.wait() == (0 if stop == 9 else 1), running.text()
        running.no_orphans()
    expected, found = curve(root / f"same-{precision}"), curve(run)
    assert sorted(found) == sorted(expected)
    for step in expected:
        for got, wanted in zip(found[step], expected[step]):
            assert abs(got - wanted) <= bound * abs(wanted), (step, got, wanted)
    evaluated = [[event["loss"] for event in events(folder, "evaluated")] for folder in (same, run)]
    assert evaluated[1] == pytest.approx(evaluated[0], rel=bound)
    assert Manifest.read(run / "checkpoints" / "step-00000009").meta["validation_loss"] == evaluated[1][-2]


def _end_after(step: int) -> None:
    """Ends the run politely after a step, as a signal would; the last step needs no asking."""
    whole = Trainer._one_step

    def asked(self: Trainer):  # type: ignore[no-untyped-def]
        if self.step + 1 == step < self._deps.config.train.steps:
            self._deps.stop_asked.request()
        return whole(self)

    Trainer._one_step = asked  # type: ignore[method-assign]
