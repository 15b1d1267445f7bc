"""``meshwright logs``: what a run printed where a scheduler ran it, else its steps and events."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshwright.cli.arguments import print_result, take_flag
from meshwright.errors import ConfigError
from meshwright.jobs.run_control import run_output


def run(argv: Sequence[str]) -> int:
    """Prints a run's output; exit status 0."""
    args = list(argv)
    follow = [take_flag(args, flag) for flag in ("-f", "--follow")]
    if len(args) != 1:
        raise ConfigError("logs takes the directory of one run; meshwright logs --help")
    for line in run_output(Path(args[0]), any(follow)):
        print_result(line)
    return 0
