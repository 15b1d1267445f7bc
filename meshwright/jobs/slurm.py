"""Training by Slurm: submission, the job's batch script, and the commands of its nodes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.jobs.hosts import command_arguments, count_ranks
from meshwright.jobs.launch_record import LaunchRecord, SchedulerState, write_record
from meshwright.jobs.progress import Say, to_stderr
from meshwright.jobs.run_directory import LAUNCH
from meshwright.launch.slurm import SlurmLauncher, SlurmPlace, call_slurm, partition_gpus
from meshwright.launch.slurm_job import SlurmJob
from meshwright.launch.slurm_node import LifeSigns, NodeKeeper, NodeRevival
from meshwright.monitor.rundir import read_run
from meshwright.resilience.claims import read_presence
from meshwright.resilience.run_lock import has_locks, lock_stamps
from meshwright.train.run_config import RunConfig

_START_S = 180.0
"""A supervisor's start may take so long, with its imports from a file system that all nodes read at once."""


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
    gpus = _gpu_words(config)
    if gpus:
        config = dataclasses.replace(config, slurm=dataclasses.replace(config.slurm, gpus_per_node=int(gpus[1])))
    launcher = make_launcher(config)
    argv = (*command_arguments(args, config, launcher.ranks), *gpus, "--on", "slurm")
    script = launcher.script(argv)
    if dry_run:
        return script, ""
    launcher.start(argv)
    write_record(Path(config.run), LaunchRecord.submitted_now("slurm", launcher.job, config.slurm.nodes))
    return script, launcher.job


def _gpu_words(config: RunConfig) -> tuple[str, ...]:
    """Returns the words that ask for all GPUs of the partition's nodes, where the settings name neither GPUs nor cores.

    Raises:
        ConfigError: when its nodes have different numbers of GPUs.
    """
    slurm = config.slurm
    if slurm.gpus_per_node is not None or slurm.cpus_per_node is not None:
        return ()
    counts = partition_gpus(slurm.partition)
    partition = f"partition {slurm.partition}" if slurm.partition else "the default partition"
    if len(counts) > 1:
        numbers = ", ".join(map(str, sorted(counts)))
        raise ConfigError(f"nodes of {partition} have {numbers} GPUs: give slurm.gpus_per_node, or slurm.cpus_per_node")
    if counts and (count := counts.pop()):
        to_stderr(f"{partition} has {count} GPUs a node, and all are asked for; slurm.gpus_per_node names fewer")
        return ("--slurm.gpus-per-node", str(count))
    to_stderr("each node gives the partition's usual number of cores, a rank a core; slurm.cpus_per_node names another")
    return ()


def make_launcher(config: RunConfig) -> SlurmLauncher:
    """Returns the launcher of a run.

    Raises:
        ConfigError, ClusterError, PlanError: for settings that would fail on the nodes.
    """
    slurm, run_dir = config.slurm, Path(config.run).absolute()
    per_node = slurm.gpus_per_node or slurm.cpus_per_node
    ranks = count_ranks(config, "slurm", slurm.nodes, slurm.gpus_per_node, per_node)
    name = slurm.name or re.sub(r"[^\w.-]", "-", run_dir.name)
    return SlurmLauncher(config=slurm, folder=run_dir / LAUNCH, name=name, rank_count=ranks)


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
    argv = command_arguments(args, config, config.devices or 0)
    (run_dir / LAUNCH).mkdir(parents=True, exist_ok=True)

    def presence(nodes: Iterable[int]) -> dict[int, int]:
        # Before its agent starts a supervisor prepares and proves for minutes, and holds its node's lock meanwhile.
        locks, present = lock_stamps(run_dir), read_presence(run_dir, nodes)
        return {node: present.get(node, 0) + locks.get(node, 0) for node in present.keys() | locks.keys()}

    launcher = make_launcher(config)
    signs = LifeSigns(
        presence=presence, is_owned=lambda: has_locks(run_dir), start_s=max(config.launch.group_s, _START_S)
    )
    if place.node is None:
        revival = NodeRevival(place, argv, launcher, signs, say)
        return SlurmJob(place, argv, config.slurm, lambda: read_run(run_dir).state == "finished", say, revival).run()
    return NodeKeeper(place, argv, launcher, signs, say).run()


def slurm_state(record: LaunchRecord) -> SchedulerState:
    """Asks Slurm how a job stands."""
    shown = call_slurm("squeue", "--noheader", f"--jobs={record.job}", "--format=%T|%N|%L|%r")
    state, nodes, time_left, reason = (shown.splitlines()[0] if shown else "gone|||").split("|", 3)
    return SchedulerState(
        launcher=record.launcher, job=record.job, state=state, nodes=nodes, time_left=time_left,
        reason="" if reason == "None" else reason,
    )  # fmt: skip
