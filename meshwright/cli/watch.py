"""``meshwright watch``: serves the live page of a run directory, without buttons."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshwright.cli.arguments import take_value
from meshwright.errors import ConfigError
from meshwright.jobs.progress import to_stderr as say
from meshwright.jobs.watch import DEFAULT_PORT, watch
from meshwright.monitor.config import HOST


def run(argv: Sequence[str]) -> int:
    """Serves the page; exit status 0 after Ctrl-C."""
    args = list(argv)
    if not args:
        raise ConfigError("watch takes the directory of a run; meshwright watch --help")
    run_dir, host = Path(args.pop(0)), take_value(args, "--host") or HOST
    port_text = take_value(args, "--port") or str(DEFAULT_PORT)
    if args:
        raise ConfigError(f"'{args[0]}' is not known here; meshwright watch --help lists what is")
    if not port_text.isdecimal() or int(port_text) >= 1 << 16:
        raise ConfigError(f"--port {port_text}: ports go from 0 to 65535")
    watch(run_dir, host=host, port=int(port_text), started=say)
    return 0
