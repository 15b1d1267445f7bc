"""What the kernel says of ranks: stopped, asleep, or at work; a disk, a debugger or a lack of cores is no sleep."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.monitor.progress import ProgressWriter, reset_progress
from meshwright.resilience.hang_watch import HangError, HangWatch
from meshwright.resilience.idle import GAP_S, IdleWatch


def computes() -> None:
    while True:
        pass


def sleeps() -> None:
    time.sleep(10**6)


class Forked:
    """Processes that do as they are told."""

    def __init__(self) -> None:
        self.pids: list[int] = []

    def start(self, work: Callable[[], None]) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                work()
            finally:
                os._exit(0)
        self.pids.append(pid)
        return pid

    def end(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@pytest.fixture
def forked() -> object:
    processes = Forked()
    yield processes
    processes.end()


def looked(watch: IdleWatch, pids: list[int], seconds: float) -> float:
    """Polls for some seconds; returns when it last did."""
    now = time.monotonic()
    end = now + seconds
    while now < end:
        time.sleep(0.05)
        now = time.monotonic()
        watch.poll(pids, now)
    return now


def test_a_process_computes_sleeps_or_is_stopped(forked: Forked) -> None:
    busy, asleep, stopped = forked.start(computes), forked.start(sleeps), forked.start(computes)
    os.kill(stopped, signal.SIGSTOP)
    watch = IdleWatch()
    now = looked(watch, [busy, asleep, stopped], 0.6)
    assert watch.idle_s(busy, now) == 0.0 and watch.stopped_s(busy, now) == 0.0
    assert watch.idle_s(asleep, now) > 0.3 and watch.stopped_s(asleep, now) == 0.0
    assert watch.stopped_s(stopped, now) > 0.3
    os.kill(stopped, signal.SIGCONT)
    now = looked(watch, [busy, asleep, stopped], 0.3)
    assert watch.stopped_s(stopped, now) == 0.0 and watch.idle_s(stopped, now) == 0.0
    watch.forget()
    assert watch.idle_s(asleep, now) == 0.0


def fake(proc: Path, state: str, ran: int, waited: int = 0, other: tuple[str, int] = ("S", 0)) -> None:
    for tid, (word, nanoseconds) in {7: (state, ran), 8: other}.items():
        folder = proc / f"7/task/{tid}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "stat").write_text(f"{tid} (a ) name) {word} 1 1\n")
        (folder / "schedstat").write_text(f"{nanoseconds} {waited if tid == 7 else 0} 1\n")


@pytest.mark.parametrize(
    ("after", "rests"),
    [
        ({"state": "S", "ran": 0}, True),
        ({"state": "S", "ran": 10**6, "other": ("S", 10**7)}, True),
        ({"state": "D", "ran": 0}, False),
        ({"state": "t", "ran": 0}, False),
        ({"state": "S", "ran": 0, "other": ("D", 0)}, False),
        ({"state": "S", "ran": 10**7}, False),
        ({"state": "R", "ran": 0, "waited": 10**8}, False),
        ({"state": "S", "ran": 0, "other": ("S", 5 * 10**7)}, False),
        ({"state": "R", "ran": 0}, False),
        ({"state": "S", "ran": 0, "other": ("R", 0)}, False),
        ({"state": "S", "ran": 0, "other": ("R", 10**7)}, True),
    ],
)
def test_what_counts_as_sleep(tmp_path: Path, after: dict, rests: bool) -> None:
    watch = IdleWatch(tmp_path)
    fake(tmp_path, "S", 0)
    watch.poll([7], 50.0)
    fake(tmp_path, **after)
    watch.poll([7], 50.1)
    assert (watch.idle_s(7, 50.1) > 0.05) is rests


def test_time_in_which_nobody_looked_says_nothing(tmp_path: Path) -> None:
    watch = IdleWatch(tmp_path)
    fake(tmp_path, "S", 0)
    for now in (50.0, 50.5, 50.9):
        watch.poll([7], now)
    assert watch.idle_s(7, 50.9) == pytest.approx(0.9)
    watch.poll([7], 51.0 + GAP_S)
    assert watch.idle_s(7, 51.0 + GAP_S) == 0.0
    assert IdleWatch(tmp_path / "none").idle_s(7, 1.0) == 0.0


def watched(path: Path, forked: Forked, phases: dict[Callable[[], None], tuple[str, str]], **more: float) -> HangWatch:
    """Two ranks that stamp where they are, and then do something."""
    reset_progress(path, len(phases))
    for rank, (work, (phase, waits)) in enumerate(phases.items()):

        def stamped(rank: int = rank, phase: str = phase, waits: str = waits, work: Callable = work) -> None:
            ProgressWriter(path, rank, 0).stamp(phase, 5, 0, waits)
            work()

        forked.start(stamped)
    return HangWatch(path, 0, len(phases), None, lambda rank: f"rank {rank}: replicate {rank}", **more)


def look_for(watch: HangWatch, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        watch.poll()
        time.sleep(0.05)


def waits() -> None:
    time.sleep(10**6)


@pytest.mark.parametrize(
    "waiting", [("forward", "all_gather over shard"), ("data", "receive over pp of the input of micro-batch 0")]
)
def test_ranks_that_all_sleep_within_a_step_hang_within_seconds(
    tmp_path: Path, forked: Forked, waiting: tuple[str, str]
) -> None:
    """A later stage of a pipeline waits for its input where it would read rows."""
    watch = watched(tmp_path / "p", forked, {waits: waiting, sleeps: ("backward", "")}, idle_s=0.5)
    with pytest.raises(HangError, match=r"rank 1: replicate 1 made no progress in backward .* asleep") as told:
        look_for(watch, 20.0)
    assert told.value.rank == 1


@pytest.mark.parametrize(
    ("work", "phase", "idle_s"),
    [(computes, "backward", 0.5), (sleeps, "record", 0.5), (sleeps, "data", 0.5), (sleeps, "backward", 0.0)],
)
def test_work_a_hook_and_no_limit_are_no_hang(
    tmp_path: Path, forked: Forked, work: Callable[[], None], phase: str, idle_s: float
) -> None:
    watch = watched(
        tmp_path / "p", forked, {waits: ("forward", "all_gather over shard"), work: (phase, "")}, idle_s=idle_s
    )
    look_for(watch, 1.5)


def test_a_stopped_rank_is_named_wherever_it_stands(tmp_path: Path, forked: Forked) -> None:
    watch = watched(tmp_path / "p", forked, {waits: ("forward", "all_gather over shard"), computes: ("record", "")})
    look_for(watch, 0.3)
    os.kill(forked.pids[1], signal.SIGSTOP)
    with pytest.raises(HangError, match="stopped, as by SIGSTOP") as told:
        look_for(watch, 20.0)
    assert told.value.rank == 1
