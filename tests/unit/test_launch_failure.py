"""Which failure is told first, what a rank's error looks like afterwards, and what a process may not be at a fork."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from meshwright import forking
from meshwright.errors import CheckpointError, LaunchError, PlanError
from meshwright.launch import host_memory
from meshwright.launch.failure import (
    LOST_CONTACT,
    RankFailure,
    describe_exception,
    describe_status,
    failure_error,
    first_failure,
    rank_prefix,
)
from meshwright.launch.signals import StopFlag


def _raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_a_lost_peer_is_never_the_cause():
    echo = describe_exception(0, _raised(RuntimeError("gloo: Connection closed by peer [::1]:3")), 1.0)
    cause = describe_status(1, -signal.SIGKILL, 2.0)
    assert echo.is_echo and not cause.is_echo
    assert first_failure([echo, cause]) is cause
    assert first_failure([echo]) is echo
    own = describe_exception(0, _raised(LaunchError("the group did not form: Connection closed by peer [::1]:3")), 1.0)
    cause = describe_exception(1, _raised(PlanError("replicate=4 needs 4 ranks, there are 2")), 2.0)
    assert own.error and own.is_echo and first_failure([own, cause]) is cause


def test_the_earliest_cause_is_told_and_the_others_follow():
    late = RankFailure(2, "ValueError: b", "Traceback b", time=2.0)
    failures = [late, RankFailure(0, "KeyError: a", "Traceback a", time=1.0)]
    text = str(failure_error(failures, 4, lambda rank: f"shard {rank}"))
    assert text.splitlines() == [
        "[rank 0: shard 0] KeyError: a",
        "Traceback a",
        "then [rank 2: shard 2] ValueError: b",
        "all 4 ranks have been ended",
    ]


def test_own_errors_keep_their_class():
    failure = describe_exception(3, _raised(CheckpointError("shard 2 is cut off")), 0.0)
    error = failure_error([failure], 4)
    assert type(error) is CheckpointError and str(error) == "[rank 3] shard 2 is cut off"


class _TwoWords(LaunchError):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def test_an_error_that_cannot_be_rebuilt_still_arrives():
    error = failure_error([describe_exception(0, _raised(_TwoWords("a", "b")), 0.0)], 1)
    assert type(error) is LaunchError and "a b" in str(error)


def test_statuses_in_words():
    assert describe_status(0, 3, 0.0).summary == "exited with status 3 before its work was done"
    assert describe_status(0, -11, 0.0).summary == "was killed by SIGSEGV"
    assert "memory" in describe_status(0, -9, 0.0).summary
    assert rank_prefix(7) == "[rank 7]" and rank_prefix(7, lambda rank: "") == "[rank 7]"


def test_stop_flag():
    flag = StopFlag()
    before = signal.getsignal(signal.SIGUSR2)
    try:
        flag.install(signal.SIGUSR2)
        assert not flag.requested
        signal.raise_signal(signal.SIGUSR2)
        assert flag.requested
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_thread_stands_in_the_way_of_a_fork():
    done = threading.Event()
    thread = threading.Thread(target=done.wait, args=(10,), name="writer")
    thread.start()
    try:
        assert "writer" in (forking.fork_obstacle() or "")
    finally:
        done.set()
        thread.join()
    assert forking.fork_obstacle() is None


@pytest.mark.parametrize(("status", "stands"), [(0, True), (100, True), (3, False)])
def test_an_initialised_gpu_driver_stands_in_the_way_of_a_fork(monkeypatch, status, stands):
    # 0: initialised; 100: initialised, without a GPU; 3: not initialised. Source: cuda.h, CUresult.
    driver = SimpleNamespace(cuDeviceGetCount=lambda count: status)
    monkeypatch.setattr(forking, "_loaded_libraries", lambda name: [driver])
    assert ("GPU driver" in (forking.fork_obstacle() or "")) is stands


def test_a_loaded_driver_that_nobody_can_ask_stands_in_the_way_of_a_fork(monkeypatch):
    monkeypatch.setattr(forking, "_loaded_libraries", lambda name: [None] if name == "libcuda.so" else [])
    assert "GPU driver" in (forking.fork_obstacle() or "")


REPLACED = """
import ctypes, os, shutil, sys
from meshwright import forking
source, folder = sys.argv[1:]
maps = lambda: open("/proc/self/maps").read()
for name, link in (("libgomp.so.1.0.0", "libgomp.so.1"), ("libgomp-a.so.1.2.3", "")):
    path = os.path.join(folder, name)
    shutil.copy(source, path)
    if link:
        os.symlink(name, os.path.join(folder, link))
    loaded = ctypes.CDLL(os.path.join(folder, link or name))
    os.remove(path)
    shutil.copy(source, path)  # as an upgrade puts another file there
    before = maps().count("libgomp")
    handles = [library._handle for library in forking._loaded_libraries(name[:9])]
    assert "(deleted)" in maps() and handles == [loaded._handle], (name, handles)
    assert maps().count("libgomp") == before, "it loaded another one"
print("whole")
"""


def test_a_library_whose_file_was_replaced_is_still_the_loaded_one(tmp_path):
    """In a process of its own, which keeps what it has loaded."""
    source = next((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    done = subprocess.run([sys.executable, "-c", REPLACED, source, tmp_path], capture_output=True, text=True)
    assert done.stdout == "whole\n", done.stderr


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_what_the_user_tuned_stays(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert not host_memory.keep_host_memory().kept


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(host_memory, "_has_glibc", lambda: False)
    assert host_memory.keep_host_memory() == host_memory.HostMemory(False, "the C library is not glibc")


def test_a_checkpoint_that_lost_contact_is_no_cause() -> None:
    echo = describe_exception(1, CheckpointError(f"saving failed: {LOST_CONTACT}: Connection reset by peer"), 1.0)
    killed = describe_status(0, -9, 2.0)
    assert echo.is_echo and not killed.is_echo
    assert first_failure([echo, killed]) is killed
