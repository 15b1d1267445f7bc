"""``meshwright logs``: what a run printed where a scheduler ran it, else its steps and events."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshwright.cli.arguments import print_result, take_flag
from meshwright.errors import ConfigError
from meshwright.jobs.run_control import run_output

USAGE = """usage: meshwright logs RUN [-f]

Prints what the job of a run printed, on all of its nodes; of a run in a terminal its steps and events.

  -f, --follow   go on until the run has ended"""


def run(argv: Sequence[str]) -> int:
    """Prints a run's output; exit status 0."""
    args = list(argv)
    if not args or args[0] in ("-h", "--help"):
        print_result(USAGE)
        return 0
    follow = [take_flag(args, flag) for flag in ("-f", "--follow")]
    if len(args) != 1:
        raise ConfigError("logs takes the directory of one run; meshwright logs --help")
    for line in run_output(Path(args[0]), any(follow)):
        print_result(line)
    return 0
