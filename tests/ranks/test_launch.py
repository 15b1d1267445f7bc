"""Forked ranks: results come back, the first failure is told first, and no process outlives its launcher."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.errors import DataError, LaunchError
from meshwright.launch.config import LaunchConfig
from meshwright.launch.contract import RankContext
from meshwright.launch.devices import Devices
from meshwright.launch.fork import ForkLauncher
from tests.ranks.group import run_contexts, run_ranks

ROOT = Path(__file__).parents[2]
LIMIT_S = 50.0
"""Less than any wait that the tests plant, and than the limit of a group's operations."""


def _launcher(n: int, **options) -> ForkLauncher:
    return ForkLauncher(n, devices=Devices(kind="cpu", count=n, found=n, cores=n), **options)


def _gone(pid: int) -> bool:
    """True when no process has this id, or only a zombie that its parent must still reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _wait_until(condition, seconds: float = 100.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_results_come_back_by_rank():
    def work(rank: int, factor: int):
        total = torch.full((3,), float(rank + 1))
        dist.all_reduce(total)
        return rank * factor, total

    results = run_ranks(3, work, 10)
    assert [first for first, _ in results] == [0, 10, 20]
    assert all(torch.equal(total, torch.full((3,), 6.0)) for _, total in results)


def test_a_result_larger_than_a_pipe_comes_back():
    results = run_contexts(2, lambda context: torch.full((500_000,), float(context.rank)))
    assert [result.sum().item() for result in results] == [0.0, 500_000.0]


def test_context_says_the_place():
    contexts = run_contexts(2, lambda c: (c.rank, c.world, c.local_rank, c.local_world, c.device, os.getpgid(0)))
    assert [context[:5] for context in contexts] == [(0, 2, 0, 2, "cpu"), (1, 2, 1, 2, "cpu")]
    assert len({context[5] for context in contexts} | {os.getpgid(0)}) == 3


def test_ranks_work_though_the_parent_has_an_openmp_pool():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        (torch.ones(300_000) * 2).exp()
        devices = Devices(kind="cpu", count=1, found=2, cores=2)
        work = lambda context: ((torch.ones(300_000) * 2).sum().item(), torch.get_num_threads())  # noqa: E731
        assert ForkLauncher(1, devices=devices).run(work, timeout_s=100) == [(600_000.0, 2)]
    finally:
        torch.set_num_threads(threads)


def test_the_rank_that_raised_is_told_first():
    def work(rank: int) -> None:
        if rank == 1:
            raise ValueError("the cause")
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        run_ranks(3, work)
    assert time.monotonic() - start < LIMIT_S
    lines = str(caught.value).splitlines()
    assert lines[0] == "[rank 1] ValueError: the cause"
    assert lines[1].startswith("Traceback") and 'raise ValueError("the cause")' in str(caught.value)
    assert lines[-1] == "all 3 ranks have been ended"


def test_own_errors_keep_their_class_and_get_the_place():
    def work(context: RankContext) -> None:
        if context.rank == 1:
            raise DataError("the token file is cut off")
        time.sleep(30)

    launcher = _launcher(2, label=lambda rank: f"replicate {rank}")
    with pytest.raises(DataError, match=r"^\[rank 1: replicate 1\] the token file is cut off$"):
        launcher.run(work, timeout_s=100)
    assert launcher.pids == ()


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), r"^\[rank 1\] was killed by SIGKILL"),
        (lambda: os._exit(3), r"^\[rank 1\] exited with status 3 before"),
        (lambda: sys.exit(3), r"^\[rank 1\] exited with status 3"),
        (lambda: os.abort(), r"^\[rank 1\] was killed by SIGABRT"),
    ],
)
def test_a_rank_that_ends_without_a_word_takes_the_others_down(ending, message, capfd):
    def work(rank: int) -> None:
        if rank == 1:
            ending()
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(LaunchError, match=message):
        run_ranks(2, work)
    assert time.monotonic() - start < LIMIT_S


def test_ranks_that_ignore_sigterm_are_killed_after_the_grace():
    def work(context: RankContext) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if context.rank == 0:
            time.sleep(0.2)
            raise ValueError("down")
        time.sleep(60)

    launcher = _launcher(2, config=LaunchConfig(grace_s=0.3))
    launcher.start(work)
    pids = launcher.pids
    start = time.monotonic()
    with pytest.raises(LaunchError, match="down"):
        launcher.wait(100)
    assert time.monotonic() - start < LIMIT_S
    assert all(not Path(f"/proc/{pid}").exists() for pid in pids)


def test_wait_has_a_limit():
    launcher = _launcher(2)
    launcher.start(lambda context: time.sleep(60 if context.rank == 1 else 0))
    pids = launcher.pids
    assert _wait_until(lambda: _gone(pids[0]))
    with pytest.raises(LaunchError, match=r"ranks \[1\] of 2 did not end within 0.5 s"):
        launcher.wait(0.5)
    assert all(not Path(f"/proc/{pid}").exists() for pid in pids)


def test_exit_handlers_that_hang_do_not_keep_a_rank():
    def work(context: RankContext) -> int:
        import atexit

        atexit.register(time.sleep, 60)
        return context.rank

    start = time.monotonic()
    assert run_contexts(2, work) == [0, 1]
    assert time.monotonic() - start < LIMIT_S


def test_processes_that_a_rank_started_go_with_it(tmp_path):
    def work(context: RankContext) -> int:
        return subprocess.Popen(["sleep", "60"]).pid

    (child,) = run_contexts(1, work)
    assert _wait_until(lambda: _gone(child))


def test_a_result_that_cannot_travel_is_an_error_of_that_rank():
    with pytest.raises(LaunchError, match=r"^\[rank 0\] what the rank returned \(function\) can't be pickled"):
        run_contexts(1, lambda context: lambda: None)


def test_another_launch_follows_a_failed_one():
    with pytest.raises(LaunchError):
        run_ranks(2, lambda rank: 1 // rank)
    assert run_ranks(2, lambda rank: rank) == [0, 1]


def _until_asked(context: RankContext) -> str:
    if context.rank == 0:
        os.kill(os.getppid(), signal.SIGTERM)
    while not context.stop.requested:
        time.sleep(0.01)
    return "asked"


def test_another_launch_does_not_remember_that_the_last_one_was_ended():
    launcher = _launcher(2)
    assert launcher.run(_until_asked, timeout_s=100) == ["asked", "asked"]
    assert launcher.interrupted and launcher.terminated
    assert launcher.run(lambda context: context.rank, timeout_s=100) == [0, 1]
    assert not launcher.interrupted and not launcher.terminated


def test_a_stop_is_asked_of_the_rank_and_of_no_process_that_it_started():
    """As a compiler is, which a request each second would end for good."""

    def work(context: RankContext) -> int | None:
        child = subprocess.Popen(["sleep", "60"])
        _until_asked(context)
        time.sleep(0.2)
        return child.poll()

    assert _launcher(1).run(work, timeout_s=100) == [None]


@pytest.mark.parametrize(("name", "number"), [("fork", errno.EAGAIN), ("pipe", errno.EMFILE)])
def test_a_rank_that_cannot_be_forked_ends_the_others_and_leaves_nothing_open(name, number, monkeypatch):
    launcher, whole, calls = _launcher(3), getattr(os, name), []

    def fails_at_second():
        calls.append(1)
        if len(calls) == 2:
            raise OSError(number, os.strerror(number))
        return whole()

    monkeypatch.setattr(os, name, fails_at_second)
    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(LaunchError, match=f"rank 1 can't be started: {os.strerror(number)}"):
        launcher.start(lambda context: time.sleep(60))
    assert os.listdir("/proc/self/fd") == descriptors and launcher.pids == ()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


def _script(body: str, tmp_path: Path) -> subprocess.Popen[str]:
    path = tmp_path / "script.py"
    path.write_text(body)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


LOOP = """
import os, sys, time
from meshwright.launch.devices import Devices
from meshwright.launch.fork import ForkLauncher

def work(context):
    os.write(1, f"pid {{os.getpid()}}\\n".encode())
    while not context.stop.requested:
        time.sleep(0.01)
    os.write(1, b"asked\\n")
    while not {polite}:
        time.sleep(0.01)
    return "saved"

launcher = ForkLauncher(2, devices=Devices(kind="cpu", count=2, found=2, cores=2))
try:
    print("result", launcher.run(work), launcher.interrupted, flush=True)
except KeyboardInterrupt:
    sys.exit(130)
"""


def _pids(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(process.stdout.readline().split()[1]) for _ in range(2)]


def test_no_orphan_when_the_launcher_is_killed(tmp_path):
    process = _script(LOOP.format(polite=False), tmp_path)
    pids = _pids(process)
    process.kill()
    process.communicate(timeout=100)
    assert _wait_until(lambda: all(_gone(pid) for pid in pids))


def test_first_interrupt_ends_politely(tmp_path):
    process = _script(LOOP.format(polite=True), tmp_path)
    pids = _pids(process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert "result ['saved', 'saved'] True" in out, err
    assert process.returncode == 0 and all(_gone(pid) for pid in pids)


def test_second_interrupt_ends_at_once(tmp_path):
    process = _script(LOOP.format(polite=False), tmp_path)
    pids = _pids(process)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None and process.stdout.readline() == "asked\n"
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=100)
    assert process.returncode == 130 and all(_gone(pid) for pid in pids)


TORCHRUN = """
import os

import torch
import torch.distributed as dist
from meshwright.launch.choice import choose_launcher
from meshwright.launch.rendezvous import init_group

def work(context):
    init_group(context, timeout_s=100, group_s=100)
    total = torch.tensor([float(context.rank + 1)])
    dist.all_reduce(total)
    os.write(1, f"total {context.rank} {context.world} {total.item()}\\n".encode())
    dist.barrier()
    dist.destroy_process_group()

choose_launcher(kind="cpu").run(work)
"""


@pytest.mark.slow
def test_under_torchrun(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(TORCHRUN)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("total"))
    assert lines == ["total 0 2 3.0", "total 1 2 3.0"]
