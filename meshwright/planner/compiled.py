"""torch.compile of the layers (`Layout.compile`): tried for finalists on GPUs, where it saves launches and bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from meshwright.planner.choose import Candidate, Choice, Question, price_possible, sort_candidates
from meshwright.spec.layout import Layout
from meshwright.units import format_seconds


def consider_compiled(question: Question, choice: Choice, price: Callable[[Layout], Candidate]) -> Choice:
    """Returns the choice, with the finalists' compiled forms beside them where these are faster and fit.

    The search itself prices eager layers: what a compiler saves is about the same share of every layout's compute, so
    the finalists of one are those of the other.

    Args:
        question: what was planned.
        choice: of layouts whose layers run eagerly.
        price: prices a layout as the finalists are.
    """
    if not question.may_compile or question.base.compile:
        return choice
    eager = choice.best[0]
    # A compiled backward can't run in two halves.
    forms = [
        dataclasses.replace(option.layout, compile=True)
        for option in choice.best
        if not option.layout.pipeline().splits_backward
    ]
    fitting = [option for option in price_possible(forms, price) if option.price.peak <= question.usable_bytes]
    if not fitting:
        return choice
    best, ties = sort_candidates([*choice.best, *fitting], question.same)
    if len(best) > len(choice.best):
        # As many as before; the fastest eager one stays, for a model whose layers can't be compiled.
        shown = best[: len(choice.best)]
        best = shown if eager in shown else (*shown[:-1], eager)
    sentences = choice.notes
    if best[0].layout.compile:
        sentences = (
            *sentences,
            "compile=true: each layer becomes one graph in the first step, which takes longer by the time for that and "
            f"isn't counted here; without, {eager.layout} takes {format_seconds(eager.price.step_s)} a step, and "
            "--fix compile=false plans for it",
        )
    return dataclasses.replace(choice, best=best, ties=ties, notes=sentences)
