"""Many calls of one function on the nodes of a Ray cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from meshwright.launch.config import RayTasksConfig
from meshwright.launch.ray_cluster import connect_to_ray, first_sentence

_RETRIES = 3
"""Calls of a task whose worker or node was lost, by Ray itself."""


class RayTasks:
    """Calls a function once for each number, as many at a time as the cluster has cores for.

    Args:
        config: the cluster, and what a call needs of it.
        function: called with ``*arguments`` and a number; a function of a module, which the workers import by name.
    """

    def __init__(self, config: RayTasksConfig, function: Callable[..., None]) -> None:
        self._config, self._function = config, function
        self._ray: Any = None
        self._pending: list[Any] = []
        self._failure = ""

    def start(self, arguments: Sequence[str], numbers: Sequence[int]) -> None:
        """Submits the calls, and returns at once.

        Raises:
            LaunchError: when Ray isn't installed, or no cluster answers.
        """
        if self._ray is None:
            self._ray = connect_to_ray(self._config.address)
        others = {"memory": self._config.memory_gb * 2**30} if self._config.memory_gb else {}
        remote = self._ray.remote(self._function).options(
            num_cpus=self._config.cpus, max_retries=_RETRIES, name="meshwright-prepare", **others
        )
        self._failure = ""
        self._pending = [remote.remote(*arguments, number) for number in numbers]

    def why_ended(self) -> str:
        """Returns why nothing runs any more; an empty text while something does."""
        if not self._pending:
            return self._failure or "every task has ended"
        ready, self._pending = self._ray.wait(self._pending, num_returns=len(self._pending), timeout=0)
        for reference in ready:
            try:
                self._ray.get(reference)
            except Exception as error:  # of the function, of its worker, of Ray
                self._failure = f"a task failed under Ray: {first_sentence(error)}"
        return "" if self._pending else self._failure or "every task has ended"

    def stop(self) -> None:
        """Cancels what runs and disconnects; Ray ends the tasks of a job that is gone."""
        if self._ray is None:
            return
        for reference in self._pending:
            with contextlib.suppress(Exception):
                self._ray.cancel(reference, force=True)
        self._pending = []
        with contextlib.suppress(Exception):
            self._ray.shutdown()
        self._ray = None
