"""``meshwright plan``: which layout is fastest on some machines, what it takes, and why the others lose."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import meshwright
from meshwright.cli.arguments import answer, read_config, take_flag
from meshwright.cli.plan_output import show_curve, show_plan
from meshwright.cli.plan_page import write_page
from meshwright.jobs.plan_model import PlannableModel, model_of_sizes, plan_model, scale_model, spans_devices
from meshwright.jobs.progress import to_stderr
from meshwright.jobs.requests import PlanConfig


def run(argv: Sequence[str]) -> int:
    """Plans; exit status 0 when something fits."""
    words = list(argv)
    as_json = take_flag(words, "--json")
    config = read_config(PlanConfig, words, "plan")
    # Sizes need no torch, which takes longer to import than a plan.
    model = model_of_sizes(config.sizes) if config.sizes else meshwright.plannable_model(config.model, config.sequence)
    return _show_scaling(config, model, as_json) if spans_devices(config) else _show_plan(config, model, as_json)


def _show_plan(config: PlanConfig, model: PlannableModel, as_json: bool) -> int:
    result = plan_model(config, model)
    question, choice, compared = result.question, result.choice, dict(result.compared)
    if config.html:
        to_stderr(f"page: {write_page(Path(config.html), question, choice, compared)}")
    if as_json:
        answer(json.dumps(result.to_json(), indent=2))
    else:
        show_plan(question, choice, compared)
    return 0


def _show_scaling(config: PlanConfig, model: PlannableModel, as_json: bool) -> int:
    result = scale_model(config, model)
    if as_json:
        answer(json.dumps(result.to_json(), indent=2))
    else:
        show_curve(result.question, list(result.points))
    return 0 if any(point.best for point in result.points) else 1
