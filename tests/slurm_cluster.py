"""A real Slurm on this machine for tests: munged, slurmctld and some slurmd, each node a daemon of its own."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock
CredType=cred/munge
SlurmctldPort={controller}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=0
SlurmdTimeout={timeout}
SlurmctldTimeout=10
InactiveLimit=0
KillWait=20
ReturnToService=2
JobRequeue=1
JobAcctGatherType=jobacct_gather/none
SlurmctldParameters=enable_configless
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP OverSubscribe=YES:4
"""


def missing() -> str:
    """Returns why no Slurm can be started here; empty where one can."""
    absent = [name for name in PROGRAMS if _path(name) is None]
    if absent:
        return f"Slurm isn't installed: no {', '.join(absent)} (Debian: slurm-wlm)"
    return "" if os.geteuid() == 0 else "slurmd of several nodes on one machine needs root"


def _path(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def free_port() -> int:
    """Returns a port of 127.0.0.1 that nobody uses just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class SlurmCluster:
    """Slurm with nodes n0, n1, ... on 127.0.0.1; a context manager that leaves no daemon behind.

    Args:
        root: folder for its files.
        nodes: how many.
        timeout_s: after which slurmctld calls a silent slurmd down.
    """

    def __init__(self, root: Path, nodes: int = 3, timeout_s: int = 6) -> None:
        self.root, self.count = root, nodes
        self.environment = dict(os.environ, SLURM_CONF=str(root / "slurm.conf"))
        self._timeout_s = timeout_s
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> SlurmCluster:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o755)
        (self.root / "state").mkdir()
        host = socket.gethostname().partition(".")[0]
        cores = 2
        lines = [
            f"NodeName=n{node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs={cores} State=UNKNOWN"
            for node in range(self.count)
        ]
        text = _CONF.format(
            host=host, root=self.root, controller=free_port(), timeout=self._timeout_s, nodes="\n".join(lines)
        )
        (self.root / "slurm.conf").write_text(text)
        key = self.root / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self._run_daemon(
            "munged", "--foreground", "--force", f"--socket={self.root}/munge.sock", f"--key-file={key}",
            f"--pid-file={self.root}/munged.pid", f"--log-file={self.root}/munged.log",
            f"--seed-file={self.root}/munged.seed", "--num-threads=2",
        )  # fmt: skip
        self.wait_until(lambda: (self.root / "munge.sock").exists())
        self._run_daemon("slurmctld", "-D", "-c")
        for node in range(self.count):
            self.start_node(node)
        self.wait_until(lambda: self.states().count("idle") == self.count, 30.0)

    def lives(self, node: int) -> bool:
        """Whether a node's slurmd runs."""
        return self._daemons[f"n{node}"].poll() is None

    def start_node(self, node: int) -> None:
        """Starts a node's slurmd."""
        self._run_daemon("slurmd", "-D", "-N", f"n{node}", key=f"n{node}")

    def _run_daemon(self, name: str, *argv: str, key: str = "") -> None:
        path = _path(name)
        assert path is not None, name
        log = (self.root / f"{key or name}.out").open("ab")
        self._daemons[key or name] = subprocess.Popen(
            [path, *argv],
            env=self.environment,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        log.close()

    def call(self, *argv: str) -> str:
        """Runs a command of Slurm's and returns what it printed."""
        done = subprocess.run(argv, env=self.environment, capture_output=True, text=True, timeout=60)
        return done.stdout if done.returncode == 0 else ""

    def states(self) -> list[str]:
        """Returns the nodes' states."""
        return self.call("sinfo", "-h", "-N", "-o", "%t").split()

    def node_processes(self, node: int) -> list[int]:
        """Returns a node's daemon, its step daemons and all that these have started."""
        daemon = self._daemons[f"n{node}"].pid
        parents = parent_pids()
        steps = {pid for pid in parents if "slurmstepd" in "".join(_words(pid)[:1])}
        # Another test's cluster may have a node of that name.
        own = re.compile(rf"{re.escape(str(self.root))}/.*\bn{node}\b")
        roots = {daemon} | {pid for pid in steps if own.match(_node_of(pid))}
        return [pid for pid in parents if descends(pid, roots, parents)]

    def kill_node(self, node: int) -> None:
        """Kills everything of a node at once, as a loss of power does."""
        # Stopped first: srun has a process beside it that ends the step on all nodes when srun alone is killed.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in self.node_processes(node):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        self._daemons[f"n{node}"].wait(10)

    def wait_until(self, condition: Callable[[], object], limit_s: float = 20.0) -> None:
        """Waits for a condition, a limited time."""
        end = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end, (self.root / "slurmctld.log").read_text()[-2000:]
            time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        self.call("scancel", "--user=root", "--signal=KILL", "--full")
        self.call("scancel", "--user=root")
        deadline = time.monotonic() + 5.0
        while self.call("squeue", "-h") and time.monotonic() < deadline:
            time.sleep(0.1)
        for node in range(self.count):
            if f"n{node}" in self._daemons:
                self.kill_node(node)
        for daemon in self._daemons.values():
            if daemon.poll() is None:
                daemon.kill()
            daemon.wait(10)


def parent_pids() -> dict[int, int]:
    """Returns each process's parent."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def _words(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return []


def _node_of(pid: int) -> str:
    """Returns the node of a step daemon, by the spool folder that it works in or its files name."""
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(descriptor)
                if "slurmd-" in target or "spool-" in target:
                    return target
    return ""


def descends(pid: int, roots: set[int], parents: dict[int, int]) -> bool:
    """Whether a process is among some others, or comes from one of them."""
    while pid > 1:
        if pid in roots:
            return True
        pid = parents.get(pid, 0)
    return False
