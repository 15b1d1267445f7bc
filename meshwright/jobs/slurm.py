"""Training by Slurm: submission, the job's batch script, and the commands of its nodes."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import ClusterError, ConfigError
from meshwright.jobs.hosts import command_arguments
from meshwright.jobs.progress import Say
from meshwright.jobs.run_directory import LAUNCH
from meshwright.launch.slurm import SlurmLauncher, SlurmPlace
from meshwright.launch.slurm_job import SlurmJob
from meshwright.launch.slurm_node import NodeKeeper, NodeRevival
from meshwright.monitor.rundir import read_run
from meshwright.records import parse_json
from meshwright.resilience.claims import read_presence
from meshwright.spec.layout import Layout
from meshwright.train.run_config import RunConfig

RECORD = "job.json"
"""File of the launch folder: the launcher, and what it calls the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRecord:
    """Which launcher started a run, and what it calls the job."""

    launcher: str
    """``slurm`` or ``kubernetes``."""
    job: str
    """Id of the job; on Kubernetes kind and name, as ``jobset/first``."""
    nodes: int
    """Nodes that were asked for."""
    submitted: str
    """When, by the clock of the host of the submission."""
    namespace: str = ""
    """Namespace of the job; empty on Slurm, and where kubectl's current one is meant."""


def write_record(run_dir: Path, record: LaunchRecord) -> None:
    """Writes who started a run, for ``status``, ``logs`` and ``cancel``."""
    values = {name: getattr(record, name) for name in record.__slots__}
    (run_dir / LAUNCH / RECORD).write_text(json.dumps(values), encoding="utf-8")


def read_record(run_dir: Path) -> LaunchRecord | None:
    """Returns who started a run; None for a run that no launcher of a cluster started.

    Raises:
        ConfigError: when the file is damaged.
    """
    path = run_dir / LAUNCH / RECORD
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
        record = LaunchRecord(**values)
        if not all(isinstance(text, str) for text in (record.launcher, record.job, record.submitted, record.namespace)):
            raise TypeError("a field isn't text")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} doesn't say who started the run ({error}); remove it") from None
    # They become words of a command line.
    if not re.fullmatch(r"([a-z]+/)?[A-Za-z0-9][A-Za-z0-9_.-]*", record.job):
        raise ConfigError(f"{path}: {record.job!r} is no job's id; remove it")
    if not re.fullmatch(r"([a-z0-9][a-z0-9-]*)?", record.namespace):
        raise ConfigError(f"{path}: {record.namespace!r} is no namespace; remove it")
    return record


def submit(args: Sequence[str], config: RunConfig, *, dry_run: bool) -> tuple[str, str]:
    """Submits a run to Slurm.

    Args:
        args: words of the command after ``train``.
        config: these words as settings, with the run directory named.
        dry_run: write and submit nothing.

    Returns:
        The script, and the job's id; an empty id for a dry run.

    Raises:
        ConfigError, ClusterError, PlanError: for settings that would fail on the nodes.
        LaunchError: when Slurm refuses the job.
    """
    launcher = make_launcher(config)
    argv = (*_arguments(args, config, launcher.ranks), "--on", "slurm")
    script = launcher.script(argv)
    if dry_run:
        return script, ""
    launcher.start(argv)
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    write_record(
        Path(config.run),
        LaunchRecord(launcher="slurm", job=launcher.job, nodes=config.slurm.nodes, submitted=now),
    )
    return script, launcher.job


def make_launcher(config: RunConfig) -> SlurmLauncher:
    """Returns the launcher of a run.

    Raises:
        ConfigError, ClusterError, PlanError: for settings that would fail on the nodes.
    """
    slurm, run_dir = config.slurm, Path(config.run).absolute()
    config.recovery.check_nodes(slurm.nodes)
    per_node = slurm.gpus_per_node or slurm.cpus_per_node
    ranks = config.devices or (slurm.nodes * per_node if per_node else 0)
    if ranks % slurm.nodes:
        raise ConfigError(f"devices = {ranks} on slurm.nodes = {slurm.nodes}: nodes of a job have equally many ranks")
    if slurm.gpus_per_node and ranks > slurm.nodes * slurm.gpus_per_node:
        raise ClusterError(
            f"devices = {ranks}, but slurm.nodes = {slurm.nodes} with slurm.gpus_per_node = {slurm.gpus_per_node} have "
            f"{slurm.nodes * slurm.gpus_per_node} GPUs; ask for more, or for fewer ranks"
        )
    if config.layout != "auto" and ranks:
        Layout.parse(config.layout).check_ranks(ranks)
    if config.trials and slurm.nodes > 1:
        raise ConfigError("trials start ranks of their own, on one node; drop trials")
    name = slurm.name or re.sub(r"[^\w.-]", "-", run_dir.name)
    return SlurmLauncher(config=slurm, folder=run_dir / LAUNCH, name=name, rank_count=ranks)


def _arguments(args: Sequence[str], config: RunConfig, ranks: int) -> list[str]:
    devices = ("--devices", str(ranks)) if ranks else ()
    return [*command_arguments(args, config), *devices]


def run_in_job(args: Sequence[str], config: RunConfig, place: SlurmPlace, say: Say) -> int:
    """Does a process's part in a job: that of the batch script, or of a node; returns its exit status.

    Args:
        args: words of the command after ``train``.
        config: these words as settings.
        place: where in the job this process stands.
        say: takes a line for people.

    Raises:
        ConfigError: without a run directory, which all nodes must share.
    """
    if not config.run:
        raise ConfigError("several nodes need --run, the same on every node, in a folder that all of them share")
    run_dir = Path(config.run)
    # The allocation says how many nodes there are; the settings may speak of another.
    argv = _arguments(args, config, config.devices or 0)
    (run_dir / LAUNCH).mkdir(parents=True, exist_ok=True)

    def presence(nodes: Iterable[int]) -> dict[int, int]:
        return read_presence(run_dir, nodes)

    launcher, start_s = make_launcher(config), config.launch.group_s
    if place.node is None:
        revival = NodeRevival(place, argv, launcher, presence, start_s, say)
        return SlurmJob(place, argv, config.slurm, lambda: read_run(run_dir).state == "finished", say, revival).run()
    return NodeKeeper(place, argv, launcher, presence, start_s, say).run()
