"""A node's supervisor as a child of its keeper, which starts it again when it was killed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from typing import IO

from meshwright.forking import tied_command

_POLL_S = 0.2
_LOOK_S = 1.0
_MOST_PAUSE_S = 15.0
_RESTARTS = 5
_STEADY_S = 600.0
"""A supervisor that lived for so long has its restarts back."""


class SupervisorProcess:
    """Runs one node's supervisor to the end of the run.

    The supervisor ends with the thread that called `run`, whatever ends that.

    Args:
        node: the node's number.
        command: returns the words of the command, at each start.
        say: takes a line for people.
        watch: called each second while the run isn't to end.
        output: file for what it prints; the keeper's own when None.
        environment: its variables; the keeper's own when None.
        workdir: its working directory; the keeper's own when None.
    """

    def __init__(
        self,
        node: int,
        command: Callable[[], list[str]],
        say: Callable[[str], None],
        *,
        watch: Callable[[], None] = lambda: None,
        output: IO[bytes] | None = None,
        environment: Mapping[str, str] | None = None,
        workdir: str | None = None,
    ) -> None:
        self._node, self._command, self._say, self._watch = node, command, say, watch
        self._output, self._environment, self._workdir = output, environment, workdir
        self._child: subprocess.Popen[bytes] | None = None
        self.stopping = False
        """Whether the run is to end, and a supervisor that is killed stays so."""

    def run(self) -> int:
        """Runs until the supervisor ends by itself; returns its exit status."""
        restarts, started_at = 0, time.monotonic()
        while True:
            status = self._run_once()
            if time.monotonic() - started_at > _STEADY_S:
                restarts = 0
            if status >= 0 or self.stopping or restarts == _RESTARTS:
                return status if status >= 0 else 128 - status
            # The kernel or a person killed it: its node's ranks are gone with it, the others go on meanwhile.
            restarts, started_at = restarts + 1, time.monotonic()
            self._say(f"the supervisor of node {self._node} was killed by signal {-status}; it is started again")
            time.sleep(min(2.0**restarts, _MOST_PAUSE_S) / 2)

    def _run_once(self) -> int:
        child = subprocess.Popen(
            tied_command(*self._command()),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            env=self._environment,
            cwd=self._workdir,
        )
        self._child, looked_at = child, time.monotonic()
        if self.stopping:
            child.terminate()
        while child.poll() is None:
            time.sleep(_POLL_S)
            if not self.stopping and time.monotonic() - looked_at > _LOOK_S:
                looked_at = time.monotonic()
                self._watch()
        return int(child.returncode)

    def terminate(self) -> None:
        """Ends the run with a checkpoint, by a signal to the supervisor."""
        self.stopping = True
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()
