"""A price corrected by the model's own operators and the machine's measured rates, where both are known.

The closed form prices a standard transformer on a device's figures. What the modules really compute, operator by
operator at the rates that were measured, takes its place: parts of the step that are compute become those of the
operators, and each stage's share moves with them. Traffic, bubble and once-a-step work stay priced as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from meshwright.planner.activation_bytes import read_kept
from meshwright.planner.choose import Candidate, Choice, Question, arranged, candidate, front_of
from meshwright.planner.cost.operators import pieces
from meshwright.planner.cost.prices import Price
from meshwright.planner.rates import MeasuredTimes
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout
from meshwright.spec.model_shape import ModelWork

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
    logits = work.rows * job.sequence * job.shape.vocab / layout.degree(Mechanics.MATRICES)
    found = pieces(work, calibration, job.dtype, question.cluster.devices > 1, logits)
    return repriced(question, one, MeasuredTimes(question, one, work, found, calibration).price())


def priced(question: Question, layout: Layout, measure: Measure | None) -> Candidate:
    """Returns a layout with the one price by which layouts are compared, shown and planned.

    That is the closed form with its pipeline simulated, what the model's operators take where the machine was measured,
    and what earlier runs here took over that.

    Args:
        question: what is planned.
        layout: any.
        measure: gives the operators; None where the model is known by its sizes alone.

    Raises:
        PlanError: when the layout can't be on these devices, or can't share the batch.
    """
    layout.check_ranks(question.cluster.devices)
    layout.check_batch(question.job.rows)
    return _settled(question, candidate(question, layout), measure)


def _settled(question: Question, one: Candidate, measure: Measure | None) -> Candidate:
    found = one if measure is None else corrected(question, one, measure)
    return _taught(question, found)


def informed(question: Question, measure: Measure) -> Question:
    """Returns the question with the activations that the model's own modules keep, where they run on fake tensors."""
    work = measure(Layout(), 1)
    if work is None:
        return question
    activations = read_kept(question.job, question.machine, question.runtime, work)
    return dataclasses.replace(question, activations=activations)


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


def recosted(question: Question, choice: Choice, measure: Measure | None) -> Choice:
    """Returns the answer with every price as `priced` has it, and put in order again."""
    settled = [[_settled(question, one, measure) for one in some] for some in (choice.best, choice.more)]
    best, ties = arranged(settled[0], question.same)
    front = front_of([priced(question, Layout.parse(text), measure) for _, _, text in choice.front])
    return dataclasses.replace(choice, best=best, ties=ties, more=tuple(settled[1]), front=front)


def _taught(question: Question, one: Candidate) -> Candidate:
    """The candidate at the time that runs with its axes took here over their price."""
    factor = question.lesson.of(one.layout)
    if factor == 1.0:
        return one
    price = one.price
    stages = tuple(
        dataclasses.replace(stage, forward_s=stage.forward_s * factor, backward_s=stage.backward_s * factor)
        for stage in price.stages
    )
    parts = {name: seconds * factor for name, seconds in price.parts.items()}
    return repriced(question, one, dataclasses.replace(price, step_s=price.step_s * factor, parts=parts, stages=stages))
