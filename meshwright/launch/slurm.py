"""Slurm: the sbatch script of a run, where in a job this process stands, and the scheduler's own commands."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.errors import LaunchError
from meshwright.launch.addresses import address_to
from meshwright.launch.config import SlurmConfig
from meshwright.launch.contract import CommandLauncher, HostCommand

_CALL_S = 30.0
"""Limit of a command that asks slurmctld."""
_LAST_STEP = 0xFFFFFFF0
"""Step ids from here on are Slurm's own: batch, extern, interactive. Source: slurm.h, SLURM_MAX_NORMAL_STEP_ID."""
_NODE, _PEER, _REPLACE = "MESHWRIGHT_NODE", "MESHWRIGHT_PEER", "MESHWRIGHT_REPLACE"
_JOB, _NAMES = "MESHWRIGHT_JOB", "MESHWRIGHT_NAMES"
_WATCHED = "MESHWRIGHT_WATCHED"
"""Environment of a node that is started again: its number, another one's name, the run's job and its nodes."""
_HARDWARE_HINT = (
    "; sinfo -o '%P %D %c %G' lists each partition's nodes, cores and GPUs: where it shows no GPU, give "
    "slurm.cpus_per_node instead of slurm.gpus_per_node"
)


@dataclass(frozen=True, kw_only=True)
class SlurmPlace:
    """Where this process stands in a job."""

    job: str
    """Id of the job."""
    nodes: int
    """Nodes of the run."""
    node: int | None = None
    """Number of this node in the run; None for the process that starts the nodes' commands."""
    names: tuple[str, ...] = ()
    """Slurm's names of the nodes, by number, as the job began."""
    peer: str = ""
    """Name of another node, on the route to which this one's address is found; empty for a run of one node."""
    replaces: bool = False
    """Whether other nodes may be asked for in the stead of lost ones."""
    is_watched: bool = False
    """Whether the job's script looks after lost nodes, as long as its host is in the job."""
    is_batch: bool = False
    """Whether this is the job's batch script."""

    def meet(self) -> str:
        """Returns the address at which node 0 is met: its own on node 0, else a name or address on the way."""
        peer_address = node_address(self.peer)
        # The own name may resolve to 127.0.1.1 here, where nobody else reaches it.
        return address_to(peer_address) if self.node == 0 else peer_address


def slurm_place(environment: Mapping[str, str] | None = None) -> SlurmPlace | None:
    """Reads from the environment where in a job this process stands; None outside of jobs.

    Raises:
        LaunchError: when srun started several tasks a node, or a variable isn't what Slurm sets.
    """
    values = os.environ if environment is None else environment
    # Whose RANK is set was started by torchrun, in a job or not.
    if "SLURM_JOB_ID" not in values or "RANK" in values:
        return None
    job, replaces, is_watched = values["SLURM_JOB_ID"], values.get(_REPLACE) == "1", values.get(_WATCHED) == "1"
    try:
        if _NODE in values:
            job, node, names = values[_JOB], int(values[_NODE]), tuple(values[_NAMES].split(","))
            return SlurmPlace(
                job=job, nodes=len(names), node=node, names=names, peer=values[_PEER], replaces=replaces,
                is_watched=is_watched,
            )  # fmt: skip
        if int(values.get("SLURM_STEP_ID", _LAST_STEP)) >= _LAST_STEP:
            nodes = int(values.get("SLURM_JOB_NUM_NODES") or values["SLURM_NNODES"])
            names = expand_hostlist(values.get("SLURM_JOB_NODELIST", ""))
            is_batch = "SLURM_TASK_PID" in values and "SLURM_STEP_ID" not in values
            return SlurmPlace(job=job, nodes=nodes, names=names, replaces=replaces, is_batch=is_batch)
        nodes, tasks = int(values["SLURM_STEP_NUM_NODES"]), int(values["SLURM_STEP_NUM_TASKS"])
        node = int(values["SLURM_NODEID"])
    except (KeyError, ValueError) as error:
        raise LaunchError(f"the environment of this Slurm job isn't complete ({error}); start with srun") from None
    if tasks != nodes:
        raise LaunchError(
            f"srun started {tasks} tasks on {nodes} nodes; a supervisor forks a node's ranks by itself: give srun "
            "--ntasks-per-node=1, or start torchrun with it"
        )
    names = expand_hostlist(values.get("SLURM_STEP_NODELIST", ""))
    peer = names[1 if node == 0 else 0] if nodes > 1 else ""
    return SlurmPlace(job=job, nodes=nodes, node=node, names=names, peer=peer, replaces=replaces, is_watched=is_watched)


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Returns the names that Slurm writes as ``gpu[01-03,7],login``.

    Raises:
        LaunchError: for another text.
    """
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        head, bracket, rest = part.partition("[")
        if not bracket:
            names.append(part)
            continue
        numbers, closing, tail = rest.partition("]")
        for number_range in numbers.split(","):
            first, dash, last = number_range.partition("-")
            if not closing or not first.isdigit() or (dash and not last.isdigit()):
                raise LaunchError(f"{text!r} is not a list of Slurm's nodes; scontrol show hostnames writes it out")
            for index in range(int(first), int(last or first) + 1):
                # A tail may hold brackets of its own: r[0-1]n[0-3].
                names += [f"{head}{index:0{len(first)}d}{end}" for end in (expand_hostlist(tail) if tail else ("",))]
    return tuple(names)


def call_slurm(*command: str) -> str | None:
    """Runs one of Slurm's commands and returns what it printed; None when it failed or isn't installed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CALL_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def partition_gpus(partition: str) -> set[int]:
    """Asks Slurm how many GPUs nodes of a partition have; more than one number where they differ, none where unknown.

    Args:
        partition: its name; the default one when empty.
    """
    where = (f"--partition={partition}",) if partition else ()
    shown = call_slurm("sinfo", "--noheader", *where, "--format=%P|%G") or ""
    counts: set[int] = set()
    for name, _, resources in (line.strip().partition("|") for line in shown.splitlines()):
        # The default partition's name ends in a star. A resource is gpu:8, gpu:h100:8(S:0-1), or (null).
        if partition or name.endswith("*"):
            counts.add(sum(map(int, re.findall(r"\bgpu(?::[^:,(]+)?:(\d+)", resources))))
    return counts


def submit_script(path: Path, *options: str, environment: Mapping[str, str] | None = None) -> str:
    """Runs sbatch on a script and returns what it printed.

    Args:
        path: the script.
        options: of sbatch.
        environment: of sbatch and so of the job; this process's when None.

    Raises:
        LaunchError: with Slurm's sentence when it refuses.
    """
    command = ("sbatch", *options, str(path))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CALL_S, env=environment)
    except FileNotFoundError:
        raise LaunchError("sbatch isn't here; submit from a login node of a Slurm cluster, or --on local") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"sbatch didn't answer within {_CALL_S:g} s; try squeue") from None
    if done.returncode != 0:
        sentence = re.sub(r"sbatch: error: |allocation failure: ", "", done.stderr.strip()).replace("\n", "; ")
        hint = _HARDWARE_HINT if re.search(r"gres|node configuration", sentence) else ""
        raise LaunchError(f"Slurm refuses the job: {sentence}{hint}")
    return done.stdout.strip()


def node_address(name: str) -> str:
    """Returns a node's name where it resolves, else the address that Slurm has of it."""
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        shown = call_slurm("scontrol", "--oneliner", "show", "node", name) or ""
        match = re.search(r"\bNodeAddr=(\S+)", shown)
        return match[1] if match else name
    return name


def job_nodes(job: str) -> tuple[str, tuple[str, ...]] | None:
    """Returns a job's batch host and the names of its nodes now; None when it doesn't run, or nobody answers."""
    shown = call_slurm("squeue", "--noheader", f"--jobs={job}", "--states=RUNNING", "--format=%B %N")
    if not shown:
        return None
    batch_host, _, names = shown.partition(" ")
    return batch_host, expand_hostlist(names.strip())


def replacement_name(job: str, node: int) -> str:
    """Returns the name of the job that stands in for a node of another job."""
    return f"meshwright-{job}-node-{node}"


def cancel_replacements(job: str, nodes: int) -> None:
    """Cancels the jobs that stand in for lost nodes of a job."""
    names = ",".join(replacement_name(job, node) for node in range(nodes))
    if call_slurm("squeue", "--noheader", "--me", f"--name={names}", "--format=%i"):
        call_slurm("scancel", f"--name={names}", "--me")


def watched_environment() -> dict[str, str]:
    """Returns the environment of a step whose job's script looks after lost nodes."""
    return {**os.environ, _WATCHED: "1"}


def restart_environment(place: SlurmPlace, node: int) -> dict[str, str]:
    """Returns the environment of a node that this one starts again, without the variables of this one's own step."""
    kept_names = ("SLURM_CONF", "SLURM_CLUSTER_NAME", "SLURM_WORKING_CLUSTER")
    values = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name in kept_names}
    # Any node but itself: its own name may resolve to 127.0.1.1 there.
    own_name = os.environ.get("SLURMD_NODENAME") or place.peer
    peer = own_name if own_name and own_name != place.names[node] else place.names[1 if node == 0 else 0]
    marks = {_JOB: place.job, _NODE: str(node), _NAMES: ",".join(place.names), _PEER: peer}
    return values | marks | {_REPLACE: str(int(place.replaces)), _WATCHED: str(int(place.is_watched))}


@dataclass
class SlurmLauncher(CommandLauncher):
    """Submits a job that runs a command on each of its nodes; a `CommandLauncher`."""

    config: SlurmConfig
    """What is asked for."""
    folder: Path
    """Folder for the script and the job's output, on a file system that all nodes share."""
    name: str
    """Name of the job."""
    rank_count: int
    """Number of ranks on all nodes; 0 when it is known on the nodes only."""
    job: str = ""
    """Id of the job, once it was submitted."""
    python: str = sys.executable
    """Interpreter on every node."""
    workdir: Path = field(default_factory=Path.cwd)
    """Working directory on every node."""

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.rank_count

    def script(self, argv: Sequence[str], node: int | None = None) -> str:
        """Returns the sbatch script for ``meshwright <argv>``.

        Args:
            argv: words of the command, which finds its place in the job by itself.
            node: number of the one node that the script starts again; None for the script of the whole run.
        """
        config = self.config
        options: list[tuple[str, object]] = [
            ("job-name", self.name),
            ("nodes", config.nodes if node is None else 1),
            ("ntasks-per-node", 1),
            ("gpus-per-node", config.gpus_per_node),
            ("cpus-per-task", config.cpus_per_node),
            ("mem", config.memory),
            ("time", config.time),
            ("partition", config.partition),
            ("account", config.account),
            ("qos", config.qos),
            ("output", self.folder / "slurm-%j.out"),
            ("open-mode", "append"),
        ]
        lines = [f"#SBATCH --{name}={shlex.quote(str(value))}" for name, value in options if value not in (None, "")]
        lines += [f"#SBATCH --{line}" for line in config.lines]
        if node is None:
            # A lost node leaves the job, and the others go on; the time limit is told to this script alone.
            lines += ["#SBATCH --no-kill", f"#SBATCH --signal=B:USR1@{config.warn_s}"]
        lines.append("#SBATCH --requeue" if config.requeue and node is None else "#SBATCH --no-requeue")
        command = shlex.join((self.python, "-m", "meshwright", *argv))
        export = [f"export {_REPLACE}={int(config.replace)}"] if node is None else []
        body = [f"cd {shlex.quote(str(self.workdir))} || exit 1", *config.setup, *export, f"exec {command}"]
        return "\n".join(["#!/bin/bash", *lines, *body]) + "\n"

    def commands(self, argv: Sequence[str]) -> list[HostCommand]:
        """Returns the dry run: the submission."""
        return [HostCommand("localhost", ("sbatch", "--parsable", str(self._script_path())))]

    def _script_path(self) -> Path:
        return self.folder / "job.sh"

    def start(self, argv: Sequence[str]) -> None:
        """Writes the script, asks Slurm whether such a job could ever run, and submits it.

        Raises:
            LaunchError: with Slurm's sentence when it refuses the job; nothing was submitted then.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._script_path().write_text(self.script(argv), encoding="utf-8")
        self._sbatch("--test-only")
        self.job = self._sbatch("--parsable").partition(";")[0]

    def submit_replacement(self, argv: Sequence[str], node: int, environment: Mapping[str, str], busy: str) -> None:
        """Submits a job of one node in the stead of a lost one, on none of the job's own nodes.

        Raises:
            LaunchError: with Slurm's sentence when it refuses.
        """
        path = self.folder / f"node-{node}.sh"
        path.write_text(self.script(argv, node), encoding="utf-8")
        self._sbatch("--parsable", f"--exclude={busy}", path=path, environment=environment)

    def _sbatch(self, *options: str, path: Path | None = None, environment: Mapping[str, str] | None = None) -> str:
        return submit_script(path or self._script_path(), *options, environment=environment)

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns at once: a submitted job outlives the command that submitted it."""

    def cancel(self, grace_s: float = 0.0) -> None:
        """Cancels the job, where there is one."""
        if self.job:
            call_slurm("scancel", self.job)
