"""Why a layout and not another: differences of the parts of their prices, in sentences with numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from meshwright.errors import PlanError
from meshwright.planner.choose import Candidate, Choice, Question
from meshwright.spec.axis import Holds, Mechanics
from meshwright.spec.groups import row_axes
from meshwright.spec.layout import DEFAULT_SCHEDULE, OFFLOADS, Layout
from meshwright.spec.layout_choices import Recompute
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
    "offload": "copies to and from host memory",
    "optimizer": "optimizer",
    "step": "work once a step",
}
"""Parts of a step in words."""
SMALL = 0.003
"""Share of a step under which a difference isn't told."""


def reason(question: Question, choice: Choice) -> str:
    """Returns why the first of the best was chosen, in a sentence."""
    best = choice.best[0]
    kind = "one of the fastest" if choice.ties > 1 else "the fastest"
    told = f"{kind} that fit, of {choice.considered} layouts: {format_seconds(best.price.step_s)} a step"
    if choice.ties > 1:
        some = "at least " if choice.ties == len(choice.best) < choice.considered else ""
        told += f"; the model can't tell {some}{choice.ties} of the best apart (within {question.same:.0%}), and it is "
        told += "their simplest"
    elif len(choice.best) > 1:
        other = choice.best[1]
        told += f"; next is {other.layout}, {other.price.step_s / best.price.step_s - 1:.1%} slower"
    return told


def against(one: Candidate, best: Candidate, same: float) -> str:
    """Returns why a layout is slower than the plan, in a sentence.

    Args:
        one: the layout.
        best: the plan.
        same: relative difference of times that tells nothing.
    """
    if _written(one.layout) == _written(best.layout):
        return "is the plan"
    slower = one.price.step_s / best.price.step_s - 1
    whole = best.price.step_s
    gaps = {name: one.price.parts.get(name, 0.0) - best.price.parts.get(name, 0.0) for name in NAMES}
    worse = sorted((gap, name) for name, gap in gaps.items() if gap > SMALL * whole)[::-1][:3]
    better = sorted((gap, name) for name, gap in gaps.items() if gap < -SMALL * whole)[:2]
    if slower <= 0:
        surely = best.price.step_s > one.price.step_s * (1 + same)
        told = "" if surely else f", which the model can't tell (within {same:.0%})"
        return f"{-slower:.1%} faster than the plan{told}"
    parts = [f"{NAMES[name]} +{gap / whole:.1%}" for gap, name in worse]
    parts += [f"{NAMES[name]} {gap / whole:.1%}" for gap, name in better]
    return f"{slower:.1%} slower: {', '.join(parts) or 'many small parts'}"


def memory_sentence(question: Question, one: Candidate) -> str:
    """Returns what the fullest rank needs and why, in a sentence with numbers."""
    stage, room = one.price.stages[one.price.fullest], question.cluster.memory_bytes
    parts = sorted(stage.memory.items(), key=lambda item: -item[1])
    name, size = parts[0]
    flying = f"{stage.held:.3g} micro-batch{'es' if stage.held > 1 else ''}"
    what = f"{name} of {flying} in flight" if name == "activations" else name
    where = f"stage {one.price.fullest}" if len(one.price.stages) > 1 else "every rank"
    return f"{where} needs {format_bytes(stage.peak)} of {format_bytes(room)}: {format_bytes(size)} are {what}"


def _written(layout: Layout) -> Layout:
    """The layout with what it leaves to its defaults spelled out, so that equal ones are equal."""
    if layout.degree(Mechanics.STAGES) == 1:
        return layout
    schedule = layout.schedule or DEFAULT_SCHEDULE
    return dataclasses.replace(layout, schedule=schedule, stages=layout.stages_per_rank)


def why(question: Question, one: Candidate, choice: Choice, price: Callable[[Layout], Candidate]) -> str:
    """Returns why a layout that the user names is worse than the plan, or doesn't fit and what would.

    Args:
        question: what was planned.
        one: the layout, by ``price``.
        choice: the answer, by ``price`` too.
        price: prices a layout.
    """
    layout, best = one.layout, choice.best[0]
    whole = f"; {layout.unsplit}" if layout.unsplit else ""
    if one.price.peak <= question.room_bytes:
        there = f" with {format_bytes(one.price.host)} of a rank in host memory" if one.price.host else ""
        return f"fits{there}, {format_seconds(one.price.step_s)} a step: {against(one, best, question.same)}{whole}"
    told = [f"doesn't fit: {memory_sentence(question, one)}{whole}"]
    for change in _leaner(layout):
        try:
            other = price(change)
        except PlanError:
            continue
        if other.price.peak <= question.room_bytes:
            costs = other.price.step_s / one.price.step_s - 1
            told.append(f"{_difference(layout, change)} fits and costs {costs:.0%}")
            break
    return "; ".join(told)


def _leaner(layout: Layout) -> list[Layout]:
    """The layout with one choice changed that holds less."""
    found = []
    if not layout.recompute:
        found += [dataclasses.replace(layout, recompute=Recompute(mode)) for mode in ("selective", "full")]
    if layout.zero:
        found += [dataclasses.replace(layout, zero=level) for level in range(layout.zero + 1, 4)]
    copies, shard = row_axes(Holds.COPY), row_axes(Holds.SHARD)[0]
    replicas = math.prod(layout.degree(name) for name in copies)
    if replicas > 1:
        degrees = {**layout.degrees, **dict.fromkeys(copies, 1), shard: layout.degree(shard) * replicas}
        found += [dataclasses.replace(layout, degrees=degrees, zero=level) for level in (1, 3)]
    if layout.offload == "none":
        found += [dataclasses.replace(layout, offload=mode) for mode in OFFLOADS if mode != "none"]
    return found


def _difference(layout: Layout, other: Layout) -> str:
    before = set(str(layout).split(","))
    return ",".join(part for part in str(other).split(",") if part not in before)
