"""A price corrected by the model's own operators and the machine's measured rates, where both are known.

The closed form prices a standard transformer on a device's figures. What the modules really compute, operator by
operator at the rates that were measured, takes its place: parts of the step that are compute become those of the
operators, and each stage's share moves with them. Traffic, bubble and once-a-step work stay priced as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from meshwright.plan import Layout
from meshwright.planner.choose import Candidate, Choice, Question, arranged
from meshwright.planner.cost.operators import pieces
from meshwright.planner.cost.prices import Price
from meshwright.planner.kept import read_kept
from meshwright.planner.rates import Measured
from meshwright.shape import ModelWork

Measure = Callable[[Layout, int], ModelWork | None]
"""(layout, rows of a micro-batch) to the operators of a rank; None where the model can't be run on fake tensors."""


def corrected(question: Question, one: Candidate, measure: Measure) -> Candidate:
    """Returns a candidate whose compute is that of the model's operators, where the machine was measured.

    Args:
        question: what is planned.
        one: priced by the closed form.
        measure: gives the operators.
    """
    layout, job, calibration = one.layout, question.job, question.cluster.calibration
    if calibration is None or not calibration.has_matmul(job.dtype):
        return one
    shares = layout.shares()
    rows = job.rows * max(shares) // (sum(shares) * layout.microbatches)
    work = measure(layout, max(1, rows))
    if work is None:
        return one
    logits = work.rows * job.sequence * job.shape.vocab / layout.degree("tp")
    found = pieces(work, calibration, job.dtype, question.cluster.devices > 1, logits)
    return repriced(question, one, Measured(question, one, work, found, calibration).price())


def informed(question: Question, measure: Measure) -> Question:
    """Returns the question with the activations that the model's own modules keep, where they run on fake tensors."""
    work = measure(Layout(), 1)
    if work is None:
        return question
    kept = read_kept(question.job, question.machine, question.runtime, work)
    return dataclasses.replace(question, kept=kept)


def repriced(question: Question, one: Candidate, price: Price) -> Candidate:
    """Returns a candidate with another price."""
    tokens, ratio = question.job.rows * question.job.sequence, price.step_s / one.price.step_s
    return dataclasses.replace(
        one,
        price=price,
        tokens_per_s=tokens / price.step_s,
        cost_per_mtoken=None if one.cost_per_mtoken is None else one.cost_per_mtoken * ratio,
        joules_per_token=None if one.joules_per_token is None else one.joules_per_token * ratio,
    )


def recosted(question: Question, choice: Choice, measure: Measure) -> Choice:
    """Returns the answer with its best corrected, and put in order again with what runs here taught."""
    found = {str(one.layout): corrected(question, one, measure) for one in choice.best}
    taught = [_taught(question, one) for one in found.values()]
    best, ties = arranged(taught, question.same)
    return dataclasses.replace(choice, best=tuple(found[str(one.layout)] for one in best), ties=ties)


def _taught(question: Question, one: Candidate) -> Candidate:
    """The candidate at the time that runs with its axes took here over their price; for an order, not to be shown."""
    return dataclasses.replace(
        one, price=dataclasses.replace(one.price, step_s=one.price.step_s * question.lesson.of(one.layout))
    )
