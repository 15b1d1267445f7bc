"""``meshwright trace``: writes the recorded steps of a run as a trace that Perfetto opens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshwright.cli.arguments import print_result, take_value
from meshwright.errors import ConfigError, PlanError
from meshwright.monitor.rundir import read_run
from meshwright.monitor.trace import write_trace
from meshwright.spec.layout import Layout

USAGE = """usage: meshwright trace RUN [--to FILE]

Writes the recorded steps of the run directory RUN, under way or ended, as a trace of all ranks (phases, waits for
collectives, events) in Chrome's JSON format; open it at https://ui.perfetto.dev or chrome://tracing. A run records one
step in N under --monitor.timeline N, and one in 50 under --monitor.port.

  --to FILE   the file to write (RUN/trace.json)
"""


def run(argv: Sequence[str]) -> int:
    """Writes the trace; exit status 0 once it is written."""
    args = list(argv)
    if not args or args[0] in ("-h", "--help"):
        print_result(USAGE.rstrip())
        return 0
    run_dir, target = Path(args.pop(0)), take_value(args, "--to")
    if args:
        raise ConfigError(f"'{args[0]}' is not known here; meshwright trace --help lists what is")
    path, files = Path(target) if target else run_dir / "trace.json", read_run(run_dir)
    try:
        describe = Layout.parse(files.layout).describe_rank if files.layout else "rank {}".format
    except PlanError:
        describe = "rank {}".format
    try:
        ranks, steps = write_trace(files, path, describe)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}; give another --to") from None
    print_result(f"{path}: {steps} steps of {ranks} ranks")
    return 0
