"""Products in chunks beside tp's traffic (`Layout.tp_overlap`): tried for finalists on GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from meshwright.planner.choose import Candidate, Choice, Question, notes, price_possible, sort_candidates
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import FLOAT8_RECIPES, Layout
from meshwright.units import format_seconds

CHUNKS = (1, 2, 4, 8)
"""Numbers of chunks that are tried; more would send messages of a few hundred tokens."""


def with_overlap(layout: Layout) -> Iterator[Layout]:
    """Yields forms of a layout that hide tp's traffic under its products; none where there is none, or none can.

    A schedule that splits backward keeps its weight gradients for its bubbles.
    """
    is_whole = layout.precision not in FLOAT8_RECIPES and not layout.pipeline().splits_backward
    if layout.degree(Mechanics.MATRICES) > 1 and not layout.tp_overlap and is_whole:
        yield from (dataclasses.replace(layout, tp_overlap=chunks) for chunks in CHUNKS)


def consider_overlap(question: Question, choice: Choice, price: Callable[[Layout], Candidate]) -> Choice:
    """Returns the choice, with finalists' forms that hide tp's traffic beside them where these fit and are faster.

    Args:
        question: what was planned; only our own runtime hides it in this way.
        choice: of layouts that wait for it.
        price: prices a layout as the finalists are.
    """
    if question.engine is not None or not question.machine.device.units:
        return choice
    options: dict[str, Candidate] = {}
    for option in choice.best:
        candidates = price_possible(with_overlap(option.layout), price)
        fitting = [candidate for candidate in candidates if candidate.price.peak <= question.usable_bytes]
        fastest = min(fitting, key=lambda candidate: candidate.price.step_s, default=None)
        if fastest and fastest.price.step_s * (1 + question.same) < option.price.step_s:
            options[str(fastest.layout)] = fastest
    if not options:
        return choice
    without = choice.best[0]
    best, ties = sort_candidates([*choice.best, *options.values()], question.same)
    plan, sentences = best[0], choice.notes
    if plan.layout.tp_overlap:
        sentences = (
            *notes(question, plan),
            f"tp_overlap={plan.layout.tp_overlap}: tp's traffic is sent under products, which is priced and was never "
            f"measured on several GPUs; the fastest without, {without.layout}, takes "
            f"{format_seconds(without.price.step_s)}",
        )
    return dataclasses.replace(choice, best=best, ties=ties, notes=sentences)
