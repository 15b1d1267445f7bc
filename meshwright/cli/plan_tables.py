"""Answers to the questions about a plan as tables for people: a line a case, and a sentence that sums them up."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from meshwright.cli.arguments import print_result
from meshwright.cli.plan_output import TFLOPS, format_tflops, make_console, rate_cells
from meshwright.jobs.plan_questions import Answer, BudgetResult, WhatIfResult
from meshwright.planner.capacity import NEAR_BEST, BatchCurve, LargestModel, LongestRows
from meshwright.planner.cases import PlannedCase
from meshwright.planner.emit import Emitted
from meshwright.planner.measured_run import MeasuredRun
from meshwright.planner.reshape import Reshape
from meshwright.planner.walls import STATE_BYTES, Walls
from meshwright.units import format_bytes, format_count, format_seconds

MOST_LOSSES = 6
"""Parts of a step that are listed where a measured layout loses."""
LONGEST_WHY = 160
"""Characters of a reason in a table."""


def show_answer(answer: Answer) -> None:
    """Prints an answer."""
    console = make_console()
    if isinstance(answer, BudgetResult):
        _show_budget(console, answer)
    elif isinstance(answer, LargestModel):
        _show_largest(console, answer)
    elif isinstance(answer, LongestRows):
        _show_longest(console, answer)
    elif isinstance(answer, BatchCurve):
        _show_batch(console, answer)
    elif isinstance(answer, WhatIfResult):
        _show_what_if(console, answer)
    elif isinstance(answer, MeasuredRun):
        _show_measured(console, answer)
    elif isinstance(answer, Reshape):
        _show_reshape(console, answer)
    elif isinstance(answer, Walls):
        _show_walls(console, answer)
    else:
        _show_emitted(answer)


def _new_table(title: str, names: Sequence[str], left: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    return table


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_WHY else text[: LONGEST_WHY - 3] + "..."


def _case_cells(case: PlannedCase) -> list[str]:
    """Returns step, tokens a second, TFLOP/s, MFU, fullest rank and layout of a case as cells."""
    if case.best is None:
        return ["", "", "", "", "", _short(case.why)]
    return [*rate_cells(case.best), format_bytes(case.best.price.peak), str(case.best.layout)]


_CASE_NAMES = ("step", "tokens/s", TFLOPS, "MFU", "fullest rank", "layout")


def _show_budget(console: Console, result: BudgetResult) -> None:
    names = ("cluster", "days", "device hours", "$", "kWh", "step", "tokens/s", TFLOPS, "MFU", "layout")
    within = f" within {result.days:g} days" if result.days else ""
    table = _new_table(f"{format_count(result.tokens)} tokens{within}", names, ("cluster", "layout"))
    planned = [budget for budget in result.budgets if budget.case.best]
    # Numbers of devices without a layout are told apart only where there is nothing else.
    for budget in planned or result.budgets:
        case = budget.case
        if case.best is None:
            table.add_row(case.name, *[""] * 8, _short(case.why))
            continue
        mark = "[bold green]" if budget is result.chosen else ""
        table.add_row(
            f"{mark}{case.name}",
            f"{budget.days:.1f}",
            f"{budget.device_hours:,.0f}",
            "" if budget.dollars is None else f"{budget.dollars:,.0f}",
            "" if budget.kwh is None else f"{budget.kwh:,.0f}",
            *rate_cells(case.best),
            str(case.best.layout),
        )
    console.print(table)
    if planned and len(planned) < len(result.budgets):
        without = ", ".join(budget.case.name for budget in result.budgets if budget.case.best is None)
        console.print(f"no layout fits or divides: {without}")
    if result.chosen is not None:
        chosen = result.chosen
        spent = f"${chosen.dollars:,.0f}" if chosen.dollars is not None else f"{chosen.device_hours:,.0f} device hours"
        power = f", {chosen.kwh:,.0f} kWh of the devices" if chosen.kwh is not None else ""
        kind = ("fewest kWh" if result.objective == "energy" else "cheapest") if len(planned) > 1 else "takes"
        console.print(
            f"{kind}: {chosen.case.name}, {chosen.steps:,} steps in {chosen.days:.1f} days, {spent}{power}, "
            f"{chosen.case.best.layout if chosen.case.best else ''}"
        )
        console.print("note: days of steps alone, without faults, evaluation and checkpoints; list prices")
    elif planned:
        fastest = min(planned, key=lambda budget: budget.days)
        console.print(
            f"none ends within {result.days:g} days; the fastest is {fastest.case.name} in {fastest.days:.1f} days: "
            f"--days {math.ceil(fastest.days)}, or a larger --cluster"
        )


def _show_largest(console: Console, found: LargestModel) -> None:
    table = _new_table(
        f"the largest model of {found.asked.question.job.shape.name}'s family", ("model", "parameters", *_CASE_NAMES),
        ("model", "layout"),
    )  # fmt: skip
    for case in (found.asked, *found.largest):
        table.add_row(case.name, format_count(case.question.job.shape.parameters), *_case_cells(case))
    console.print(table)
    console.print("note: layers and widths grow alike, by whole groups of heads; vocabulary and head size stay")


def _show_longest(console: Console, rows: LongestRows) -> None:
    table = _new_table("the longest rows that fit", ("rows", *_CASE_NAMES), ("rows", "layout"))
    for case in (rows.asked, *rows.longest):
        table.add_row(case.name, *_case_cells(case))
    console.print(table)


def _show_batch(console: Console, curve: BatchCurve) -> None:
    names = ("rows", "tokens a step", "step", "tokens/s", TFLOPS, "MFU", "fullest rank", "layout")
    table = _new_table("throughput by batch", names, ("layout",))
    for case in curve.cases:
        job = case.question.job
        table.add_row(str(job.rows), format_count(job.rows * job.sequence), *_case_cells(case))
    console.print(table)
    if curve.knee is not None:
        console.print(f"knee: {curve.knee} rows have {NEAR_BEST:.0%} of the best throughput")
        return
    last = curve.cases[-1].question.job.rows
    console.print(f"no knee up to {last} rows: the last doubling still brought more than {1 / NEAR_BEST - 1:.0%}")


def _show_what_if(console: Console, result: WhatIfResult) -> None:
    today = result.today.best
    table = _new_table(
        f"what if, for {result.today.question.cluster}", ("cluster", "gain", "$/Mtoken", *_CASE_NAMES),
        ("cluster", "layout"),
    )  # fmt: skip
    for case in (result.today, *result.changed):
        gain = cost = ""
        if case.best is not None:
            cost = "" if case.best.cost_per_mtoken is None else f"{case.best.cost_per_mtoken:.4f}"
            if today is not None and case is not result.today:
                gain = f"{case.best.tokens_per_s / today.tokens_per_s - 1:+.1%}"
        table.add_row(case.name, gain, cost, *_case_cells(case))
    console.print(table)


def _show_measured(console: Console, run: MeasuredRun) -> None:
    names = ("", "step", "tokens/s", TFLOPS, "MFU", "layout")
    table = _new_table("a layout that runs", names, ("", "layout"))
    measured = [format_seconds(run.measured_s), format_count(run.tokens_per_s)]
    table.add_row(
        "measured", *measured, format_tflops(run.flops_per_device), f"{run.mfu:.1%}", str(run.predicted.layout)
    )
    table.add_row("predicted", *rate_cells(run.predicted), str(run.predicted.layout))
    if run.plan.best is not None:
        table.add_row("plan", *rate_cells(run.plan.best), str(run.plan.best.layout))
    console.print(table)
    if run.shortage:
        console.print(f"note: by the price it doesn't fit: {run.shortage}")
    losses = _new_table("measured less planned", ("part", "time"), ("part",))
    shown = sorted(run.losses.items(), key=lambda item: -abs(item[1]))[:MOST_LOSSES]
    for name, seconds in shown:
        if abs(seconds) > 1e-3 * run.measured_s:
            sign = "-" if seconds < 0 else "+"
            words = "what the price doesn't explain" if name == "unpredicted" else name
            losses.add_row(words, f"{sign}{format_seconds(abs(seconds))}")
    console.print(losses)


def _show_reshape(console: Console, found: Reshape) -> None:
    names = ("change", "parameters", "tokens/s", "FLOP/s", *_CASE_NAMES)
    table = _new_table(f"nearby sizes of {found.today.question.job.shape.name}", names, ("change", "layout"))
    parameters = format_count(found.today.question.job.shape.parameters)
    table.add_row("today", parameters, "", "", *_case_cells(found.today))
    for item in found.better:
        more = f"{'-' if item.parameters < 0 else '+'}{format_count(abs(item.parameters))}"
        gains = (f"{item.throughput:+.1%}", f"{item.utilization:+.1%}")
        table.add_row(item.case.name, more, *gains, *_case_cells(item.case))
    console.print(table)
    if not found.better:
        console.print(f"none of {found.tried} nearby models has clearly more FLOP/s: these sizes are good ones")


def _show_walls(console: Console, walls: Walls) -> None:
    best, cluster = walls.today.best, walls.today.question.cluster
    assert best is not None
    step_s = best.price.step_s
    console.print(f"[bold]{walls.today.question.job.shape.name}[/bold] on {cluster}: {best.layout}")
    console.print(
        f"compute: a step is {format_count(walls.step_flops)} FLOP, {format_seconds(walls.peak_s)} at the dense peak; "
        f"the plan computes for {format_seconds(walls.compute_s)} of its {format_seconds(step_s)} (MFU {best.mfu:.1%})"
    )
    least = f"{walls.fewest_devices} devices hold it" if walls.fewest_devices else "no number of these devices holds it"
    console.print(
        f"memory: weights, gradients and optimizer are {format_bytes(walls.state_bytes)} ({STATE_BYTES} bytes a "
        f"parameter), {walls.state_bytes / walls.memory_bytes:.0%} of the {format_bytes(walls.memory_bytes)} of all "
        f"devices; at the least {least}"
    )
    network = "the ranks cross no network"
    if walls.hidden_tokens is not None:
        network = (
            f"with fewer than {walls.hidden_tokens:,.0f} tokens a device and step, sums over the network outlast "
            f"compute; this batch has {walls.tokens_per_device:,.0f}"
        )
    console.print(f"network: links take {format_seconds(walls.traffic_s)} of the step, exposed; {network}")
    table = _new_table("twice of each (half the latency)", ("wall", "gain", *_CASE_NAMES), ("wall", "layout"))
    for case in sorted(walls.doubled, key=lambda item: -walls.gains.get(item.name, -1.0)):
        gain = f"{walls.gains[case.name]:+.1%}" if case.name in walls.gains else ""
        table.add_row(case.name, gain, *_case_cells(case))
    console.print(table)
    console.print(f"nearest wall: {walls.nearest}")


def _show_emitted(emitted: Emitted) -> None:
    # The text alone on standard output, so that it can go to a file.
    print_result(emitted.text)
    for sentence in (str(emitted.candidate.layout), *emitted.notes):
        sys.stderr.write(f"note: {sentence}\n")
