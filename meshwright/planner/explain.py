"""Explains why one layout beats another: differences of their prices by part, in sentences with numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from meshwright.errors import PlanError
from meshwright.planner.candidate import Candidate, Choice
from meshwright.planner.chances import candidate_chances, choice_chances
from meshwright.planner.cost.prices import TRAFFIC_WORK
from meshwright.planner.question import Question
from meshwright.planner.uncertainty import INTERVAL
from meshwright.spec.axis import Holds, Mechanics
from meshwright.spec.groups import row_axes
from meshwright.spec.layout import Layout
from meshwright.spec.layout_choices import Recompute
from meshwright.spec.layout_fields import DEFAULT_SCHEDULE, OFFLOADS
from meshwright.units import format_bytes, format_seconds

NAMES = {
    "matmul": "matrix products",
    "attention": "attention",
    "elementwise": "element-wise work",
    "recompute": "recompute",
    "tp": "tensor-parallel traffic",
    "cp": "context-parallel traffic",
    "ep": "expert exchange",
    "host": "waiting for kernel launches",
    "engine": "the pipeline's own work",
    "send": "sends between stages",
    "bubble": "pipeline bubble",
    "gather": "gathering parameters",
    "reduce": "reducing gradients",
    TRAFFIC_WORK: "a rank's own work for them",
    "offload": "copies to and from host memory",
    "optimizer": "optimizer",
    "step": "work once a step",
    "stragglers": "waiting for the slowest node",
    "join": "joins of islands, a round's share",
}
"""Parts of a step in words."""
SMALL_SHARE = 0.003
"""Share of a step below which a difference isn't mentioned."""


def reason(question: Question, choice: Choice, candidate: Candidate | None = None) -> str:
    """Returns a sentence on why the plan was chosen.

    Args:
        question: what was planned.
        choice: the answer.
        candidate: the finalist that is the plan; the first by default. A run takes a later one where the model doesn't
            allow those before it, or to try it.
    """
    best = choice.best[0]
    if candidate is not None and candidate is not best:
        number, step_s = choice.best.index(candidate) + 1, candidate.price.step_s
        return (
            f"number {number} that fit, of {choice.considered} layouts: {format_seconds(step_s)} a step, "
            f"{step_s / best.price.step_s - 1:+.1%} against the first, {best.layout}"
        )
    kind = "one of the fastest" if choice.ties > 1 else "the fastest"
    sentence = f"{kind} that fit, of {choice.considered} layouts: {format_seconds(best.price.step_s)} a step"
    if choice.ties > 1:
        at_least = "at least " if choice.ties == len(choice.best) < choice.considered else ""
        sentence += (
            f"; the model can't tell {at_least}{choice.ties} of the best apart (within {question.tie_tolerance:.0%}), "
        )
        sentence += "and it is their simplest"
    elif len(choice.best) > 1:
        runner_up = choice.best[1]
        sentence += f"; next is {runner_up.layout}, {runner_up.price.step_s / best.price.step_s - 1:.1%} slower"
    return f"{sentence}; {chances_sentence(question, choice)}"


def chances_sentence(question: Question, choice: Choice) -> str:
    """Returns a clause on how sure the plan is: its time, its memory, and that no other layout is faster."""
    of_plan, of_choice = candidate_chances(question, choice.best[0]), choice_chances(question, choice)
    sentence = (
        f"a step takes {format_seconds(of_plan.step_low_s)} to {format_seconds(of_plan.step_high_s)} with "
        f"{INTERVAL:.0%} and fits with {format_chance(of_plan.fits)}"
    )
    if of_choice.of > 1:
        sentence += (
            f"; of the {of_choice.of} best it is the fastest with {format_chance(of_choice.best)}, and "
            f"{of_choice.ties - 1} can't be told apart from it"
        )
    return sentence


def format_chance(chance: float) -> str:
    """Returns a chance in per cent; one that rounds to certainty as a bound."""
    if chance > 0.999:
        return "over 99.9%"
    return f"{chance:.1%}" if chance > 0.99 or chance < 0.1 else f"{chance:.0%}"


def against(candidate: Candidate, best: Candidate, tolerance: float) -> str:
    """Returns a sentence on why a layout is slower than the plan.

    Args:
        candidate: the layout.
        best: the plan.
        tolerance: relative difference of times below which two layouts tie.
    """
    if _with_defaults(candidate.layout) == _with_defaults(best.layout):
        return "is the plan"
    slower = candidate.price.step_s / best.price.step_s - 1
    plan_step_s = best.price.step_s
    gaps = {name: candidate.price.parts.get(name, 0.0) - best.price.parts.get(name, 0.0) for name in NAMES}
    worse = sorted((gap, name) for name, gap in gaps.items() if gap > SMALL_SHARE * plan_step_s)[::-1][:3]
    better = sorted((gap, name) for name, gap in gaps.items() if gap < -SMALL_SHARE * plan_step_s)[:2]
    if slower <= 0:
        is_surely_faster = best.price.step_s > candidate.price.step_s * (1 + tolerance)
        caveat = "" if is_surely_faster else f", which the model can't tell (within {tolerance:.0%})"
        return f"{-slower:.1%} faster than the plan{caveat}"
    terms = [f"{NAMES[name]} +{gap / plan_step_s:.1%}" for gap, name in worse]
    terms += [f"{NAMES[name]} {gap / plan_step_s:.1%}" for gap, name in better]
    return f"{slower:.1%} slower: {', '.join(terms) or 'many small parts'}"


def memory_sentence(question: Question, candidate: Candidate) -> str:
    """Returns a sentence with the bytes that the rank needs that fills its device most, and their largest part."""
    index, device_bytes = question.tightest_stage(candidate)
    stage = candidate.price.stages[index]
    memory_parts = sorted(stage.memory.items(), key=lambda item: -item[1])
    name, size = memory_parts[0]
    in_flight = f"{stage.held:.3g} micro-batch{'es' if stage.held > 1 else ''}"
    largest = f"{name} of {in_flight} in flight" if name == "activations" else name
    rank_text = f"stage {index}" if len(candidate.price.stages) > 1 else "every rank"
    needed, room = format_bytes(stage.peak), format_bytes(device_bytes)
    if stage.peak <= device_bytes:
        room += f", of which plans fill {format_bytes(question.usable_share * device_bytes)}"
    return f"{rank_text} needs {needed} of {room}: {format_bytes(size)} are {largest}"


def _with_defaults(layout: Layout) -> Layout:
    """Returns the layout with its default schedule and stages spelled out, so that equal layouts compare equal."""
    if layout.degree(Mechanics.STAGES) == 1:
        return layout
    schedule = layout.schedule or DEFAULT_SCHEDULE
    return dataclasses.replace(layout, schedule=schedule, stages=layout.stages_per_rank)


def why(question: Question, candidate: Candidate, choice: Choice, price: Callable[[Layout], Candidate]) -> str:
    """Returns why a layout that the user named is slower than the plan, or doesn't fit and which change would help.

    Args:
        question: what was planned.
        candidate: the layout, priced by ``price``.
        choice: the answer, priced by ``price`` too.
        price: prices a layout.
    """
    layout, best = candidate.layout, choice.best[0]
    unsplit_note = f"; {layout.unsplit_backward_reason}" if layout.unsplit_backward_reason else ""
    if candidate.price.peak <= question.usable_bytes:
        host_bytes, step_s = candidate.price.host, candidate.price.step_s
        host_note = f" with {format_bytes(host_bytes)} of a rank in host memory" if host_bytes else ""
        comparison = against(candidate, best, question.tie_tolerance)
        return f"fits{host_note}, {format_seconds(step_s)} a step: {comparison}{unsplit_note}"
    sentences = [f"doesn't fit: {memory_sentence(question, candidate)}{unsplit_note}"]
    for variant in _leaner_variants(layout):
        try:
            alternative = price(variant)
        except PlanError:
            continue
        if alternative.price.peak <= question.usable_bytes:
            slowdown = alternative.price.step_s / candidate.price.step_s - 1
            sentences.append(f"{_changed_fields(layout, variant)} fits and costs {slowdown:.0%}")
            break
    return "; ".join(sentences)


def _leaner_variants(layout: Layout) -> list[Layout]:
    """Returns the layout with one choice changed so that it needs less memory, for each such choice."""
    variants = []
    if not layout.recompute:
        variants += [dataclasses.replace(layout, recompute=Recompute(mode)) for mode in ("selective", "full")]
    if layout.zero:
        variants += [dataclasses.replace(layout, zero=level) for level in range(layout.zero + 1, 4)]
    copies, shard = row_axes(Holds.COPY), row_axes(Holds.SHARD)[0]
    replicas = math.prod(layout.degree(name) for name in copies)
    if replicas > 1:
        degrees = {**layout.degrees, **dict.fromkeys(copies, 1), shard: layout.degree(shard) * replicas}
        variants += [dataclasses.replace(layout, degrees=degrees, zero=level) for level in (1, 3)]
    if layout.offload == "none":
        variants += [dataclasses.replace(layout, offload=mode) for mode in OFFLOADS if mode != "none"]
    return variants


def _changed_fields(layout: Layout, other: Layout) -> str:
    fields = set(str(layout).split(","))
    return ",".join(field for field in str(other).split(",") if field not in fields)
