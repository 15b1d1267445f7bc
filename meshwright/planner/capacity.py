"""What a cluster can hold at most: the largest model of a family, the longest rows; and throughput by batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.errors import PlanError
from meshwright.planner.cases import Fits, PlannedCase, Solve, solve_case
from meshwright.planner.question import Question
from meshwright.planner.shape_changes import heads_step, resized, with_positions
from meshwright.spec.layout_fields import OFFLOADS
from meshwright.spec.model_shape import ModelShape

SHORTEST_SEQUENCE = 64
"""Tokens of a row at which the search for the longest begins."""
LONGEST_SEQUENCE = 1 << 24
"""Tokens of a row at which the search for the longest ends."""
SEQUENCE_STEPS = 16
"""The longest row is found to this part of the power of two below it."""
NEAR_BEST = 0.95
"""Share of the best throughput from which a batch is large enough."""
FLAT = 0.01
"""Relative growth of the throughput by a doubling of the batch below which it is flat."""
ROWS_PER_DEVICE = 128
"""Rows of a batch by device at which the curve ends."""


def largest_that(holds: Callable[[int], bool], start: int, limit: int) -> int:
    """Returns the largest whole number with a property that all smaller ones have, at least 0.

    Args:
        holds: the property.
        start: where to begin.
        limit: the largest number to try.
    """
    low, high = 0, start
    # Double until it fails, then halve the interval.
    while high <= limit and holds(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestModel:
    """The largest model of a family that a cluster trains."""

    asked: PlannedCase
    """The model that was given."""
    largest: tuple[PlannedCase, ...]
    """The largest with its state on the devices, and where hosts are known the largest with state in their memory."""

    @property
    def is_met(self) -> bool:
        """Whether some model fits; otherwise the question is refused."""
        return bool(self.largest)

    def to_json(self) -> dict[str, object]:
        """Returns the answer as plain values."""
        return {"asked": self.asked.shape_json(), "largest": [case.shape_json() for case in self.largest]}


def largest_model(question: Question, solve: Solve, fits: Fits) -> LargestModel:
    """Finds the largest model of the given one's family that some layout fits: its layers and widths grow alike.

    Widths grow by whole groups of heads, with as many layers for each width as the model has; then layers are added
    while it still fits.

    Args:
        question: model, batch and cluster.
        solve: plans by sizes alone.
        fits: whether it finds a plan.

    Raises:
        PlanError: when not even one layer of the least width fits.
    """
    cases = []
    for name, offloads in _offload_choices(question):
        limited = dataclasses.replace(question, limits={**question.limits, "offloads": offloads})
        shape = _largest_shape(limited, fits)
        if shape is None:
            continue
        limited = with_shape(limited, shape)
        cases.append(solve_case(f"{name}: {describe_shape(shape)}", limited, solve))
    if not cases:
        raise PlanError(
            f"no model of the family of {question.job.shape.name} fits {question.cluster} with {question.job.rows} "
            f"rows of {question.job.sequence} tokens, not even one layer; shorter rows may"
        )
    asked = solve_case(f"asked: {describe_shape(question.job.shape)}", question, solve)
    return LargestModel(asked=asked, largest=tuple(cases))


def with_shape(question: Question, shape: ModelShape) -> Question:
    """Returns the question of another model; what the first one's modules keep for backward doesn't hold for it."""
    return _with_job(question, shape=shape)


def _with_job(question: Question, **changes: Any) -> Question:
    """Returns the question of a changed job, whose modules weren't read."""
    return dataclasses.replace(question, job=dataclasses.replace(question.job.uncounted(), **changes))


def describe_shape(shape: ModelShape) -> str:
    """Returns ``32 layers, width 4096, 32 heads``."""
    return f"{shape.layers} layers, width {shape.width}, {shape.heads} heads"


def _offload_choices(question: Question) -> list[tuple[str, tuple[str, ...]]]:
    if "offloads" in question.limits:
        return [("largest", question.limits["offloads"])]
    if not question.cluster.uniform:
        return [("largest", OFFLOADS)]
    choices: list[tuple[str, tuple[str, ...]]] = [("on devices", ("none",))]
    if question.machine.host is not None:
        choices.append(("with host memory", OFFLOADS))
    return choices


def _largest_shape(question: Question, fits: Fits) -> ModelShape | None:
    shape = question.job.shape
    step = heads_step(shape)

    def shape_of(steps: int, layers: int) -> ModelShape:
        return resized(shape, layers, steps * step)

    def layers_at(steps: int) -> int:
        return max(1, round(shape.layers * steps * step / shape.heads))

    def holds(steps: int, layers: int) -> bool:
        return fits(with_shape(question, shape_of(steps, layers)))

    start = max(1, shape.heads // step)
    steps = largest_that(lambda count: holds(count, layers_at(count)), start, 64 * start)
    if not steps:
        return shape_of(1, 1) if holds(1, 1) else None
    least = layers_at(steps)
    layers = least + largest_that(lambda more: holds(steps, least + more), max(1, least // 16), least)
    return shape_of(steps, layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class LongestRows:
    """The longest rows that a cluster trains a model on."""

    asked: PlannedCase
    """Rows as given."""
    longest: tuple[PlannedCase, ...]
    """The longest with the state on the devices, and where hosts are known the longest with state in their memory."""

    @property
    def is_met(self) -> bool:
        """Whether the longest rows have a plan."""
        return any(case.best for case in self.longest)

    def to_json(self) -> dict[str, object]:
        """Returns the answer as plain values."""
        return {"asked": self.asked.to_json(), "longest": [case.to_json() for case in self.longest]}


def longest_rows(question: Question, solve: Solve, fits: Fits) -> LongestRows:
    """Finds the longest rows that some layout fits, in as many rows.

    Args:
        question: model, batch and cluster. Learned positions grow with the rows.
        solve: plans.
        fits: whether it finds a plan.

    Raises:
        PlanError: when not even the shortest rows fit.
    """
    cases = []
    for name, offloads in _offload_choices(question):
        limited = dataclasses.replace(question, limits={**question.limits, "offloads": offloads})
        tokens = _longest_sequence(limited, fits)
        if tokens:
            cases.append(solve_case(f"{name}: {tokens} tokens", with_sequence(limited, tokens), solve))
    if not cases:
        raise PlanError(
            f"no layout of {question.cluster} fits {question.job.shape.name} with {question.job.rows} rows of "
            f"{SHORTEST_SEQUENCE} tokens, so no rows are short enough; take a smaller model or more devices"
        )
    return LongestRows(
        asked=solve_case(f"asked: {question.job.sequence} tokens", question, solve), longest=tuple(cases)
    )


def with_sequence(question: Question, tokens: int) -> Question:
    """Returns the question with rows of so many tokens; learned positions grow with them."""
    shape = with_positions(question.job.shape, tokens)
    return _with_job(question, sequence=tokens, shape=shape)


def _longest_sequence(question: Question, fits: Fits) -> int:
    """Returns the most tokens of a row that fit, to a part of the power of two below; 0 where none do."""

    def holds(tokens: int) -> bool:
        return fits(with_sequence(question, tokens))

    power = SHORTEST_SEQUENCE
    if not holds(power):
        return 0
    while 2 * power <= LONGEST_SEQUENCE and holds(2 * power):
        power *= 2
    step = max(SHORTEST_SEQUENCE, power // SEQUENCE_STEPS)
    return power + step * largest_that(lambda count: holds(power + step * count), 1, power // step - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchCurve:
    """Throughput by the rows of the global batch."""

    cases: tuple[PlannedCase, ...]
    """The plan of each batch, rows doubling."""

    @property
    def knee(self) -> int | None:
        """Fewest rows with `NEAR_BEST` of the best throughput; None while it still grows at the last batch."""
        planned = [(case.question.job.rows, case.best.tokens_per_s) for case in self.cases if case.best]
        if len(planned) < 2 or planned[-1][1] > planned[-2][1] / NEAR_BEST:
            return None
        best = max(rate for _, rate in planned)
        return next(rows for rows, rate in planned if rate >= NEAR_BEST * best)

    @property
    def is_met(self) -> bool:
        """Whether some batch has a plan."""
        return any(case.best for case in self.cases)

    def to_json(self) -> dict[str, object]:
        """Returns the answer as plain values."""
        return {"points": [case.to_json() for case in self.cases], "knee": self.knee}


def batch_sizes(devices: int) -> list[int]:
    """Returns the batches to ask, in rows: powers of two from an eighth of a row by device."""
    rows = [1]
    while rows[-1] * 2 <= ROWS_PER_DEVICE * devices:
        rows.append(2 * rows[-1])
    return [count for count in rows if count * 16 > devices]


def batch_curve(question: Question, rows: Sequence[int], solve: Solve) -> BatchCurve:
    """Returns the plan for each batch, until the throughput is flat for two doublings.

    Args:
        question: model and cluster.
        rows: of the global batches, the smallest first.
        solve: plans.
    """
    cases: list[PlannedCase] = []
    flat = 0
    for count in rows:
        job = dataclasses.replace(question.job, rows=count)
        cases.append(solve_case(f"{count} rows", dataclasses.replace(question, job=job), solve))
        rates = [case.best.tokens_per_s for case in cases if case.best]
        flat = flat + 1 if len(rates) > 1 and rates[-1] < rates[-2] * (1 + FLAT) else 0
        if flat == 2:
            break
    return BatchCurve(cases=tuple(cases))
