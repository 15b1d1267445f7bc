"""A plan as an answer: tables and a drawn timeline for people, JSON for programs."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

import meshwright
from meshwright.cli.arguments import answer
from meshwright.cli.plan_page import write_page
from meshwright.jobs.plan_model import ScalingResult, model_of_sizes, plan_model, scale_model, spans_devices
from meshwright.jobs.progress import to_stderr
from meshwright.jobs.requests import PlanConfig
from meshwright.planner.choose import Candidate, Choice, Question
from meshwright.planner.explain import NAMES, against, reason
from meshwright.planner.scaling import KNEE, Point, knee
from meshwright.planner.timeline import timeline
from meshwright.schedules import draw
from meshwright.units import format_bytes, format_count, format_seconds

GIB = 2.0**30
LEAST = 0.002
"""Share of a step or of a rank's memory from which a part has a line of its own."""
WIDTH = 140
"""Columns where the output is no terminal."""
MOST_RANKS = 16
"""Ranks of a pipeline up to which its timeline is drawn in a terminal."""


def answer_plan(config: PlanConfig, as_json: bool) -> int:
    """Plans and prints the answer; exit status 0 when something fits."""
    # Sizes need no torch, which takes longer to import than a plan.
    model = model_of_sizes(config.sizes) if config.sizes else meshwright.plannable_model(config.model, config.sequence)
    if spans_devices(config):
        return _answer_scaling(scale_model(config, model), as_json)
    result = plan_model(config, model)
    question, choice, compared = result.question, result.choice, dict(result.compared)
    if config.html:
        to_stderr(f"page: {write_page(Path(config.html), question, choice, compared)}")
    if as_json:
        answer(json.dumps(result.to_json(), indent=2))
    else:
        show_plan(question, choice, compared)
    return 0


def _answer_scaling(result: ScalingResult, as_json: bool) -> int:
    if as_json:
        answer(json.dumps(result.to_json(), indent=2))
    else:
        show_curve(result.question, list(result.points))
    return 0 if any(point.best for point in result.points) else 1


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)


def show_plan(question: Question, choice: Choice, compared: dict[str, str]) -> None:
    """Prints the plan for people."""
    console = _console()
    job, best = question.job, choice.best[0]
    console.print(
        f"[bold]{job.shape.name}[/bold], {format_count(job.shape.parameters)} parameters, {job.rows} rows of "
        f"{job.sequence} tokens, on {question.cluster} ({question.cluster.nodes} nodes)"
    )
    console.print(f"[bold green]{best.layout}[/bold green]\n  {reason(question, choice)}")
    console.print(
        f"  considered {choice.considered} layouts in {format_seconds(choice.took_s)}: priced {choice.priced}, of "
        f"which {choice.too_large} don't fit; a bound shows that the others can't be better"
    )
    console.print(_ranking(question, choice))
    console.print(_step(best))
    console.print(_memory(question, best))
    run = timeline(job, best.layout, question.machine, question.runtime) if question.cluster.uniform else None
    if run is not None and run.schedule.ranks <= MOST_RANKS:
        console.print(f"pipeline of one step, bubble {run.bubble:.1%}:")
        console.print(draw.text(run, min(console.width, 160)), markup=False, no_wrap=True)
    for text, told in compared.items():
        console.print(f"[bold]{text}[/bold]: {told}")
    for note in choice.notes:
        console.print(f"note: {note}")


def _ranking(question: Question, choice: Choice) -> Table:
    table = Table(title="the best", title_justify="left")
    for name in ("layout", "step", "tokens/s", "fullest rank", "against the first"):
        table.add_column(name, justify="left" if name in ("layout", "against the first") else "right", overflow="fold")
    if question.objective == "cost":
        table.add_column("$/Mtoken", justify="right")
    if question.objective == "energy":
        table.add_column("J/token", justify="right")
    for one in choice.shown:
        told = against(one, choice.best[0], question.same) if one is not choice.best[0] else ""
        text = str(one.layout).replace(f",precision={question.job.precision}", "")
        cells = [text, format_seconds(one.price.step_s), format_count(one.tokens_per_s)]
        cells += [format_bytes(one.price.peak), told]
        if question.objective == "cost":
            cells.append(f"{one.cost_per_mtoken:.4f}")
        if question.objective == "energy":
            cells.append(f"{one.joules_per_token:.3f}")
        table.add_row(*cells)
    return table


def _step(best: Candidate) -> Table:
    table = Table(title=f"the step: {format_seconds(best.price.step_s)}", title_justify="left")
    for name in ("part", "time", "share"):
        table.add_column(name, justify="left" if name == "part" else "right")
    for name, seconds in sorted(best.price.parts.items(), key=lambda item: -item[1]):
        if seconds > LEAST * best.price.step_s:
            table.add_row(NAMES[name], format_seconds(seconds), f"{seconds / best.price.step_s:.1%}")
    return table


def _memory(question: Question, best: Candidate) -> Table:
    table = Table(title="memory of a rank of each stage, GiB", title_justify="left")
    stages = best.price.stages
    names = [name for name in stages[0].memory if any(stage.memory[name] > LEAST * stage.peak for stage in stages)]
    table.add_column("stage")
    table.add_column("layers")
    hosts = any(stage.host for stage in stages)
    for name in (*names, "all", "free", *(("in host memory",) if hosts else ())):
        table.add_column(name, justify="right")
    wide = question.cluster.devices // len(stages)
    for first, last in _alike([[round(value, -6) for value in stage.memory.values()] for stage in stages]):
        stage, end = stages[first], stages[last]
        room = question.cluster.device_of(first * wide).memory_bytes
        cells = [f"{stage.memory[name] / GIB:.2f}" for name in names]
        place = str(first) if first == last else f"{first}-{last}"
        layers = f"{stage.layers[0]}-{max(end.layers) - 1}"
        cells += [f"{stage.peak / GIB:.2f}", f"{(room - stage.peak) / GIB:.2f}"]
        table.add_row(place, layers, *cells, *([f"{stage.host / GIB:.2f}"] if hosts else []))
    return table


def _alike(rows: list[list[float]]) -> list[tuple[int, int]]:
    """Runs of equal neighbours, as (first, last)."""
    runs: list[tuple[int, int]] = []
    for at, row in enumerate(rows):
        if runs and rows[runs[-1][0]] == row:
            runs[-1] = (runs[-1][0], at)
        else:
            runs.append((at, at))
    return runs


def show_curve(question: Question, points: list[Point]) -> None:
    """Prints how the plan changes with the number of devices."""
    console = _console()
    table = Table(title=f"{question.job.shape.name} on {question.cluster.name or question.cluster}")
    for name in ("devices", "step", "tokens/s", "efficiency", "$/Mtoken", "layout"):
        table.add_column(name, justify="left" if name == "layout" else "right", overflow="fold")
    for point in points:
        if point.best is None:
            table.add_row(str(point.devices), "", "", "", "", point.why)
            continue
        one = point.best
        cost = "" if one.cost_per_mtoken is None else f"{one.cost_per_mtoken:.4f}"
        table.add_row(
            str(point.devices),
            format_seconds(one.price.step_s),
            format_count(one.tokens_per_s),
            f"{point.efficiency:.0%}",
            cost,
            str(one.layout),
        )
    console.print(table)
    at, last = knee(points), points[-1].devices
    if at is not None:
        console.print(f"knee: {at} devices; beyond it a doubling brings less than {KNEE:.0%} of its part")
    elif sum(point.best is not None for point in points) > 1:
        console.print(f"no knee up to {last} devices: every growth brought at least {KNEE:.0%} of its part")
