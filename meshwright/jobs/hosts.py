"""Training on the hosts of a hostfile: a supervisor or torchrun on each over ssh, or the commands to paste."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from meshwright.launch.choice import choose_launcher
from meshwright.launch.hostfile import HostfileLauncher, read_hostfile
from meshwright.spec.layout import Layout
from meshwright.train.run_config import RunConfig


def run_on_hosts(words: Sequence[str], config: RunConfig, hostfile: str) -> None:
    """Trains on every host, in the same folder and with the same words.

    Args:
        words: the command's words without ``--hostfile``. The first Ctrl-C is typed on every host, where the ranks end
            with a checkpoint; the second ends everything at once.
        config: what they say, its run directory named; all hosts must see that directory.
        hostfile: path of a file with a ``host slots=8`` a line.

    Raises:
        PlanError: when the layout's degrees don't multiply to the slots.
        LaunchError: when a host fails; the others are ended. With ``recovery.enabled`` when all fail.
    """
    launcher, asked = _launcher(config, hostfile), 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            raise KeyboardInterrupt
        launcher.interrupt()

    before = signal.signal(signal.SIGINT, stop)
    try:
        launcher.start(_argv(words, config))
        launcher.wait()
    finally:
        signal.signal(signal.SIGINT, before)
        launcher.cancel(config.launch.grace_s)


def host_commands(words: Sequence[str], config: RunConfig, hostfile: str | None) -> list[str]:
    """Returns a line for each command that would be started, with its host; starts nothing.

    Args:
        words: the command's words without ``--hostfile``.
        config: what they say, its run directory named.
        hostfile: path of the hostfile; None for this node alone.
    """
    if hostfile is not None:
        return list(_launcher(config, hostfile).shell_lines(_argv(words, config)))
    launcher = choose_launcher(config.devices, config=config.launch)
    return [f"{command.host}: {' '.join(command.argv)}" for command in launcher.commands(["train", *words])]


def _launcher(config: RunConfig, hostfile: str) -> HostfileLauncher:
    launcher = HostfileLauncher(read_hostfile(Path(hostfile)), supervised=config.recovery.enabled)
    if config.recovery.enabled:
        config.recovery.check_nodes(len(launcher.hosts))
    if config.layout != "auto":
        Layout.parse(config.layout).check_ranks(launcher.ranks)
    return launcher


def _argv(words: Sequence[str], config: RunConfig) -> list[str]:
    """Returns the words for each host: the run's directory by the name that torchrun leaves alone, and no devices."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in ("--run", "--run-dir", "--devices"):
            next(rest, None)
        elif not word.startswith(("--run=", "--run-dir=", "--devices=")):
            kept.append(word)
    return ["train", *kept, "--run-dir", config.run]
