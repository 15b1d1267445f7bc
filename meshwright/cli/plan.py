"""``meshwright plan``: which layout is fastest on some machines, what it takes, and why the others lose."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.cli.arguments import read_config, take_flag
from meshwright.cli.main import load_file
from meshwright.jobs.requests import PlanConfig


def run(argv: Sequence[str]) -> int:
    """Plans; exit status 0 when something fits."""
    args = list(argv)
    if "--serve" in args:
        return int(load_file("plan_serve").serve(args))
    as_json = take_flag(args, "--json")
    config = read_config(PlanConfig, args, "plan")
    return int(load_file("plan_output").answer_plan(config, as_json))
