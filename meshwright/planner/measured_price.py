"""Corrects prices by the model's own operators and the machine's measured rates, where both are known.

The closed form prices a standard transformer from a device's data sheet. The correction replaces its compute by the
model's own operators, one by one at measured rates, and scales each stage's share. Traffic of the data axes and memory
stay as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from meshwright.planner.activation_bytes import count_activation_bytes
from meshwright.planner.candidate import Candidate, Choice, pareto_front, sort_candidates
from meshwright.planner.candidate_prices import price_candidate, priced_candidate
from meshwright.planner.cost.operators import price_operators
from meshwright.planner.device_limits import job_for
from meshwright.planner.islands import island_question, with_joins
from meshwright.planner.moved_bytes import count_moved_bytes
from meshwright.planner.preset_bytes import CountedPreset
from meshwright.planner.question import Question
from meshwright.planner.rates import MeasuredTimes
from meshwright.planner.run_history import Correction
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout
from meshwright.spec.model_shape import ModelWork

Measure = Callable[[Layout, int], ModelWork | None]
"""Maps (layout, rows of a micro-batch) to a rank's operators; None where the model can't run on fake tensors."""


def correct_price(question: Question, closed_candidate: Candidate, measure: Measure) -> Candidate:
    """Returns the candidate with the seconds of the model's own operators, where the machine was calibrated.

    Args:
        question: what is planned.
        closed_candidate: priced by the closed form.
        measure: returns the operators.
    """
    layout, calibration = closed_candidate.layout, question.cluster.calibration
    job = job_for(question.job, layout, question.cluster)
    # The operators were traced in the question's precision.
    if calibration is None or not calibration.has_matmul(job.dtype) or job.precision != question.job.precision:
        return closed_candidate
    shares = layout.reader_shares()
    rows = job.rows * max(shares) // (sum(shares) * layout.microbatches)
    work = measure(layout, max(1, rows))
    if work is None:
        return closed_candidate
    logits = work.rows * job.sequence * job.shape.vocab / layout.degree(Mechanics.MATRICES)
    operator_seconds = price_operators(work, calibration, job.dtype, question.under_load, logits)
    times = MeasuredTimes(question, layout, work, operator_seconds, calibration)
    return priced_candidate(question, layout, times.price())


def price_layout(question: Question, layout: Layout, measure: Measure | None) -> Candidate:
    """Returns a layout with the price by which layouts are compared, shown and planned.

    That is the closed form with a simulated pipeline, corrected by the model's operators where the machine was
    calibrated, and scaled by what earlier runs on it took.

    Args:
        question: what is planned.
        layout: any.
        measure: returns the operators; None where only the model's sizes are known.

    Raises:
        PlanError: when the layout doesn't divide the devices or the batch.
    """
    layout.check_ranks(question.cluster.devices)
    layout.check_batch(question.job.rows)
    if layout.islands > 1:
        candidate = price_layout(island_question(question, layout), layout.within_island(), measure)
        return with_joins(question, layout, candidate)
    if layout.compile and measure is not None and question.job.compiled_activations is None:
        question = _measure_compiled(question, measure)
    return _corrected_and_scaled(question, price_candidate(question, layout), measure)


def _corrected_and_scaled(question: Question, closed_candidate: Candidate, measure: Measure | None) -> Candidate:
    corrected_candidate = closed_candidate if measure is None else correct_price(question, closed_candidate, measure)
    return _scaled_by_history(question, corrected_candidate)


def measure_activations(question: Question, measure: Measure) -> Question:
    """Returns the question with the bytes that the model's modules keep and move, where they run on fake tensors."""
    work = measure(Layout(), 1)
    if work is None:
        return question
    activations = count_activation_bytes(question.job, question.machine, question.runtime, work)
    moved = count_moved_bytes(question.job, question.machine, question.runtime, work)
    job = dataclasses.replace(question.job, activations=activations, moved=moved)
    measured = dataclasses.replace(question, job=job)
    return _measure_compiled(measured, measure) if question.base.compile else measured


def use_counted_bytes(question: Question, preset: CountedPreset) -> Question:
    """Returns the question with the bytes that a public model's modules keep and move, counted beforehand.

    Args:
        question: of the model; of its sizes some may be others than the preset's.
        preset: what was counted, in bf16.
    """
    counted = preset.at(question.job.sequence)
    job = dataclasses.replace(question.job, shape=preset.shape, sequence=counted.tokens, precision="bf16", products="")
    machine, eager, compiled = question.machine, question.runtime, question.runtime.for_layout(Layout(compile=True))
    work = counted.work(is_compiled=False)
    bytes_of_job = dataclasses.replace(
        question.job,
        activations=count_activation_bytes(job, machine, eager, work),
        compiled_activations=count_activation_bytes(job, machine, compiled, counted.work(is_compiled=True)),
        moved=count_moved_bytes(job, machine, eager, work),
    )
    return dataclasses.replace(question, job=bytes_of_job)


def _measure_compiled(question: Question, measure: Measure) -> Question:
    """Returns the question with the bytes that compiled layers keep, where they can be traced."""
    work = _trace_compiled(measure)
    if work is None:
        return question
    engine = question.runtime.for_layout(Layout(compile=True))
    activations = count_activation_bytes(question.job, question.machine, engine, work)
    return dataclasses.replace(question, job=dataclasses.replace(question.job, compiled_activations=activations))


def _trace_compiled(measure: Measure) -> ModelWork | None:
    """Returns the operators of compiled layers with what these keep; None where they can't be traced."""
    work = measure(Layout(compile=True), 1)
    return None if work is None or any(layer.compiled is None for layer in work.layers) else work


def untraced_note(question: Question, layout: Layout, measure: Measure | None) -> str:
    """Returns the sentence that a plan's compiled layers couldn't be traced; empty where they could or needn't be."""
    if not layout.compile or measure is None or _trace_compiled(measure) is not None:
        return ""
    scale = ", at the ratio at which eager ones differ from theirs" if question.job.activations else ""
    return (
        "what these compiled layers keep for backward couldn't be traced, and is priced by the formula for a standard "
        f"transformer's{scale}: the peak is less sure, and --usable 0.8 plans with more room"
    )


def reprice_choice(question: Question, choice: Choice, measure: Measure | None) -> Choice:
    """Returns the answer with every layout priced by `price_layout`, sorted again."""
    repriced_candidates = [
        [
            price_layout(question, finalist.layout, measure)
            if finalist.layout.islands > 1
            else _corrected_and_scaled(question, finalist, measure)
            for finalist in finalists
        ]
        for finalists in (choice.best, choice.more)
    ]
    best, ties = sort_candidates(repriced_candidates[0], question.tie_tolerance)
    front = pareto_front([price_layout(question, Layout.parse(text), measure) for _, _, text in choice.front])
    return dataclasses.replace(choice, best=best, ties=ties, more=tuple(repriced_candidates[1]), front=front)


def _scaled_by_history(question: Question, unscaled: Candidate) -> Candidate:
    """Returns the candidate with compute and traffic scaled by what they took in earlier runs with its axes."""
    correction = question.history.of(unscaled.layout)
    if correction == Correction():
        return unscaled
    price = unscaled.price
    factor, parts = correction.on_pass(price.parts), correction.of_parts(price.parts)
    stages = tuple(
        dataclasses.replace(stage, forward_s=stage.forward_s * factor, backward_s=stage.backward_s * factor)
        for stage in price.stages
    )
    scaled = dataclasses.replace(price, step_s=sum(parts.values()), parts=parts, stages=stages)
    return priced_candidate(question, unscaled.layout, scaled)
