"""``meshwright train``: from text and a model's name to a trained model."""

from __future__ import annotations

import json
from collections.abc import Sequence

import meshwright
from meshwright.cli.arguments import print_result, read_config, take_flag, take_value
from meshwright.cli.launchers import (
    check_launcher,
    check_scheduler_flags,
    train_by_kubernetes,
    train_by_ray,
    train_by_slurm,
)
from meshwright.cli.nodes import take_nodes
from meshwright.cli.result import show_result
from meshwright.errors import TERMINATED, ConfigError, LaunchError
from meshwright.jobs.hosts import host_commands, run_on_hosts
from meshwright.jobs.run_directory import claim_directory
from meshwright.launch.signals import InterruptCounter
from meshwright.train.run_config import RunConfig


def run(argv: Sequence[str]) -> int:
    """Trains; exit status 0 when the run reached its last step, 1 when it was interrupted, 143 by SIGTERM."""
    args = list(argv)
    as_json = take_flag(args, "--json")
    hostfile, dry_run = take_value(args, "--hostfile"), take_flag(args, "--dry-run")
    on, nodes = take_value(args, "--on"), take_nodes(args)
    check_launcher(on, hostfile, nodes)
    check_scheduler_flags(on, hostfile, nodes, args)
    config = read_config(RunConfig, args, "train")
    if on in ("slurm", "ray", "kubernetes") and as_json:
        raise ConfigError(f"--json has no result where --on {on} trains elsewhere; type meshwright status RUN --json")
    if on == "ray":
        return train_by_ray(args, config, dry_run)
    if hostfile is None and nodes is None and (status := train_by_slurm(on, args, config, dry_run)) is not None:
        return status
    status, pod_nodes = train_by_kubernetes(on, args, config, dry_run)
    if status is not None:
        return status
    nodes = nodes or pod_nodes
    if dry_run:
        commands = host_commands(args, claim_directory(config), hostfile)
        # Models are built by torch, which takes seconds to import: not where a run is only submitted.
        meshwright.check_model(config)
        for line in commands:
            print_result(line)
        return 0
    if hostfile is not None:
        interrupts = InterruptCounter()
        try:
            # The directory is named here: each host would otherwise choose one of its own.
            run_on_hosts(args, claim_directory(config), hostfile, interrupts)
        except LaunchError as error:
            if interrupts.terminated:
                error.exit_status = TERMINATED
            raise
        return 0
    result = meshwright.train(config, nodes=nodes)
    if result is None:  # a rank of torchrun other than the first
        return 0
    if result.leads:
        show_result(result)
        if as_json:
            print_result(json.dumps(result.to_json(), indent=2))
    if result.finished:
        return 0
    return TERMINATED if result.terminated else 1
