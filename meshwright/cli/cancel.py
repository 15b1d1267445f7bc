"""``meshwright cancel``: ends a run with a checkpoint, wherever it runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from meshwright.cli.arguments import print_result, take_flag, take_value
from meshwright.errors import ConfigError
from meshwright.jobs.run_control import cancel_run


def run(argv: Sequence[str]) -> int:
    """Ends a run; exit status 0 when nobody trains in its directory any more."""
    args = list(argv)
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
