"""``meshwright verify``: proves that layouts of a model, a run or a custom loop compute what one device computes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import meshwright
from meshwright.cli.arguments import print_result, read_config, take_flag, take_value
from meshwright.cli.verify_output import show, show_job, show_loop, show_outcome
from meshwright.errors import ConfigError
from meshwright.jobs.progress import to_stderr as say
from meshwright.jobs.requests import LoopConfig, VerifyConfig
from meshwright.jobs.run_directory import CONFIG
from meshwright.spec.layout import Layout
from meshwright.train.run_config import RunConfig

if TYPE_CHECKING:
    from meshwright.proof.compare import Verdict
    from meshwright.strategy.loop_proof import LoopVerdict

STATUS = {"passed": 0, "failed": 1, "refused": 2}
"""Exit statuses: every layout equals one device; one doesn't; one couldn't run (and none failed)."""
JOB_USAGE = """usage: meshwright verify RUN|RECIPE.toml [--layout LAYOUT ...] [--full] [--steps N] [--json] [FLAGS]

Proves a run's directory or a recipe: its text, rows, length, optimizer, schedule and loss train under each layout, are
evaluated, saved, and resumed under the next layout as a plain loop on one device trains, in float64 to 1e-9.

  --layout     layouts, each resumed under the one after it and the last under the first; one alone is resumed on one
               device and taken up from one; the run's own when none is named
  --full       the model as it is, all rows and tokens, instead of a small clone
  --steps      optimizer steps, half under each of two layouts; 6 by default
  --timeout-s  limit for each run, in seconds; 600 by default
  FLAGS        with a recipe: those of meshwright train, over it
"""


def run(argv: Sequence[str]) -> int:
    """Proves and prints a table or JSON; see `STATUS` for the exit status."""
    args = list(argv)
    if args and not args[0].startswith("-"):
        return _run_job(args)
    if "--loop" in args:
        return _run_loop(args)
    as_json = take_flag(args, "--json")
    config, width = read_config(VerifyConfig, args, "verify"), 0

    def show_start(subject: str, layouts: Sequence[Layout]) -> None:
        nonlocal width
        width = max(len(str(layout)) for layout in layouts)
        say(f"{subject}: {len(layouts)} layouts against one device, {config.steps} steps, {layouts[0].precision}")
        if layouts[0].precision != "float64":
            say("  error<=bound: against float64; the bound is from what rounding does to one plain device")

    def show_verdict(verdict: Verdict) -> None:
        show(verdict, width)

    report = (
        meshwright.verify(config)
        if as_json
        else meshwright.verify(config, on_start=show_start, on_verdict=show_verdict)
    )
    if as_json:
        print_result(json.dumps(report.to_json(), indent=2))
    else:
        show_outcome(report.passed, report.refused, len(report.verdicts))
    return STATUS[report.outcome]


def _run_loop(args: list[str]) -> int:
    """Proves a custom loop: ``verify --loop FILE:FUNCTION``."""
    as_json = take_flag(args, "--json")
    config, width = read_config(LoopConfig, args, "verify"), 0

    def show_start(subject: str, layouts: Sequence[Layout]) -> None:
        nonlocal width
        width = max(len(str(layout)) for layout in layouts)
        say(f"{subject}: {len(layouts)} layouts against one device, {config.dtype}")

    def show_verdict(verdict: LoopVerdict) -> None:
        show_loop(verdict, width)

    if as_json:
        report = meshwright.verify_loop(config)
        print_result(json.dumps(report.to_json(), indent=2))
    else:
        report = meshwright.verify_loop(config, on_start=show_start, on_verdict=show_verdict)
        show_outcome(report.passed, report.refused, len(report.verdicts))
    return STATUS[report.outcome]


def _run_job(args: list[str]) -> int:
    """Proves a run's directory or a recipe: ``verify RUN|RECIPE.toml``."""
    if "--help" in args or "-h" in args:
        print_result(JOB_USAGE)
        return 0
    as_json, full = take_flag(args, "--json"), take_flag(args, "--full")
    trust = take_flag(args, "--trust")
    steps, limit_s = _take_steps_and_limit(args)
    layouts = _take_layouts(args)
    job = read_job(args)
    report = meshwright.verify_job(
        job,
        layout=layouts,
        full=full,
        steps=steps,
        timeout_s=limit_s,
        trust=trust,
        on_start=None if as_json else say,
        on_verdict=None if as_json else show_job,
    )
    if as_json:
        print_result(json.dumps(report.to_json(), indent=2))
    else:
        show_outcome(report.passed)
    return STATUS[report.outcome]


def _take_steps_and_limit(args: list[str]) -> tuple[int, float]:
    """Removes ``--steps`` and ``--timeout-s``, and returns their values."""
    steps, limit = take_value(args, "--steps") or "6", take_value(args, "--timeout-s") or "600"
    if not steps.isdigit():
        raise ConfigError(f"--steps {steps}: half of them run under each layout; give an even number from 2 on")
    try:
        return int(steps), float(limit)
    except ValueError:
        raise ConfigError(f"--timeout-s {limit}: give seconds above 0") from None


def _take_layouts(args: list[str]) -> list[str]:
    """Removes ``--layout A B ...`` and returns the layouts."""
    if "--layout" not in args:
        return []
    flag_index = args.index("--layout")
    stop = next((index for index in range(flag_index + 1, len(args)) if args[index].startswith("--")), len(args))
    named = args[flag_index + 1 : stop]
    if not named:
        raise ConfigError("--layout needs a value")
    del args[flag_index:stop]
    return named


def read_job(args: Sequence[str]) -> Path | RunConfig:
    """Returns a run's directory, or a recipe's config with flags over it."""
    path = Path(args[0])
    if path.is_dir():
        if len(args) > 1:
            raise ConfigError(f"{args[1]}: a run is proven as it is; flags go with a recipe")
        return path
    if path.suffix == ".toml":
        return read_config(RunConfig, args, "verify")
    raise ConfigError(f"{path} is neither a run's directory (with {CONFIG}) nor a recipe (.toml)")
