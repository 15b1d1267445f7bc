"""Nearby sizes of a model that run faster: vocabulary, heads, feed-forward and width at multiples that devices like."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.planner.candidate import Candidate
from meshwright.planner.capacity import with_shape
from meshwright.planner.cases import PlannedCase, Solve, solve_case
from meshwright.planner.question import Question
from meshwright.planner.shape_changes import (
    heads_step,
    resized,
    with_feed_forward,
    with_head_size,
    with_vocabulary,
)
from meshwright.spec.model_shape import ModelShape

MULTIPLES = (64, 128, 256, 512, 1024)
"""Units of a vocabulary and a feed-forward size. Source: Shoeybi et al., Megatron-LM (2019), 3, pad to 128 by rank;
NVIDIA, Matrix Multiplication Background (2023): tiles of 128 and 256."""
HEAD_SIZES = (64, 128)
"""Sizes of a head for which fused attention has its fastest kernels. Source: Dao, FlashAttention-2 (2023), 4.1."""
LARGEST_CHANGE = 0.05
"""Largest relative change of the number of parameters."""
LEAST_GAIN = 0.002
"""Least gain of FLOP/s that is listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reshaped:
    """A nearby model."""

    case: PlannedCase
    """Its sizes and its plan; named by what changes."""
    parameters: int
    """Parameters more than the given model's."""
    throughput: float
    """Tokens a second over those of the given model, less one."""
    utilization: float
    """FLOP/s over those of the given model, less one: what is gained beside the change of size."""

    def to_json(self) -> dict[str, object]:
        """Returns the model as plain values."""
        gains = {"throughput_gain": self.throughput, "utilization_gain": self.utilization}
        return {"change": self.case.name, "parameters_more": self.parameters, **gains, **self.case.shape_json()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reshape:
    """Nearby models that use the devices better."""

    today: PlannedCase
    """The given model's plan."""
    better: tuple[Reshaped, ...]
    """Of each kind of change the one with most FLOP/s, where it has more; the best first."""
    tried: int
    """Nearby models that were planned."""

    @property
    def is_met(self) -> bool:
        """Whether the question has an answer, as always where it isn't refused."""
        return True

    def to_json(self) -> dict[str, object]:
        """Returns the answer as plain values."""
        better = [item.to_json() for item in self.better]
        return {"today": self.today.shape_json(), "tried": self.tried, "better": better}


def nearby_shapes(shape: ModelShape) -> Iterator[tuple[str, ModelShape]]:
    """Yields (what changes, sizes) of each nearby model; each changes one thing.

    Args:
        shape: of the given model.
    """
    for vocab in _rounded(shape.vocab):
        yield f"vocabulary of {shape.vocab} to {vocab}", with_vocabulary(shape, vocab)
    for head_size in HEAD_SIZES:
        changed = with_head_size(shape, head_size) if shape.heads and head_size != shape.head_size else None
        if changed is not None:
            yield f"heads: {shape.heads} of {shape.head_size} to {changed.heads} of {head_size}", changed
    ffn = max((block.ffn for block in shape.blocks if not block.experts), default=0)
    for size in _rounded(ffn) if ffn else ():
        changed = with_feed_forward(shape, size)
        if changed is not None:
            yield f"feed-forward {ffn} to {size}", changed
    if shape.heads:
        step = heads_step(shape)
        for heads in (shape.heads - step, shape.heads + step):
            if heads > 0:
                changed = resized(shape, shape.layers, heads)
                yield f"width {shape.width} to {changed.width} ({heads} heads)", changed
        for layers in sorted({shape.layers - 1, shape.layers + 1, *_rounded(shape.layers, (4, 8, 16))}):
            if 0 < layers != shape.layers:
                yield f"layers: {shape.layers} to {layers}", resized(shape, layers, shape.heads)


def _rounded(size: int, multiples: tuple[int, ...] = MULTIPLES) -> list[int]:
    """Returns the nearest multiples below and above a size, without itself and without 0."""
    below = {size // unit * unit for unit in multiples}
    above = {-(-size // unit) * unit for unit in multiples}
    return sorted((below | above) - {0, size})


def reshape(question: Question, solve: Solve) -> Reshape:
    """Plans every nearby model, and returns those with more FLOP/s than the given one.

    Args:
        question: model, batch and cluster.
        solve: plans by sizes alone.

    Raises:
        PlanError: when the given model doesn't fit.
    """
    best, shape = solve(question), question.job.shape
    reshaped, tried = [], 0
    for name, nearby in nearby_shapes(shape):
        if abs(nearby.parameters / shape.parameters - 1) > LARGEST_CHANGE:
            continue
        tried += 1
        case = solve_case(name, with_shape(question, nearby), solve)
        if case.best is not None:
            reshaped.append(_compare(case, case.best, best, shape))
    today = PlannedCase(name="today", question=question, best=best)
    return Reshape(today=today, better=tuple(_best_by_kind(reshaped)), tried=tried)


def _best_by_kind(reshaped: Sequence[Reshaped]) -> list[Reshaped]:
    """Returns of each kind of change the model with most FLOP/s, of equals the one that changes least; best first."""
    best: dict[str, Reshaped] = {}
    for item in sorted(reshaped, key=lambda item: abs(item.parameters)):
        kind = item.case.name.partition(" ")[0]
        gain = item.utilization - (best[kind].utilization if kind in best else 0.0)
        if gain > LEAST_GAIN:
            best[kind] = item
    return sorted(best.values(), key=lambda item: -item.utilization)


def _compare(case: PlannedCase, planned: Candidate, best: Candidate, shape: ModelShape) -> Reshaped:
    return Reshaped(
        case=case,
        parameters=case.question.job.shape.parameters - shape.parameters,
        throughput=planned.tokens_per_s / best.tokens_per_s - 1,
        utilization=planned.flops_per_device / best.flops_per_device - 1,
    )
