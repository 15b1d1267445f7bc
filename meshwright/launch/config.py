"""Settings of a launch: the limits of every wait."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.config import Config
from meshwright.errors import ConfigError

LONGEST_WAIT_S = 2_000_000
"""torch counts the limits of a process group in milliseconds of 31 bits."""
SHORTEST_WAIT_S = 1.0
"""Least wait for another process: ranks share cores, and within less some of them haven't run at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig(Config):
    """How ranks are started and how long anything about them may take."""

    grace_s: float = 3.0
    """Seconds between the signal that ends the ranks of a failed launch and the one that kills them."""
    stop_s: float = 600.0
    """Seconds that ranks get to write a checkpoint and end after the first Ctrl-C; then they are killed."""
    group_s: float = 60.0
    """Seconds that ranks wait for each other when the process group forms."""
    collective_s: float = 600.0
    """Seconds that one collective may take before the rank that waits for it fails."""
    owner_s: float = 0.0
    """Seconds to wait for the end of another command that trains in the same run directory; 0 refuses at once."""
    network: str = ""
    """What is between the nodes, for the plan: a name of the catalogue's, as ``ethernet-25g`` or ``8xinfiniband-ndr``;
    the usual network of such nodes when empty. A calibration over the same nodes measures it instead."""
    wire: Literal["auto", "gloo", "shm"] = "auto"
    """How CPU ranks send collectives: ``shm`` through shared memory, among ranks of one machine; ``gloo`` through
    sockets; ``auto`` through shared memory wherever it can be."""
    keep_memory: bool = True
    """On CPU ranks, keep freed tensor memory in the process instead of handing it back after each operation."""

    def check(self) -> None:
        """Raises `ConfigError` for a limit that isn't above zero."""
        if not self.owner_s >= 0:
            raise ConfigError(f"launch.owner_s = {self.owner_s}: give seconds, or 0 to refuse at once")
        for name in ("grace_s", "stop_s", "group_s", "collective_s"):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"launch.{name} = {value}: every wait has a limit above 0 seconds; write 60, say")
            if name in ("group_s", "collective_s") and value < SHORTEST_WAIT_S:
                raise ConfigError(
                    f"launch.{name} = {value:g}: processes need a moment to answer each other; at least "
                    f"{SHORTEST_WAIT_S:g} second"
                )
            if value > LONGEST_WAIT_S:
                raise ConfigError(f"launch.{name} = {value:g}: at most {LONGEST_WAIT_S} seconds, which are 23 days")


_TIME = re.compile(r"\d+(:\d\d?){0,2}|\d+-\d+(:\d\d?){0,2}")
"""Source: sbatch(1), --time: minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on."""
_MEMORY = re.compile(r"\d+[KMGT]?")
_OWN_OPTIONS = (
    *("nodes", "ntasks", "ntasks-per-node", "array", "signal", "output", "open-mode", "no-kill", "requeue"),
    *("no-requeue", "job-name", "time", "partition", "account", "qos", "mem", "gpus-per-node", "cpus-per-task"),
    *("chdir", "export", "wrap"),
)
"""Options of sbatch that follow from other settings, or that the launcher relies on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmConfig(Config):
    """What ``--on slurm`` asks the scheduler for, and what follows when it takes nodes away."""

    nodes: int = 1
    """Nodes, with a supervisor each."""
    gpus_per_node: int | None = None
    """GPUs of a node, and so its ranks; None where the partition has none."""
    cpus_per_node: int | None = None
    """Cores of a node, and without GPUs its ranks; None for the partition's usual number."""
    memory: str = ""
    """Memory of a node, as ``480G``; the partition's usual amount when empty."""
    time: str = ""
    """Time limit, as ``24:00:00`` or ``2-12:00:00``; the partition's when empty."""
    partition: str = ""
    """Partition; the default one when empty."""
    account: str = ""
    """Account to charge; the user's usual one when empty."""
    qos: str = ""
    """Quality of service; the account's usual one when empty."""
    name: str = ""
    """Name of the job; that of the run's directory when empty."""
    lines: tuple[str, ...] = ()
    """More long options of sbatch, without their dashes: ``constraint=h100``, ``exclusive``."""
    setup: tuple[str, ...] = ()
    """Lines of shell before the command on the first node: ``module load cuda``; all nodes inherit."""
    warn_s: int = 120
    """Seconds before the time limit at which the run ends with a checkpoint."""
    requeue: bool = True
    """Go on by itself after the time limit or a preemption: the job goes back into the queue until the run is done."""
    replace: bool = True
    """Ask for another node in the stead of one that Slurm has taken out of the job."""

    def check(self) -> None:
        """Refuses what sbatch would misread, or what would take the launcher's own options away."""
        for name in ("nodes", "gpus_per_node", "cpus_per_node"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ConfigError(f"slurm.{name} = {count}: give at least 1, or leave it out")
        if self.warn_s < 10:
            raise ConfigError(f"slurm.warn_s = {self.warn_s}: a checkpoint takes time; give at least 10 seconds")
        names = {name: getattr(self, name) for name in ("partition", "account", "qos", "name")}
        _check_request(self.time, self.memory, names, self.lines)


def _check_request(time: str, memory: str, names: Mapping[str, str], lines: Sequence[str]) -> None:
    """Refuses values of a request to Slurm that sbatch would misread."""
    if time and not _TIME.fullmatch(time):
        raise ConfigError(f"slurm.time = {time!r} is no time of Slurm's; write it as 24:00:00 or 2-12:00:00")
    if memory and not _MEMORY.fullmatch(memory):
        raise ConfigError(f"slurm.memory = {memory!r}: write a number and a unit, as 480G")
    for name, text in names.items():
        if not re.fullmatch(r"[\w.,:@+=-]*", text):
            raise ConfigError(f"slurm.{name} = {text!r}: letters, digits and . , : @ + = - _ only")
    for line in lines:
        if not re.fullmatch(r"[a-z][a-z0-9-]+(=[^\s\"'`$;|&\\]+)?", line):
            raise ConfigError(f"slurm.lines: {line!r} is no long option without dashes, as constraint=h100")
        if line.partition("=")[0] in _OWN_OPTIONS:
            raise ConfigError(f"slurm.lines: {line} is set by other settings of slurm, or by the launcher")


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmArrayConfig(Config):
    """What ``prepare --engine slurm`` asks the scheduler for: an array of jobs of one core each, say."""

    jobs: int = 64
    """Jobs of the array at most; each does every so-many-th task of a stage. Slurm's MaxArraySize is 1001 unless a
    cluster says otherwise."""
    cpus: int = 1
    """Cores of a job, which does one task at a time: more than one for memory that goes by cores."""
    memory: str = ""
    """Memory of a job, as ``4G``; the partition's usual amount when empty."""
    time: str = ""
    """Time limit of a job, as ``4:00:00``; the partition's when empty."""
    partition: str = ""
    """Partition; the default one when empty."""
    account: str = ""
    """Account to charge; the user's usual one when empty."""
    qos: str = ""
    """Quality of service; the account's usual one when empty."""
    lines: tuple[str, ...] = ()
    """More long options of sbatch, without their dashes: ``constraint=cpu``."""
    setup: tuple[str, ...] = ()
    """Lines of shell before the command on each node: ``module load python``."""

    def check(self) -> None:
        """Refuses what sbatch would misread, or what would take the array's own options away."""
        for name in ("jobs", "cpus"):
            if getattr(self, name) < 1:
                raise ConfigError(f"slurm.{name} = {getattr(self, name)}: give at least 1, or leave it out")
        names = {name: getattr(self, name) for name in ("partition", "account", "qos")}
        _check_request(self.time, self.memory, names, self.lines)


_RAY_ADDRESS = re.compile(r"auto|(ray://)?([\w.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}")
_RAY_RESOURCE = re.compile(r"(?P<name>[A-Za-z_][\w.:/-]*)=(?P<amount>\d+(\.\d+)?)")
_VARIABLE = re.compile(r"[A-Za-z_]\w*=[^\0]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class RayConfig(Config):
    """What ``--on ray`` asks a Ray cluster for."""

    address: str = "auto"
    """The cluster: ``auto`` for the one that runs here, ``HOST:PORT`` of its head, or ``ray://HOST:PORT``."""
    nodes: int = 1
    """Nodes, with a supervisor each."""
    gpus_per_node: int | None = None
    """GPUs of a node, and so its ranks; None where the run trains on cores."""
    cpus_per_node: int | None = None
    """Cores of a node, and without GPUs its ranks; None for one a GPU, or one."""
    resources: tuple[str, ...] = ()
    """More resources that a node must have: ``accelerator_type:H100=0.001``."""
    environment: tuple[str, ...] = ()
    """Variables of the supervisors, beside those of Ray's workers: ``NCCL_DEBUG=INFO``."""
    timeout: float = 0.0
    """Seconds to wait for nodes that an autoscaler brings, or that other jobs use; with 0 they must be free now."""

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of a node, by Ray's names."""
        gpus = {"GPU": float(self.gpus_per_node)} if self.gpus_per_node else {}
        matches = [match for text in self.resources if (match := _RAY_RESOURCE.fullmatch(text))]
        more = {match["name"]: float(match["amount"]) for match in matches}
        return {"CPU": float(self.cpus_per_node or self.gpus_per_node or 1), **gpus, **more}

    @property
    def ranks_per_node(self) -> int:
        """Ranks of a node: its GPUs, else its cores."""
        return self.gpus_per_node or self.cpus_per_node or 1

    def check(self) -> None:
        """Refuses what Ray would misread."""
        for name in ("nodes", "gpus_per_node", "cpus_per_node"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ConfigError(f"ray.{name} = {count}: give at least 1, or leave it out")
        _check_address(self.address)
        if self.timeout < 0:
            raise ConfigError(f"ray.timeout = {self.timeout:g}: give seconds, or 0 to refuse at once")
        for text in self.resources:
            match = _RAY_RESOURCE.fullmatch(text)
            if match is None or not float(match["amount"]) > 0:
                raise ConfigError(f"ray.resources: {text!r} is no name and amount, as accelerator_type:H100=0.001")
            if match["name"] in ("CPU", "GPU", "memory", "object_store_memory"):
                raise ConfigError(f"ray.resources: {text} is set by ray.cpus_per_node and ray.gpus_per_node, or by Ray")
        for text in self.environment:
            if not _VARIABLE.fullmatch(text):
                raise ConfigError(f"ray.environment: {text!r} is no variable; write NAME=VALUE")


@dataclass(frozen=True, kw_only=True, slots=True)
class RayTasksConfig(Config):
    """What ``prepare --engine ray`` asks a Ray cluster for: as many tasks at a time as it has room for."""

    address: str = "auto"
    """The cluster: ``auto`` for the one that runs here, ``HOST:PORT`` of its head, or ``ray://HOST:PORT``."""
    cpus: int = 1
    """Cores that a task reserves; it uses one."""
    memory_gb: float = 0.0
    """Memory that a task reserves, in GiB; 0 reserves none."""

    def check(self) -> None:
        """Refuses what Ray would misread."""
        _check_address(self.address)
        if self.cpus < 1:
            raise ConfigError(f"ray.cpus = {self.cpus}: give at least 1, or leave it out")
        if self.memory_gb < 0:
            raise ConfigError(f"ray.memory_gb = {self.memory_gb:g}: give GiB, or 0 to reserve none")


def _check_address(address: str) -> None:
    if not _RAY_ADDRESS.fullmatch(address):
        raise ConfigError(f"ray.address = {address!r}: give auto, HOST:6379 or ray://HOST:10001")
