"""A plan as an answer: tables and a drawn timeline for people, JSON for programs."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

import meshwright
from meshwright.cli.arguments import print_result
from meshwright.cli.main import load_file
from meshwright.errors import REFUSED
from meshwright.jobs.plan_model import (
    PlannableModel,
    ScalingResult,
    model_of_sizes,
    plan_model,
    preset_model,
    scale_model,
    spans_devices,
)
from meshwright.jobs.plan_questions import answer_question
from meshwright.jobs.progress import to_stderr
from meshwright.jobs.requests import PlanConfig
from meshwright.planner.candidate import Candidate, Choice
from meshwright.planner.chances import candidate_chances
from meshwright.planner.cost.prices import layer_span
from meshwright.planner.explain import NAMES, against, format_chance, reason
from meshwright.planner.question import Question
from meshwright.planner.scaling import KNEE, Point, best_size
from meshwright.planner.timeline import timeline
from meshwright.planner.uncertainty import INTERVAL
from meshwright.schedules import draw
from meshwright.units import format_bytes, format_count, format_seconds

GIB = 2.0**30
LEAST = 0.002
"""Share of a step or of a rank's memory from which a part has a line of its own."""
WIDTH = 140
"""Columns where the output is no terminal."""
TFLOPS = "TFLOP/s"
"""Heading of a device's model FLOP/s."""
MOST_RANKS = 16
"""Ranks of a pipeline up to which its timeline is drawn in a terminal."""


def answer_plan(config: PlanConfig, as_json: bool) -> int:
    """Plans and prints the answer; exit status 0 when something fits."""
    # Sizes need no torch, which takes longer to import than a plan.
    model = read_plannable(config)
    if config.question:
        answer = answer_question(config, model)
        if as_json:
            print_result(json.dumps(answer.to_json(), indent=2))
        else:
            load_file("plan_tables").show_answer(answer)
        return 0 if answer.is_met else REFUSED
    if spans_devices(config):
        return _answer_scaling(scale_model(config, model), as_json)
    result = plan_model(config, model)
    question, choice, compared = result.question, result.choice, dict(result.compared)
    if config.html:
        page = load_file("plan_page").write_page(Path(config.html), question, choice, compared)
        to_stderr(f"page: {page}")
    if as_json:
        print_result(json.dumps(result.to_json(), indent=2))
    else:
        show_plan(question, choice, compared)
    return 0


def read_plannable(config: PlanConfig) -> PlannableModel:
    """Returns the model of a request; torch is loaded where its modules are read."""
    if config.sizes:
        return model_of_sizes(config.sizes)
    return preset_model(config.model) or meshwright.plannable_model(config.model, config.sequence)


def _answer_scaling(result: ScalingResult, as_json: bool) -> int:
    if as_json:
        print_result(json.dumps(result.to_json(), indent=2))
    else:
        show_curve(result.question, list(result.points))
    return 0 if any(point.best for point in result.points) else 1


def make_console() -> Console:
    """Returns a console for tables, wide where the output is no terminal."""
    console = Console(highlight=False)
    # Rich assumes 80 columns for a file or a pipe, where nothing has to be folded.
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)


def show_plan(question: Question, choice: Choice, compared: dict[str, str]) -> None:
    """Prints the plan for people."""
    console = make_console()
    job, best = question.job, choice.best[0]
    console.print(
        f"[bold]{job.shape.name}[/bold], {format_count(job.shape.parameters)} parameters, {job.rows} rows of "
        f"{job.sequence} tokens, on {question.cluster} ({question.cluster.nodes_text})"
    )
    console.print(f"[bold green]{best.layout}[/bold green]\n  {reason(question, choice)}")
    console.print(
        f"  considered {choice.considered:,} layouts in {format_seconds(choice.search_s)}: "
        f"{choice.considered - choice.priced:,} pruned by a lower bound, {choice.priced:,} priced, of which "
        f"{choice.too_large:,} don't fit"
    )
    console.print(_ranking_table(question, choice))
    console.print(_step_table(best))
    console.print(_memory_table(question, best))
    simulated = timeline(job, best.layout, question.machine, question.runtime) if question.cluster.uniform else None
    if simulated is not None and simulated.schedule.ranks <= MOST_RANKS:
        console.print(f"pipeline of one step, bubble {simulated.bubble:.1%}:")
        console.print(draw.text(simulated, min(console.width, 160)), markup=False, no_wrap=True)
    for text, reason_text in compared.items():
        console.print(f"[bold]{text}[/bold]: {reason_text}")
    for note in choice.notes:
        console.print(f"note: {note}")


def _ranking_table(question: Question, choice: Choice) -> Table:
    table = Table(title="the best", title_justify="left")
    columns = ("step", f"{INTERVAL:.0%} between", "tokens/s", TFLOPS, "MFU", "fullest rank", "fits")
    for name in ("layout", *columns, "against the first"):
        table.add_column(name, justify="left" if name in ("layout", "against the first") else "right", overflow="fold")
    if question.objective == "cost":
        table.add_column("$/Mtoken", justify="right")
    if question.objective == "energy":
        table.add_column("J/token", justify="right")
    for candidate in choice.shown:
        comparison = (
            against(candidate, choice.best[0], question.tie_tolerance) if candidate is not choice.best[0] else ""
        )
        text = str(candidate.layout).replace(f",precision={question.job.precision}", "")
        chances, (step, *rates) = candidate_chances(question, candidate), rate_cells(candidate)
        between = f"{format_seconds(chances.step_low_s)}, {format_seconds(chances.step_high_s)}"
        cells = [text, step, between, *rates]
        cells += [format_bytes(candidate.price.peak), format_chance(chances.fits), comparison]
        if question.objective == "cost":
            cells.append(f"{candidate.cost_per_mtoken:.4f}")
        if question.objective == "energy":
            cells.append(f"{candidate.joules_per_token:.3f}")
        table.add_row(*cells)
    return table


def format_tflops(flops_per_s: float) -> str:
    """Formats FLOP/s as TFLOP/s, of processor cores with two digits behind the point."""
    return f"{flops_per_s / 1e12:.{0 if flops_per_s > 1e13 else 2}f}"


def rate_cells(candidate: Candidate) -> list[str]:
    """Returns seconds of a step, tokens a second, TFLOP/s of a device and MFU as cells."""
    return [
        format_seconds(candidate.price.step_s),
        format_count(candidate.tokens_per_s),
        format_tflops(candidate.flops_per_device),
        f"{candidate.mfu:.1%}",
    ]


def _step_table(best: Candidate) -> Table:
    table = Table(title=f"the step: {format_seconds(best.price.step_s)}", title_justify="left")
    for name in ("part", "time", "share"):
        table.add_column(name, justify="left" if name == "part" else "right")
    for name, seconds in sorted(best.price.parts.items(), key=lambda item: -item[1]):
        # What takes next to nothing would push what matters off the screen.
        if seconds > LEAST * best.price.step_s:
            table.add_row(NAMES[name], format_seconds(seconds), f"{seconds / best.price.step_s:.1%}")
    return table


def _memory_table(question: Question, best: Candidate) -> Table:
    table = Table(title="memory of a rank of each stage at its fullest moment, GiB", title_justify="left")
    stages = best.price.stages
    names = [name for name in stages[0].memory if any(stage.memory[name] > LEAST * stage.peak for stage in stages)]
    table.add_column("stage")
    table.add_column("layers")
    hosts = any(stage.host for stage in stages)
    for name in (*names, "all", "free", *(("in host memory",) if hosts else ())):
        table.add_column(name, justify="right")
    ranks_per_stage = question.cluster.devices // len(stages)
    # Stages of equal bytes, to the megabyte, share a line: a hundred stages have a handful of kinds.
    for first_stage, last_stage in _equal_runs(
        [[round(value, -6) for value in stage.memory.values()] for stage in stages]
    ):
        stage, last_stage_price = stages[first_stage], stages[last_stage]
        memory_bytes = question.cluster.device_of(first_stage * ranks_per_stage).memory_bytes
        cells = [f"{stage.memory[name] / GIB:.2f}" for name in names]
        stage_label = str(first_stage) if first_stage == last_stage else f"{first_stage}-{last_stage}"
        layers = layer_span(stage, last_stage_price)
        cells += [f"{stage.peak / GIB:.2f}", f"{(memory_bytes - stage.peak) / GIB:.2f}"]
        table.add_row(stage_label, layers, *cells, *([f"{stage.host / GIB:.2f}"] if hosts else []))
    return table


def _equal_runs(rows: list[list[float]]) -> list[tuple[int, int]]:
    """Returns the runs of equal neighbouring rows as (first index, last index)."""
    runs: list[tuple[int, int]] = []
    for index, row in enumerate(rows):
        if runs and rows[runs[-1][0]] == row:
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return runs


def show_curve(question: Question, points: list[Point]) -> None:
    """Prints how the plan changes with the number of devices."""
    console = make_console()
    table = Table(title=f"{question.job.shape.name} on {question.cluster.name or question.cluster}")
    for name in ("devices", "step", "tokens/s", TFLOPS, "MFU", "efficiency", "$/Mtoken", "J/token", "layout"):
        table.add_column(name, justify="left" if name == "layout" else "right", overflow="fold")
    for point in points:
        if point.best is None:
            table.add_row(str(point.devices), *[""] * 7, point.why)
            continue
        best = point.best
        cost = "" if best.cost_per_mtoken is None else f"{best.cost_per_mtoken:.4f}"
        energy = "" if best.joules_per_token is None else f"{best.joules_per_token:.3f}"
        cells = [str(point.devices), *rate_cells(best), f"{point.efficiency:.0%}", cost, energy, str(best.layout)]
        table.add_row(*cells)
    console.print(table)
    console.print(size_sentence(question.objective, points))


def size_sentence(objective: str, points: list[Point]) -> str:
    """Returns a sentence on the number of devices that an objective asks for, or that none in the range is it."""
    planned = [point for point in points if point.best]
    if len(planned) < 2:
        return "no knee: fewer than two of these numbers of devices have a plan"
    size, last = best_size(points, objective), planned[-1].devices
    if objective != "time":
        figure = "dollars" if objective == "cost" else "joules"
        best = next((point.best for point in planned if point.devices == size), None)
        if size is None or best is None:
            return f"{figure} a token are unknown for these devices"
        value = f"${best.cost_per_mtoken:.4f} a million" if objective == "cost" else f"{best.joules_per_token:.3f} J a"
        return f"fewest {figure} a token: {size} devices, {value} token{'s' if objective == 'cost' else ''}"
    if size is None:
        return f"no knee up to {last} devices: every growth brought at least {KNEE:.0%} of its part"
    return f"knee: {size} devices; the next growth brings less than {KNEE:.0%} of its part"
