"""A node of a run under Ray, as its actor runs it: the supervisor is a child process of the actor's worker.

Ray's workers import this module on every node, so it imports nothing that is heavy.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.launch.supervisor_process import SupervisorProcess

_SHARED_S = 10.0
"""A network file system may show a new file this late."""
_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedFile:
    """A file by which a node sees whether it shares the run directory with the driver."""

    path: str
    """Absolute path of the file."""
    text: str
    """Its contents as the driver wrote them."""
    workdir: str
    """Working directory of the run, which the node must have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyNode:
    """What a node says of itself before its supervisor starts."""

    host: str
    """Name of the host."""
    address: str
    """Address by which Ray's other nodes reach it."""
    problem: str
    """Why no supervisor can run there, as the end of a sentence; empty when one can."""


class RayNode:
    """Runs a node's supervisor; the class of an actor, whose methods run in threads of their own."""

    def __init__(self, node: int, output: str) -> None:
        self._node, self._output = node, output
        self._supervisor: SupervisorProcess | None = None
        self._stopping = False

    def report(self, shared: SharedFile) -> ReadyNode:
        """Returns what this node is, and whether it sees the run directory."""
        import ray

        problem = ""
        if not Path(shared.workdir).is_dir():
            problem = f"has no {shared.workdir}, the working directory of this command"
        elif not _shows(shared):
            problem = f"doesn't see {shared.path}: all nodes and this host must share the run directory"
        return ReadyNode(host=socket.gethostname(), address=ray.util.get_node_ip_address(), problem=problem)

    def run(self, argv: Sequence[str], environment: Mapping[str, str], workdir: str) -> int:
        """Runs the supervisor until it ends by itself.

        Args:
            argv: words behind ``meshwright``.
            environment: variables beside those of this process.
            workdir: its working directory.

        Returns:
            Its exit status.
        """
        command = [sys.executable, "-m", "meshwright", *argv]
        with open(self._output, "ab") as output:

            def say(text: str) -> None:
                output.write(f"{text}\n".encode())
                output.flush()

            self._supervisor = SupervisorProcess(
                self._node, lambda: command, say, output=output, environment={**os.environ, **environment},
                workdir=workdir,
            )  # fmt: skip
            if self._stopping:
                return 1
            return self._supervisor.run()

    def terminate(self) -> None:
        """Ends the run with a checkpoint."""
        self._stopping = True
        if self._supervisor is not None:
            self._supervisor.terminate()


def supervisor_environment(variables: Sequence[str]) -> dict[str, str]:
    """Returns what supervisors get beside the environment of Ray's workers: this process's PYTHONPATH, and variables.

    Args:
        variables: as ``NAME=VALUE``.
    """
    path = os.environ.get("PYTHONPATH")
    return ({"PYTHONPATH": path} if path else {}) | dict(text.split("=", 1) for text in variables)


def _shows(shared: SharedFile) -> bool:
    deadline = time.monotonic() + _SHARED_S
    while True:
        try:
            if Path(shared.path).read_text(encoding="utf-8") == shared.text:
                return True
        except (OSError, UnicodeDecodeError):
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
