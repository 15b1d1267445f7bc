"""``meshwright doctor``: checks the machines of a run before it starts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from meshwright.cli.arguments import print_result, read_config, take_flag, take_value
from meshwright.cli.doctor_output import show_report
from meshwright.cli.nodes import take_nodes
from meshwright.errors import ConfigError
from meshwright.jobs.doctor import MEET_S, DoctorReport, doctor
from meshwright.jobs.doctor_hosts import doctor_on_hosts
from meshwright.jobs.progress import silently, to_stderr
from meshwright.train.run_config import RunConfig

FINDINGS = 3
"""Exit status when a check has a finding, also one that could not be made."""
USAGE = """usage: meshwright doctor [RECIPE.toml] [--hostfile FILE | --nodes N --node I --meet HOST:PORT] [--json]

Checks, before a run: devices and driver, /dev/shm, the run directory's disk and file system, ports and limits,
versions; over several nodes also the links pair by pair, the clocks, and the folder that they share.

  RECIPE.toml       the run's recipe; flags of meshwright train go over it (--run DIR, --devices N, --model NAME ...)
  --hostfile FILE   check every host of it over ssh, and the links between them
  --nodes N --node I --meet HOST:PORT [--slots S]
                    the same by hand, a command on each node; under torchrun none of these is needed
  --cluster TEXT    the cluster or its file, whose links between nodes are expected; else the other links are
  --meet-s S        seconds that node 0 waits for the others (120)
  --json            print the report as JSON

  meshwright doctor recipes/first.toml --run runs/first
  meshwright doctor --hostfile hosts --run /shared/run1

Exit status: 0 without findings, 3 with one or more, 2 for a command that can't be.
"""


def run(argv: Sequence[str]) -> int:
    """Checks and prints a table or JSON; exit status 0 without findings, else `FINDINGS`."""
    args = list(argv)
    if {"-h", "--help", "--help-all"} & set(args):
        print_result(USAGE.rstrip())
        return 0
    as_json, hostfile = take_flag(args, "--json"), take_value(args, "--hostfile")
    report = _examine_hosts(args, hostfile) if hostfile is not None else _examine(args, as_json)
    if report is None:  # a rank of torchrun beyond the first of its node
        return 0
    if as_json:
        print_result(json.dumps(report.to_json(), indent=2))
    else:
        show_report(report)
    return FINDINGS if report.findings else 0


def _examine_hosts(args: list[str], hostfile: str) -> DoctorReport:
    if stray_flags := [flag for flag in ("--nodes", "--node", "--meet", "--slots") if flag in args]:
        raise ConfigError(f"{', '.join(stray_flags)} with --hostfile, which says it; drop one of them")
    # The slots of the hostfile are the devices.
    take_value(args, "--devices")
    read_config(RunConfig, _without_own_values(args), "doctor")
    return doctor_on_hosts(args, hostfile)


def _without_own_values(args: Sequence[str]) -> list[str]:
    """Returns the arguments that a run's config takes."""
    config_args = list(args)
    for flag in ("--cluster", "--meet-s"):
        take_value(config_args, flag)
    return config_args


def _examine(args: list[str], as_json: bool) -> DoctorReport | None:
    cluster, meet_s = take_value(args, "--cluster"), _parse_seconds(take_value(args, "--meet-s"))
    nodes = take_nodes(args)
    config = read_config(RunConfig, args, "doctor")
    return doctor(config, nodes=nodes, cluster=cluster or "", meet_s=meet_s, say=silently if as_json else to_stderr)


def _parse_seconds(text: str | None) -> float:
    try:
        seconds = MEET_S if text is None else float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(f"--meet-s {text}: give seconds above 0, as --meet-s 120")
    return seconds
