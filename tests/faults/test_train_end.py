"""A run ends as asked: Ctrl-C with a checkpoint, a second one at once, a lost rank within seconds; never an orphan."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.jobs import train
from meshwright.resilience.local_storage import LocalStorage
from meshwright.train.trainer import Trainer
from tests.runs import Running, call, curve, events, happened, last_step, wait_until, words, write_corpus
from tests.tiers import cases, further

ANY = -1
"""Every rank."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("end")
    write_corpus(root / "corpus.txt")
    return root


def at_step(step: int, rank: int, act: Callable[[Trainer], None]) -> Callable[[], None]:
    """Returns what makes a rank act when it has done ``step`` steps."""

    def plant() -> None:
        whole = Trainer._one_step

        def one_step(self: Trainer):  # type: ignore[no-untyped-def]
            if self.step == step and rank in (self._deps.rank, ANY):
                act(self)
            return whole(self)

        Trainer._one_step = one_step  # type: ignore[method-assign]

    return plant


def until_asked(trainer: Trainer) -> None:
    """Holds a rank until it is asked to end."""
    while not trainer._deps.stop_asked.requested:
        time.sleep(0.01)


@pytest.mark.parametrize(("layout", "devices"), cases([("shard=2,zero=2", 2), ("replicate=1", 1)]))
def test_one_interrupt_ends_with_a_checkpoint_and_goes_on_to_the_bit(layout: str, devices: int, root: Path) -> None:
    run, whole = root / f"asked-{devices}", root / f"whole-{devices}"
    options = {"layout": layout, "devices": devices}
    assert call(words(root, whole.name, **options), root / "log")[0] == 0
    argv = words(root, run.name, "--checkpoint.every", "0", "--recovery.idle-s", "0", **options)
    running = Running(argv, root / "asked.log", before=at_step(6, ANY, until_asked))
    wait_until(lambda: last_step(run) >= 6)
    running.kill(signal.SIGINT)
    assert running.wait() == 1, running.text()
    running.no_orphans()
    ended = last_step(run)
    assert ended == 7, "the step at whose beginning all were asked"
    assert f"interrupted after step {ended}; the same command goes on" in running.text()
    assert [event["step"] for event in events(run, "checkpoint_saved")] == [ended]
    assert [event["step"] for event in events(run, "interrupted")] == [ended]
    assert call(argv, root / "asked.log")[0] == 0
    assert curve(run) == curve(whole)


@pytest.mark.parametrize(("number", "expected"), further([(signal.SIGINT, 1), (signal.SIGTERM, 143)], (1,)))
def test_an_interrupt_while_ranks_start_is_not_lost(number: int, expected: int, root: Path) -> None:
    """It comes after the launcher was made and before it waits for its ranks."""
    run = root / f"starting-{number}"

    def plant() -> None:
        start = LocalStorage.start

        def interrupted_start(self: LocalStorage, *args: Any) -> None:
            start(self, *args)
            os.kill(os.getpid(), number)

        LocalStorage.start = interrupted_start  # type: ignore[assignment, method-assign]

    status, text = call(words(root, run.name, "--checkpoint.every", "0"), root / "starting.log", before=plant)
    assert status == expected, text
    (ended,) = events(run, "interrupted")
    assert ended["step"] == last_step(run) < 24
    assert [event["step"] for event in events(run, "checkpoint_saved")] == [ended["step"]]


@pytest.mark.parametrize(("number", "expected"), further([(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)]))
def test_a_signal_before_ranks_begin_ends_the_command_at_once(number: int, expected: int, root: Path) -> None:
    run = root / f"planning-{number}"

    def plant() -> None:
        def interrupted(*_: Any) -> None:
            os.kill(os.getpid(), number)
            time.sleep(600)

        train.make_plans = interrupted  # type: ignore[attr-defined]

    status, text = call(words(root, run.name), root / "planning.log", before=plant)
    assert status == expected and "Traceback" not in text and not events(run, "rank_started")
    assert text.endswith("interrupted\n") == (number == signal.SIGINT), text


def test_ranks_that_outstay_a_signal_are_killed_with_the_status_that_launchers_know(root: Path) -> None:
    argv = words(root, "outstaying", "--recovery.no-enabled", "--launch.stop-s", "1")
    running = Running([*argv, "--recovery.faults", "hang:rank=0,step=5"], root / "outstaying.log")
    wait_until(lambda: happened(root / "outstaying", "hang"))
    running.kill(signal.SIGTERM)
    assert running.wait() == 143, running.text()
    assert "within launch.stop_s = 1 s of the signal to end" in running.text()
    running.no_orphans()


def test_a_second_interrupt_ends_at_once(root: Path) -> None:
    run = root / "twice"
    argv = words(root, run.name, "--recovery.idle-s", "0", layout="replicate=2", devices=2)
    there, asked = root / "there", root / "asked"

    def hang(trainer: Trainer) -> None:
        there.touch()
        until_asked(trainer)
        asked.touch()
        time.sleep(600)

    running = Running(argv, root / "twice.log", before=at_step(3, 1, hang))
    wait_until(there.exists)
    running.kill(signal.SIGINT)
    wait_until(asked.exists)
    assert running.alive()
    running.kill(signal.SIGINT)
    assert running.wait() == 130, running.text()
    running.no_orphans()


def _raises(trainer: Trainer) -> None:
    raise ZeroDivisionError("planted fault")


@pytest.mark.parametrize(("layout", "rank"), further([("replicate=2", 1), ("shard=2,zero=3", 0)]))
def test_a_rank_that_raises_takes_the_others_down(layout: str, rank: int, root: Path) -> None:
    run = root / f"raised-{rank}"
    argv = words(root, run.name, layout=layout, devices=2)
    running = Running(argv, root / "raised.log", before=at_step(4, rank, _raises))
    assert running.wait() == 1
    running.no_orphans()
    text = running.text()
    axis = layout.partition("=")[0]
    told = text[text.index("Traceback") :]
    assert told.index("planted fault") < 3000 and f"rank {rank}: {axis} {rank}" in text
    assert text.index("ZeroDivisionError") < (text.find("Connection") + 1 or len(text))


def test_a_rank_that_is_killed_takes_the_others_down(root: Path) -> None:
    run = root / "lost"
    argv = words(root, run.name, "--recovery.no-enabled", layout="shard=2,zero=3", devices=2)
    status, text = call(
        argv, root / "lost.log", before=at_step(5, 1, lambda trainer: os.kill(os.getpid(), signal.SIGKILL))
    )
    assert status == 1 and last_step(run) in (4, 5), "rank 0 may be ended before it has written its fifth line"
    assert "rank 1" in text and "SIGKILL" in text


def test_numbers_that_are_not_finite_end_the_run_with_a_cure(root: Path) -> None:
    argv = words(root, "sick", "--optimizer.lr", "1e30", "--optimizer.clip", "0", "--schedule.shape", "constant")
    status, text = call(argv, root / "sick.log")
    assert status == 1
    assert "not finite for 5 steps in a row; lower optimizer.lr = 1e+30" in text
    assert [row["step"] for row in events(root / "sick", "step_skipped")][-1] == last_step(root / "sick") + 1
