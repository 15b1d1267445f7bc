"""Orders the micro-batches of a rank with several stages: in rounds of about as many micro-batches as ranks.

In a round each stage of the rank, first to last, runs the forwards of that round's micro-batches; in backward the
stages go last to first. Both interleaved schedules use this order and differ in their number of warm-up forwards.
Source: Narayanan et al., Efficient Large-Scale Language Model Training (SC 2021), section 2.2. The paper wants m to be
a multiple of p; as in torch, rounds of equal size are enough.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.errors import PlanError


def round_size(ranks: int, microbatches: int) -> int:
    """Returns the micro-batches of one round."""
    return microbatches // max(1, microbatches // ranks)


def forward_turns(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> Iterator[tuple[int, int]]:
    """Yields (stage, micro-batch) of a rank in the order of the forwards."""
    yield from _stage_microbatches(rank, ranks, range(stages_per_rank), microbatches)


def backward_turns(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> Iterator[tuple[int, int]]:
    """Yields (stage, micro-batch) of a rank in the order of the backwards."""
    yield from _stage_microbatches(rank, ranks, range(stages_per_rank)[::-1], microbatches)


def _stage_microbatches(rank: int, ranks: int, laps: range, microbatches: int) -> Iterator[tuple[int, int]]:
    size = round_size(ranks, microbatches)
    for start in range(0, microbatches, size):
        for lap in laps:
            for microbatch in range(start, start + size):
                yield lap * ranks + rank, microbatch


def equal_rounds(ranks: int, stages_per_rank: int, microbatches: int) -> None:
    """Checks the rule of both interleaved schedules: rounds of equal size.

    Raises:
        PlanError: the micro-batches don't divide into equal rounds.
    """
    rounds = max(1, microbatches // ranks)
    if microbatches % rounds:
        smaller, larger = (_nearest_equal(ranks, microbatches, step) for step in (-1, 1))
        raise PlanError(
            f"{microbatches} micro-batches on {ranks} ranks don't divide into {rounds} rounds of equal size; "
            f"take {smaller} or {larger}"
        )


def _nearest_equal(ranks: int, microbatches: int, step: int) -> int:
    while microbatches % max(1, microbatches // ranks):
        microbatches += step
    return microbatches
