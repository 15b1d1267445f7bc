"""Compiled layers (`Layout.compile`): tried for finalists on GPUs, where the run's steps make up for compiling them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from meshwright.planner.candidate import Candidate, Choice, pareto_front, sort_candidates
from meshwright.planner.candidate_prices import price_possible
from meshwright.planner.cost.stages import block_kinds
from meshwright.planner.plan_notes import plan_notes
from meshwright.planner.question import Question
from meshwright.spec.layout import Layout
from meshwright.units import format_seconds

COMPILE_S = 8.0
"""Seconds of the first step for each kind of layer. Source: a Llama layer's on one H100 with its slow host, 2026-11-26:
8.2 s, and 10.9 s with attention inside documents."""


def compile_s(question: Question) -> float:
    """Returns about how long a run's first step takes longer because its layers are compiled."""
    return COMPILE_S * len(block_kinds(question.job.shape)[1])


def can_compile(question: Question) -> bool:
    """Whether a run compiles the model's layers: compiled code would hide what it draws (`train.model_analysis`)."""
    return not any(block.dropout or block.drops or block.drops_scores for block in question.job.shape.blocks)


def may_compile(question: Question) -> bool:
    """Whether a plan has the choice of compiled layers."""
    return question.compile_steps > 0 and question.cluster.uniform and can_compile(question)


def compiled_question(question: Question) -> Question:
    """Returns the same question of compiled layers alone."""
    return dataclasses.replace(question, base=dataclasses.replace(question.base, compile=True), compile_steps=0)


def consider_compiled(
    question: Question, choice: Choice, compiled: Choice | None, price: Callable[[Layout], Candidate]
) -> Choice:
    """Returns the choice, with compiled layouts where these are faster over all of the run's steps.

    Args:
        question: what was planned; its ``compile_steps`` are those of the run.
        choice: of layouts that aren't compiled, of which the compiled forms are tried.
        compiled: of compiled layouts; None where none fits.
        price: prices a layout as the finalists are.
    """
    without = min(choice.best, key=lambda option: option.price.step_s)
    least_saved_s = max(
        question.tie_tolerance / (1 + question.tie_tolerance) * without.price.step_s,
        compile_s(question) / question.compile_steps,
    )
    layouts = [*_compiled(option.layout for option in choice.best)]
    if compiled is not None:
        layouts += [option.layout for option in compiled.best if option.layout not in layouts]
        choice = dataclasses.replace(
            choice,
            considered=choice.considered + compiled.considered,
            priced=choice.priced + compiled.priced,
            too_large=choice.too_large + compiled.too_large,
            search_s=choice.search_s + compiled.search_s,
            kept=tuple(sorted((*choice.kept, *compiled.kept), key=lambda kept: kept[0])),
        )
    options = [
        option
        for option in price_possible(question, layouts, price)
        if option.price.peak <= question.usable_bytes and without.price.step_s - option.price.step_s > least_saved_s
    ]
    if not options:
        return choice
    best, ties = sort_candidates([*choice.best, *options], question.tie_tolerance)
    sentences = choice.notes
    if reason := compiled_reason(question, best[0].layout):
        seconds = format_seconds(without.price.step_s)
        sentences = (
            *plan_notes(question, best[0]),
            f"{reason}; the fastest without, {without.layout}, takes {seconds}",
        )
    eager = [Layout.parse(text) for _, _, text in choice.front]
    front = pareto_front([*best, *price_possible(question, (*eager, *_compiled(eager)), price)])
    return dataclasses.replace(choice, best=best, ties=ties, notes=sentences, front=front)


def _compiled(layouts: Iterable[Layout]) -> Iterator[Layout]:
    """Yields the compiled form of each layout that has one."""
    for layout in (dataclasses.replace(eager, compile=True) for eager in layouts if not eager.compile):
        if not layout.pipeline().splits_backward:
            yield layout


def compiled_reason(question: Question, layout: Layout) -> str:
    """Returns why a chosen layout is compiled, and for how long, in a clause; empty where that was no choice."""
    if not (layout.compile and question.compile_steps):
        return ""
    seconds = format_seconds(compile_s(question))
    return f"compile=true: faster layers, which the first step compiles for about {seconds}"
