"""Forms of finalists that the search doesn't price: with a secondary copy, with ``tp``'s traffic under products."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable

from meshwright.planner.candidate import Candidate, Choice, sort_candidates
from meshwright.planner.candidate_prices import price_ahead, price_possible
from meshwright.planner.plan_notes import plan_notes
from meshwright.planner.question import Question
from meshwright.spec.layout import Layout
from meshwright.units import format_seconds


def consider_forms(
    question: Question,
    choice: Choice,
    price: Callable[[Layout], Candidate],
    key: str,
    forms: Callable[[Layout], Iterable[Layout]],
) -> Choice:
    """Returns the choice, with the fastest form of each finalist beside it where that fits and is faster.

    A form that is faster by less than the price can tell isn't taken.

    Args:
        question: what was planned.
        choice: of layouts without such forms.
        price: prices a layout as the finalists are.
        key: of a layout, which the forms have.
        forms: yields a finalist's forms.
    """
    options: dict[str, Candidate] = {}
    forms_of = [list(forms(option.layout)) for option in choice.best]
    price_ahead(question, itertools.chain(*forms_of))
    for option, variants in zip(choice.best, forms_of):
        candidates = price_possible(question, variants, price)
        fitting = [candidate for candidate in candidates if candidate.price.peak <= question.usable_bytes]
        fastest = min(fitting, key=lambda candidate: candidate.price.step_s, default=None)
        if fastest and fastest.price.step_s * (1 + question.tie_tolerance) < option.price.step_s:
            options[str(fastest.layout)] = fastest
    if not options:
        return choice
    without = choice.best[0]
    best, ties = sort_candidates([*choice.best, *options.values()], question.tie_tolerance)
    sentences = choice.notes
    if str(best[0].layout) in options:
        seconds = format_seconds(without.price.step_s)
        sentences = (*plan_notes(question, best[0]), f"the fastest without {key}, {without.layout}, takes {seconds}")
    return dataclasses.replace(choice, best=best, ties=ties, notes=sentences)
