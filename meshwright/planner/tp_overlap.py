"""Products in chunks beside tp's traffic (`Layout.tp_overlap`): tried for finalists on GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from meshwright.planner.candidate import Candidate, Choice
from meshwright.planner.forms import consider_forms
from meshwright.planner.question import Question
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout
from meshwright.spec.layout_fields import FLOAT8_RECIPES

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
    return consider_forms(question, choice, price, "tp_overlap", with_overlap)
