"""A price corrected by the model's own operators and the machine's measured rates, where both are known.

The closed form prices a standard transformer on a device's figures. What the modules really compute, operator by
operator at the rates that were measured, takes its place: parts of the step that are compute become those of the
operators, and each stage's share moves with them. Traffic, bubble and once-a-step work stay priced as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from meshwright.cluster.calibration import Calibration
from meshwright.plan import Layout
from meshwright.planner.choose import Candidate, Choice, Question, arranged
from meshwright.planner.cost.operators import WorkSeconds, work_seconds
from meshwright.planner.cost.prices import Price
from meshwright.planner.kept import read_kept
from meshwright.shape import ModelWork

WIDE = 4
"""Bytes of a master weight and of a reduced gradient."""
COMPUTE = ("matmul", "attention", "elementwise")
"""Parts of a step that operators give."""
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
    rows = job.rows // (layout.reader(0)[1] * layout.microbatches)
    work = measure(layout, max(1, rows))
    if work is None:
        return one
    logits = work.rows * job.sequence * job.shape.vocab / layout.degree("tp")
    seconds = work_seconds(work, calibration, job.dtype, question.cluster.devices > 1, logits)
    scale = rows / work.rows / (layout.degree("cp") * layout.degree("pp"))
    price = _replaced(question, layout, one.price, seconds, scale)
    return repriced(question, one, _with_copies(question, layout, price, calibration))


def _with_copies(question: Question, layout: Layout, price: Price, calibration: Calibration) -> Price:
    """Adds what isn't the model's: gradients added up over micro-batches, and FSDP2's copies in and out of its buffers.

    A gather copies the shard in and the whole out, a scatter the gradients in and their sum out; ZeRO-3 gathers for
    each forward and backward, ZeRO-2 and 3 scatter after each micro-batch.
    """
    micro = layout.microbatches
    weights = question.job.shape.parameters / (layout.degree("pp") * layout.degree("tp"))
    size = WIDE * weights / max(1, len(question.job.shape.blocks) // layout.degree("pp") + 1)
    rate = float(calibration.bandwidth_bytes_per_s(size, "float32", question.cluster.devices > 1))
    pass_s = 2 * WIDE * weights / rate
    parts = dict(price.parts)
    parts["elementwise"] += 1.5 * (micro - 1) * pass_s  # a sum reads two and writes one, a pass one each
    if layout.zero:
        once = layout.degree("pp") > 1
        gathers = 2 * micro if layout.zero == 3 and not once else 1
        scatters = micro if layout.zero >= 2 and not once else 1
        parts["gather"] += 2 * gathers * pass_s
        parts["reduce"] += 2 * scatters * pass_s
    return dataclasses.replace(price, parts=parts, step_s=sum(parts.values()))


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


def _replaced(question: Question, layout: Layout, price: Price, seconds: WorkSeconds, scale: float) -> Price:
    """The price with other compute.

    Args:
        question: what is planned.
        layout: of the price.
        price: by the closed form.
        seconds: of the whole model on a micro-batch.
        scale: part of it that a rank computes.
    """
    micro, parts = layout.microbatches, dict(price.parts)
    before = sum(parts[name] for name in COMPUTE) + parts["recompute"]
    forward = scale * sum(seconds.forward[name] for name in COMPUTE)
    for name in COMPUTE:
        parts[name] = micro * scale * (seconds.forward[name] + seconds.backward[name])
    parts["recompute"] = micro * scale * _again(question, layout, seconds)
    after = sum(parts[name] for name in COMPUTE) + parts["recompute"]
    ratio = after / before if before else 1.0
    parts["bubble"] *= ratio
    parts["host"] = max(0.0, parts["host"] - max(0.0, after - before))
    whole = sum(stage.forward_s for stage in price.stages) or 1.0
    stages = []
    for stage in price.stages:
        own = len(price.stages) * stage.forward_s / whole
        spent = own * forward
        rest = own * (after / micro - forward)
        stages.append(dataclasses.replace(stage, forward_s=spent, backward_s=rest))
    return dataclasses.replace(price, parts=parts, step_s=sum(parts.values()), stages=tuple(stages))


def _again(question: Question, layout: Layout, seconds: WorkSeconds) -> float:
    """What is computed a second time of a micro-batch of the whole model."""
    mode, _, count = layout.recompute.partition(":")
    if mode == "none":
        return 0.0
    layers = len(question.job.shape.blocks)
    names = COMPUTE if mode == "full" else ("elementwise",)
    share = int(count) / layers if count else 1.0
    return share * sum(seconds.forward[name] for name in names)
