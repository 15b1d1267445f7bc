"""``meshwright trace``: writes the recorded steps of a run as a trace that Perfetto opens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshwright.cli.arguments import print_result, take_value
from meshwright.errors import ConfigError, PlanError
from meshwright.monitor.rundir import is_run_directory, read_run
from meshwright.monitor.trace import write_trace
from meshwright.spec.layout import Layout


def run(argv: Sequence[str]) -> int:
    """Writes the trace; exit status 0 once it is written."""
    args = list(argv)
    if not args:
        raise ConfigError("trace takes the directory of a run; meshwright trace --help")
    run_dir, target = Path(args.pop(0)), take_value(args, "--to")
    if args:
        raise ConfigError(f"'{args[0]}' is not known here; meshwright trace --help lists what is")
    if not is_run_directory(run_dir):
        raise ConfigError(f"{run_dir} holds no run; give the directory that train reported")
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
