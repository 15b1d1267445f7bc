"""Where ``meshwright train`` runs: here, on the nodes of a Slurm job or a Ray cluster, or in a submitted job."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.cli.arguments import print_result
from meshwright.errors import ConfigError, nearest
from meshwright.jobs import kubernetes
from meshwright.jobs.nodes import NodeOptions
from meshwright.jobs.progress import to_stderr as say
from meshwright.jobs.ray import plan_lines, run_on_ray
from meshwright.jobs.run_directory import claim_directory
from meshwright.jobs.slurm import run_in_job, submit
from meshwright.launch.kubernetes import pod_place
from meshwright.launch.slurm import SlurmPlace, slurm_place
from meshwright.train.run_config import RunConfig

LAUNCHERS = ("local", "ssh", "slurm", "kubernetes", "ray")
"""Values of ``--on``."""


def check_launcher(on: str | None, hostfile: str | None, nodes: NodeOptions | None) -> None:
    """Refuses a launcher that isn't known, or that other flags contradict.

    Raises:
        ConfigError: naming the flags.
    """
    if on is None:
        return
    if on not in LAUNCHERS:
        raise ConfigError(f"--on {on} is unknown{nearest(on, LAUNCHERS)}")
    if (on == "ssh") != (hostfile is not None):
        raise ConfigError("--on ssh and --hostfile HOSTS belong together: give both, or neither")
    if on in ("slurm", "kubernetes", "ray") and nodes is not None:
        raise ConfigError(f"--on {on} numbers the nodes by itself; drop --nodes, --node and --meet")


def check_scheduler_flags(on: str | None, hostfile: str | None, nodes: NodeOptions | None, args: Sequence[str]) -> None:
    """Refuses flags of a scheduler that nobody is to ask; a recipe may have its settings.

    Raises:
        ConfigError: naming the flag.
    """
    # What a scheduler started has the words that it was given.
    if on is not None or hostfile is not None or nodes is not None or slurm_place() is not None:
        return
    for name in ("slurm", "kubernetes", "ray"):
        flag = next((arg for arg in args if arg.startswith(f"--{name}.")), None)
        if flag is not None:
            raise ConfigError(f"{flag} has no effect without --on {name}; leave it out, or write --on {name}")


def train_by_slurm(on: str | None, args: Sequence[str], config: RunConfig, dry_run: bool) -> int | None:
    """Submits a run to Slurm, or does this process's part in a job; returns the exit status.

    Args:
        on: value of ``--on``; inside of a job of several nodes none is needed.
        args: words of the command after ``train``, without those of the launcher.
        config: these words as settings.
        dry_run: print the script and submit nothing.

    Returns:
        None where the run is for this machine alone, or torchrun's.
    """
    place = _place(on)
    if place is None and on != "slurm":
        return None
    if place is None or dry_run:
        config = claim_directory(config)
        script, job = submit(args, config, dry_run=dry_run)
        if dry_run:
            print_result(script.rstrip())
            return 0
        print_result(f"job {job} trains in {config.run}")
        for verb in ("status", "logs -f", "cancel"):
            say(f"  meshwright {verb} {config.run}")
        return 0
    return run_in_job(args, config, place, say)


def train_by_ray(args: Sequence[str], config: RunConfig, dry_run: bool) -> int:
    """Trains on the nodes of a Ray cluster; returns the exit status.

    Args:
        args: words of the command after ``train``, without those of the launcher.
        config: these words as settings.
        dry_run: print what would be asked, and ask nothing.
    """
    config = claim_directory(config)
    if not dry_run:
        return run_on_ray(args, config, say)
    print_result("\n".join(plan_lines(args, config)))
    return 0


def train_by_kubernetes(
    on: str | None, args: Sequence[str], config: RunConfig, dry_run: bool
) -> tuple[int | None, NodeOptions | None]:
    """Creates a run's job in a cluster, or prepares the pod of a job that this process is in.

    Args:
        on: value of ``--on``.
        args: words of the command after ``train``, without those of the launcher.
        config: these words as settings.
        dry_run: print the manifests and create nothing.

    Returns:
        The exit status, None where this process trains; and then which node it is, None for a run of one node.
    """
    if on != "kubernetes":
        return None, None
    place = pod_place()
    if place is not None and not dry_run:
        if place.nodes > 1 and kubernetes.is_finished(config, say):
            say(f"{config.run} has reached its last step")
            return 0, None
        return None, kubernetes.join_run(config, place, say)
    manifests, job = kubernetes.submit(args, config, dry_run=dry_run, say=say)
    if dry_run:
        print_result(manifests.rstrip())
        return 0, None
    print_result(f"{job} trains in {config.run}")
    for verb in ("status", "logs -f", "cancel"):
        say(f"  meshwright {verb} {config.run}")
    return 0, None


def _place(on: str | None) -> SlurmPlace | None:
    """Returns where in a Slurm job this process stands, if the run is for its nodes."""
    if on not in (None, "slurm"):
        return None
    place = slurm_place()
    # A job of one node runs as any machine does, unless it is asked to be watched over.
    return place if place is not None and (on == "slurm" or place.nodes > 1) else None
