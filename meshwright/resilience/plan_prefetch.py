"""Plans for fewer ranks, made in a forked process before a failure needs them."""

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
"""Returns the plan and model analysis for a number of ranks; raises `MeshwrightError` without a layout."""


class PlanPrefetcher:
    """Caches a planner's answers, computed in advance where possible.

    Args:
        plan: the planner; its answers are picklable.
    """

    def __init__(self, plan: Planner) -> None:
        self._plan = plan
        self._answers: dict[int, Any] = {}
        self._requested: set[int] = set()
        self._pid, self._pipe = 0, -1
        self._received = bytearray()

    def start(self, counts: Sequence[int]) -> None:
        """Starts planning for numbers of ranks in the child; does nothing while it works, or when all are requested."""
        self._collect()
        new_counts = [count for count in counts if count not in self._requested]
        if self._pid or not new_counts:
            return
        # Requested once, answered or not: a child that died isn't retried in the background.
        self._requested.update(new_counts)
        self._pipe, result_fd = os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            _plan_in_child(self._plan, new_counts, result_fd, parent)
        os.close(result_fd)
        os.set_blocking(self._pipe, False)

    def answer(self, count: int) -> tuple[Any, bool]:
        """Returns the planner's answer, and whether it was cached.

        Raises:
            MeshwrightError: as the planner does.
        """
        self._collect()
        was_cached = count in self._answers
        if not was_cached:
            try:
                # Not prefetched, or its child is still working or died: plan here and now.
                self._answers[count] = self._plan(count)
            except MeshwrightError as error:
                # Refusals are cached too: planning again would refuse again.
                self._answers[count] = error
        answer = self._answers[count]
        if isinstance(answer, MeshwrightError):
            raise answer
        return answer, was_cached

    def pending(self, count: int) -> bool:
        """Returns whether the child may still be computing an answer, so that `answer` would repeat its work."""
        self._collect()
        return count not in self._answers and bool(self._pid)

    def learn(self, count: int, answer: Any) -> None:
        """Adds an answer that was computed elsewhere."""
        self._answers[count] = answer
        self._requested.add(count)

    def _collect(self) -> None:
        """Reads the child's answers; requests of a child that died are left to `answer`."""
        while self._pid:
            try:
                chunk = os.read(self._pipe, 1 << 20)
            except BlockingIOError:
                return
            self._received += chunk
            if chunk:
                continue
            self._reap()
            with contextlib.suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # A partial pickle of a killed child raises, and is ignored.
                self._answers.update(pickle.loads(bytes(self._received)))
            self._received.clear()

    def _reap(self) -> None:
        os.close(self._pipe)
        os.waitpid(self._pid, 0)
        self._pid, self._pipe = 0, -1

    def close(self) -> None:
        """Kills the child, if it is still working."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            self._reap()


def _plan_in_child(plan: Planner, counts: Sequence[int], result_fd: int, parent: int) -> None:
    """Plans for each count, writes the pickled answers to the pipe, and exits; runs in the forked process."""
    try:
        warnings.simplefilter("ignore")
        die_with_parent(parent)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        # Planning for a failure that may never come must not slow down training.
        os.nice(10)
        answers: dict[int, Any] = {}
        for count in counts:
            try:
                answers[count] = plan(count)
            except MeshwrightError as error:
                answers[count] = error
        # The pipe may be smaller than the answers: write until all is taken.
        data = memoryview(pickle.dumps(answers))
        while data:
            data = data[os.write(result_fd, data) :]
    finally:
        os._exit(0)
