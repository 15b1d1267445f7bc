"""A real Ray cluster on this machine for tests: a head without cores and some raylets, each of a session of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.slurm_cluster import descends, free_port, parent_pids

_COMMON = (
    *("--object-store-memory", "80000000", "--disable-usage-stats", "--min-worker-port", "0", "--max-worker-port", "0"),
    *("--dashboard-agent-listen-port", "0", "--block"),
)
_START_S = 300.0
_RAYLET_S, _MOST_STARTS = 60, 4
"""Seconds after which `ray start` gives a raylet up, and how often it is tried."""


def missing() -> str:
    """Returns why no Ray can be started here; empty where one can."""
    if importlib.util.find_spec("ray") is None:
        return "Ray isn't installed here: pip install 'meshwright[ray]'"
    return ""


class RayTestCluster:
    """Ray with nodes 0, 1, ... of one core at 127.0.0.2, 127.0.0.3, ...; a context manager that leaves nothing behind.

    Args:
        root: folder for its files.
        nodes: how many, beside the head.
    """

    def __init__(self, root: Path, nodes: int = 3) -> None:
        self.root, self.count = root, nodes
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = dict(
            os.environ, PYTHONPATH=os.pathsep.join(sys.path), RAY_raylet_start_wait_time_s=str(_RAYLET_S)
        )
        # Sockets below this folder have room for 107 characters; a test's own folder may be longer.
        self._files = Path(f"/tmp/ray-test-{os.getpid()}")
        self.address = self.client_address = ""

    def __enter__(self) -> RayTestCluster:
        self.root.mkdir(parents=True)
        try:
            port, client_port = free_port(), free_port()
            # The head is no node of the run: where the driver is attached nothing is killed.
            self._start(
                "head", "--head", "--port", str(port), "--num-cpus", "0", "--include-dashboard", "false",
                "--ray-client-server-port", str(client_port), "--temp-dir", str(self._files),
            )  # fmt: skip
            self.address = f"127.0.0.1:{port}"
            # Ray colours its words where the environment asks for it.
            output = re.sub(r"\x1b\[[\d;]*m", "", (self.root / "head.out").read_text())
            host = re.search(r"Local node IP: ([\w.:]+)", output)
            assert host is not None
            self.client_address = f"ray://{host[1]}:{client_port}"
            for node in range(self.count):
                self.start_node(node)
        except BaseException:
            self.__exit__()
            raise
        return self

    def lives(self, node: int) -> bool:
        """Whether a node's raylet runs."""
        return self._processes[f"n{node}"].poll() is None

    def start_node(self, node: int) -> None:
        """Starts a node's raylet and waits until it is in the cluster."""
        address = f"127.0.0.{node + 2}"
        self._start(f"n{node}", "--node-ip-address", address, "--address", self.address, "--num-cpus", "1")

    def _start(self, name: str, *words: str) -> None:
        path = self.root / f"{name}.out"
        # A raylet ends itself where its agent takes more than 15 s to start, as it may on busy cores.
        for _ in range(_MOST_STARTS):
            with path.open("wb") as output:
                self._processes[name] = subprocess.Popen(
                    [sys.executable, "-m", "ray.scripts.scripts", "start", *words, *_COMMON],
                    env=self._environment,
                    stdout=output,
                    stderr=output,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            self.wait_until(lambda: "will now block" in path.read_text() or self._processes[name].poll() is not None)
            if self._processes[name].poll() is None:
                return
        raise AssertionError(path.read_text())

    def kill_node(self, node: int) -> None:
        """Kills everything of a node at once, as a loss of power does."""
        self._kill(f"n{node}")

    def _kill(self, name: str) -> None:
        root = self._processes[name].pid
        for number in (signal.SIGSTOP, signal.SIGKILL):
            parents = parent_pids()
            for pid in [pid for pid in parents if descends(pid, {root}, parents)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        self._processes[name].wait(10)

    def wait_until(self, condition: Callable[[], object], limit_s: float = _START_S) -> None:
        """Waits for a condition, a limited time."""
        end = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end, {path.name: path.read_text()[-500:] for path in self.root.glob("*.out")}
            time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        for name in reversed(self._processes):
            if self._processes[name].poll() is None:
                self._kill(name)
        subprocess.run(["rm", "-rf", str(self._files)], check=False)
