"""Splits a pipeline's layers again by what a run measured of its stages; everything else stays as it is.

The planner's prices say what a layer costs beside another, the measured seconds what a stage's ranks take for them: a
stage at half the speed takes twice as long for the same layers, whatever slows it down.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.planner.choose import Question, price_candidate
from meshwright.planner.cost.layout_batch import Array, LayoutBatch
from meshwright.planner.device_kinds import kinds_of
from meshwright.planner.uneven_split import layer_seconds, stage_sizes
from meshwright.spec.layout import Layout
from meshwright.spec.layout_choices import StageSplit

SPEED_STEP = 0.05
"""Speeds are rounded to multiples of this share of the fastest stage's: finer differences are the clock's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resplit:
    """Another split of the layers, and what it is expected to bring."""

    layout: Layout
    """With the split."""
    step_ratio: float
    """Expected seconds of a step under it over those under the present split."""
    speeds: tuple[float, ...]
    """Of each stage, as a share of the fastest's."""


def resplit(question: Question, layout: Layout, busy_s: Sequence[float]) -> Resplit | None:
    """Returns the split of the layers that is fastest at measured speeds; None where that is the present one.

    Args:
        question: on equal devices.
        layout: that the run has; a pipeline with one stage a rank.
        busy_s: seconds of a step that each stage computed, its slowest rank's.
    """
    layers, stages = len(question.job.shape.blocks), len(busy_s)
    # (L,) seconds of each layer on equal devices; the last includes the head.
    weights = layer_seconds(question, kinds_of(question.cluster), LayoutBatch.from_layouts([layout], layers))[0, 0]
    sizes = [stop - start for start, stop in (stage.layers for stage in price_candidate(question, layout).price.stages)]
    speeds = relative_speeds(_sums(weights, sizes), busy_s)
    seconds = weights[None, None, :] / np.array(speeds)[None, :, None]
    most_layers = np.full((1, stages), layers)
    new_sizes = [int(size) for size in stage_sizes(seconds, range(stages), most_layers)[0]]
    if new_sizes == sizes or not min(new_sizes):
        return None
    new_layout = dataclasses.replace(layout, split=StageSplit(tuple(new_sizes)))
    # The fullest rank's memory by the same prices as at the start of a run.
    if price_candidate(question, new_layout).price.peak > question.usable_bytes:
        return None
    present_s, new_s = (
        _pipeline_seconds([cost / speed for cost, speed in zip(_sums(weights, split), speeds)], layout.microbatches)
        for split in (sizes, new_sizes)
    )
    return Resplit(layout=new_layout, step_ratio=new_s / present_s, speeds=tuple(speeds))


def relative_speeds(priced_s: Sequence[float], busy_s: Sequence[float]) -> list[float]:
    """Returns each stage's speed as a share of the fastest's, from priced and measured seconds; rounded, above 0."""
    rates = [priced / busy for priced, busy in zip(priced_s, busy_s, strict=True)]
    return [max(SPEED_STEP, round(rate / max(rates) / SPEED_STEP) * SPEED_STEP) for rate in rates]


def _sums(weights: Array, sizes: Sequence[int]) -> list[float]:
    """Returns the sums of consecutive runs of the layers' seconds, (L,)."""
    bounds = np.cumsum([0, *sizes])
    return [float(np.sum(weights[start:stop])) for start, stop in itertools.pairwise(bounds)]


def _pipeline_seconds(stage_s: Sequence[float], microbatches: int) -> float:
    """Returns seconds of a step from those of each stage's micro-batch: one passes all, the others follow the slowest.

    Source: Huang et al., GPipe (2019); the same for 1F1B, whose order of work differs and not its length.
    """
    return sum(stage_s) + (microbatches - 1) * max(stage_s)
