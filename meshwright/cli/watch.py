"""``meshwright watch``: serves the live page of a run directory, without buttons."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshwright.cli.arguments import print_result, take_value
from meshwright.errors import ConfigError
from meshwright.jobs.progress import to_stderr as say
from meshwright.jobs.watch import DEFAULT_PORT, watch
from meshwright.monitor.config import HOST

USAGE = f"""usage: meshwright watch RUN [--port N] [--host ADDRESS]

Serves the page of the run directory RUN, which may be under way or have ended, until Ctrl-C. A run's own page, with
buttons, is train --monitor.port N.

  --port N         port ({DEFAULT_PORT}); any free one for 0
  --host ADDRESS   address to bind to ({HOST})
"""


def run(argv: Sequence[str]) -> int:
    """Serves the page; exit status 0 after Ctrl-C."""
    args = list(argv)
    if not args or args[0] in ("-h", "--help"):
        print_result(USAGE.rstrip())
        return 0
    run_dir, host = Path(args.pop(0)), take_value(args, "--host") or HOST
    port_text = take_value(args, "--port") or str(DEFAULT_PORT)
    if args:
        raise ConfigError(f"'{args[0]}' is not known here; meshwright watch --help lists what is")
    if not port_text.isdecimal() or int(port_text) >= 1 << 16:
        raise ConfigError(f"--port {port_text}: ports go from 0 to 65535")
    watch(run_dir, host=host, port=int(port_text), started=say)
    return 0
