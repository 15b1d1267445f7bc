"""Plans for fewer ranks made before they are needed, by a process of its own, so that nobody waits for them."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.forking import die_with_parent

Planner = Callable[[int], Any]
"""Gives what a run of that many ranks needs; raises `MeshwrightError` where there is no layout."""


class PlanPrefetcher:
    """Answers of a planner, made beforehand where possible.

    Args:
        plan: the planner; what it returns is picklable.
    """

    def __init__(self, plan: Planner) -> None:
        self._plan = plan
        self._known: dict[int, Any] = {}
        self._asked: set[int] = set()
        self._pid, self._pipe = 0, -1
        self._read = bytearray()

    def start(self, counts: Sequence[int]) -> None:
        """Starts to plan for some numbers of ranks; does nothing while it is at work, or when all were asked for."""
        self._collect()
        wanted = [count for count in counts if count not in self._asked]
        if self._pid or not wanted:
            return
        self._asked.update(wanted)
        self._pipe, send = os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            _work(self._plan, wanted, send, parent)
        os.close(send)
        os.set_blocking(self._pipe, False)

    def answer(self, count: int) -> tuple[Any, bool]:
        """Returns the planner's answer, and whether it was there already.

        Raises:
            MeshwrightError: as the planner does.
        """
        self._collect()
        known = count in self._known
        if not known:
            try:
                self._known[count] = self._plan(count)
            except MeshwrightError as error:
                self._known[count] = error
        found = self._known[count]
        if isinstance(found, MeshwrightError):
            raise found
        return found, known

    def pending(self, count: int) -> bool:
        """Returns whether the process is still at work on an answer, so that `answer` would do its work again."""
        self._collect()
        return count not in self._known and bool(self._pid)

    def learn(self, count: int, answer: Any) -> None:
        """Takes over an answer that is known from elsewhere."""
        self._known[count] = answer
        self._asked.add(count)

    def _collect(self) -> None:
        """Takes in what the process has sent; one that died leaves its questions to `answer`."""
        while self._pid:
            try:
                chunk = os.read(self._pipe, 1 << 20)
            except BlockingIOError:
                return
            self._read += chunk
            if chunk:
                continue
            self._end()
            with contextlib.suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._known.update(pickle.loads(bytes(self._read)))
            self._read.clear()

    def _end(self) -> None:
        os.close(self._pipe)
        os.waitpid(self._pid, 0)
        self._pid, self._pipe = 0, -1

    def close(self) -> None:
        """Ends the process, if it is still at work."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            self._end()


def _work(plan: Planner, counts: Sequence[int], send: int, parent: int) -> None:
    """Plans, sends what came of it, and ends; in the forked process."""
    try:
        warnings.simplefilter("ignore")
        die_with_parent(parent)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.nice(10)
        found: dict[int, Any] = {}
        for count in counts:
            try:
                found[count] = plan(count)
            except MeshwrightError as error:
                found[count] = error
        data = memoryview(pickle.dumps(found))
        while data:
            data = data[os.write(send, data) :]
    finally:
        os._exit(0)
