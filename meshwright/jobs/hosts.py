"""Training on the hosts of a hostfile: a supervisor or torchrun on each over ssh, or the commands to paste."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from meshwright.data.sources import list_sources
from meshwright.errors import ClusterError, ConfigError
from meshwright.launch.choice import choose_launcher
from meshwright.launch.hostfile import HostfileLauncher, read_hostfile
from meshwright.launch.signals import InterruptCounter, handle_interrupts
from meshwright.spec.layout import Layout
from meshwright.train.run_config import RunConfig


def run_on_hosts(args: Sequence[str], config: RunConfig, hostfile: str, interrupts: InterruptCounter) -> None:
    """Trains on every host, in the same folder and with the same arguments.

    Args:
        args: the command's arguments without ``--hostfile``.
        config: the parsed arguments, with the run directory named; all hosts must see that directory.
        hostfile: path of a file with a ``host slots=8`` a line.
        interrupts: counts SIGINT, SIGTERM and SIGHUP. The first is passed to every host as Ctrl-C, where the ranks end
            with a checkpoint; the second ends everything at once.

    Raises:
        KeyboardInterrupt: at the second signal.
        PlanError: when the layout's degrees don't multiply to the slots.
        LaunchError: when a host fails; the others are ended. With ``recovery.enabled`` when all fail.
    """
    launcher, forwarded = _make_launcher(config, hostfile), False

    def count_interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.record(number)
        if interrupts.count > 1:
            raise KeyboardInterrupt

    def forward_interrupt() -> None:
        nonlocal forwarded
        # Not in the handler: a signal may come while some hosts have no session yet, and is for all of them.
        if interrupts.count and not forwarded:
            forwarded = True
            launcher.interrupt()

    with handle_interrupts(count_interrupt):
        try:
            launcher.start(command_arguments(args, config))
            launcher.wait(watch=forward_interrupt)
        finally:
            launcher.cancel(config.launch.grace_s)


def host_commands(args: Sequence[str], config: RunConfig, hostfile: str | None) -> list[str]:
    """Returns a line for each command that would be started, with its host; starts nothing.

    Args:
        args: the command's arguments without ``--hostfile``.
        config: the parsed arguments, with the run directory named.
        hostfile: path of the hostfile; None for this node alone, where the text must be.

    Raises:
        PlanError: when the layout's degrees don't multiply to the ranks.
        DataError: for text that isn't on this node.
    """
    if hostfile is not None:
        return list(_make_launcher(config, hostfile).shell_lines(command_arguments(args, config)))
    launcher = choose_launcher(config.devices, config=config.launch)
    if config.layout != "auto":
        Layout.parse(config.layout).check_ranks(launcher.ranks)
    list_sources(config.data.paths)
    return [f"{command.host}: {' '.join(command.argv)}" for command in launcher.commands(["train", *args])]


def _make_launcher(config: RunConfig, hostfile: str) -> HostfileLauncher:
    launcher = HostfileLauncher(read_hostfile(Path(hostfile)), supervised=config.recovery.enabled)
    if config.recovery.enabled:
        config.recovery.check_nodes(len(launcher.hosts))
    if config.layout != "auto":
        Layout.parse(config.layout).check_ranks(launcher.ranks)
    return launcher


def count_ranks(config: RunConfig, section: str, nodes: int, gpus_per_node: int | None, per_node: int | None) -> int:
    """Returns the ranks of a run on equal nodes of a cluster; 0 where only the nodes know.

    Args:
        config: the run.
        section: which settings ask for the nodes, for messages.
        nodes: how many.
        gpus_per_node: GPUs that are asked for on each; None for a run on cores.
        per_node: ranks of a node unless ``devices`` says fewer; None where only the nodes know.

    Raises:
        ConfigError, ClusterError, PlanError: for settings that would fail on the nodes.
    """
    config.recovery.check_nodes(nodes)
    ranks = config.devices or (nodes * per_node if per_node else 0)
    if ranks % nodes:
        raise ConfigError(f"devices = {ranks} on {section}.nodes = {nodes}: nodes of a job have equally many ranks")
    if gpus_per_node and ranks > nodes * gpus_per_node:
        raise ClusterError(
            f"devices = {ranks}, but {section}.nodes = {nodes} with {section}.gpus_per_node = {gpus_per_node} have "
            f"{nodes * gpus_per_node} GPUs; ask for more, or for fewer ranks"
        )
    if config.layout != "auto" and ranks:
        Layout.parse(config.layout).check_ranks(ranks)
    if config.trials and nodes > 1:
        raise ConfigError("trials start ranks of their own, on one node; drop trials")
    return ranks


def command_arguments(args: Sequence[str], config: RunConfig, ranks: int = 0) -> list[str]:
    """Returns the command's words for each node; torchrun would take ``--run`` for its own.

    Args:
        args: words after ``train``.
        config: the same as settings, with the run directory named.
        ranks: on all nodes; 0 leaves out how many.
    """
    host_args: list[str] = []
    remaining = iter(args)
    for arg in remaining:
        if arg in ("--run", "--run-dir", "--devices"):
            next(remaining, None)
        elif not arg.startswith(("--run=", "--run-dir=", "--devices=")):
            host_args.append(arg)
    devices = ("--devices", str(ranks)) if ranks else ()
    return ["train", *host_args, "--run-dir", config.run, *devices]
