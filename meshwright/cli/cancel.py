"""``meshwright cancel``: ends a run with a checkpoint, wherever it runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from meshwright.cli.arguments import print_result, take_flag, take_value
from meshwright.errors import ConfigError
from meshwright.jobs.run_control import cancel_run

USAGE = """usage: meshwright cancel RUN [--now] [--wait S]

Ends the run of a directory with a checkpoint, as Ctrl-C does; a job that waits leaves the queue.

  --now          end it at once, without a checkpoint
  --wait S       seconds to wait for its end (600)"""


def run(argv: Sequence[str]) -> int:
    """Ends a run; exit status 0 when nobody trains in its directory any more."""
    args = list(argv)
    if not args or args[0] in ("-h", "--help"):
        print_result(USAGE)
        return 0
    now, wait_text = take_flag(args, "--now"), take_value(args, "--wait") or "600"
    try:
        wait_s = float(wait_text)
    except ValueError:
        wait_s = math.nan
    if not 0 < wait_s < math.inf:
        raise ConfigError(f"--wait {wait_text}: give seconds above 0, as --wait 600")
    if len(args) != 1:
        raise ConfigError("cancel takes the directory of one run; meshwright cancel --help")
    print_result(cancel_run(Path(args[0]), now, wait_s))
    return 0
