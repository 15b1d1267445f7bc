"""Runs a function in a forked process for a limited time; its result comes back as JSON, never as code."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshwright.forking import die_with_parent, release_threads

_REAP_S = 2.0
"""Time for a killed process to disappear; one that waits for a dead disk stays, and isn't waited for."""
_EXIT_S = 0.3
"""Time for a process to exit after its pipe was closed."""
_MOST_BYTES = 1 << 24
"""Longest result."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a limited call."""

    value: Any
    """What the function returned; None when it failed."""
    failure: str
    """Why there is no value; empty when there is one."""


class LimitedCall:
    """A function under way in a process of its own, which ends with this one, with its limit, or by `close`.

    Args:
        function: called there; its result must be JSON.
        limit_s: seconds after which it is killed, with every process that it started.
    """

    def __init__(self, function: Callable[[], Any], limit_s: float) -> None:
        self._limit_s, self._deadline_s = limit_s, time.monotonic() + limit_s
        parent = os.getpid()
        # Otherwise the child may write what is buffered here once more.
        sys.stdout.flush()
        sys.stderr.flush()
        release_threads()
        self._pipe, write_fd = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 warns of any thread, even OpenBLAS's, which survive a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            _run_child(function, write_fd, self._pipe, parent)
        os.close(write_fd)

    def result(self) -> Outcome:
        """Waits for the function's end, and closes."""
        received = bytearray()
        try:
            while len(received) < _MOST_BYTES:
                if not select.select([self._pipe], [], [], max(0.0, self._deadline_s - time.monotonic()))[0]:
                    return Outcome(None, f"it did not end within {self._limit_s:g} s and was ended")
                block = os.read(self._pipe, 1 << 16)
                if not block:
                    break
                received += block
        finally:
            status = self.close()
        try:
            values = json.loads(received)
            return Outcome(values["value"], str(values["failure"]))
        except (ValueError, TypeError, KeyError):
            return Outcome(None, f"its process ended without a result ({status})")

    def close(self) -> str:
        """Ends the process and what it started; returns how it ended. A second call does nothing."""
        if not self._pid:
            return ""
        os.close(self._pipe)
        pid, self._pid = self._pid, 0
        # A process that has sent its result ends by itself: only then the status is its own.
        status = _reap(pid, _EXIT_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        status = _reap(pid, _REAP_S) if status is None else status
        if status is None:
            return "it can't be ended: it waits in the kernel"
        return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit status {os.WEXITSTATUS(status)}"


def _reap(pid: int, limit_s: float) -> int | None:
    """Returns a child's wait status once it has ended; None when it still runs after the limit."""
    deadline_s = time.monotonic() + limit_s
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended or time.monotonic() > deadline_s:
            return status if ended else None
        time.sleep(0.002)


def call_with_limit(function: Callable[[], Any], limit_s: float) -> Outcome:
    """Calls a function in a process of its own, and returns what it returned or why it did not."""
    return LimitedCall(function, limit_s).result()


def _run_child(function: Callable[[], Any], write_fd: int, read_fd: int, parent: int) -> None:
    """Runs the function in the forked process and never returns."""
    try:
        die_with_parent(parent)
        # A group of its own: the tools that a check starts are ended with it.
        os.setpgid(0, 0)
        os.close(read_fd)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        # Gloo and NCCL print on their own.
        null_fd = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null_fd, descriptor)
        try:
            values = {"value": function(), "failure": ""}
        except Exception as error:
            values = {"value": None, "failure": f"{type(error).__name__}: {error}"}
        encoded = memoryview(json.dumps(values).encode())
        while encoded:
            encoded = encoded[os.write(write_fd, encoded) :]
    finally:
        os._exit(0)
