"""Layers are priced once for all layouts in which they cost the same: alone each has the same costs, bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from benchmarks.published.framework_profiles import MEGATRON_PLAIN, NANOTRON, TITAN
from meshwright.cluster.cluster import Cluster
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.cost.framework_profile import FrameworkProfile
from meshwright.planner.cost.groups import Machine
from meshwright.planner.cost.layer_sums import LayerCosts
from meshwright.planner.cost.layout_batch import LayoutBatch, PricedJob, array_fields
from meshwright.planner.cost.meshwright_profile import MESHWRIGHT
from meshwright.planner.space import Space, cores, expand

SIZES = TableSizes(
    name="mixture", layers=4, width=1024, heads=8, vocab=32000, experts=8, active_experts=2, expert_ffn=512
)
JOB = PricedJob(shape=shape_from_sizes(SIZES), sequence=2048, rows=48)
CLUSTER = Cluster.parse("4x4xh100")
LAYOUTS = 12
CHOICES = {
    "recompute": 1.0,
    "recompute_share": 0.25,
    "rows": 96.0,
    "loss_chunk": 128.0,
    "inside_scale": 0.5,
    "outside_scale": 0.5,
    "sequence": 0.0,
    "zero": 2.0,
    "schedule": 1.0,
}
"""Another value of a layout's choices than the search gives it."""
DEGREES = ("pp", "cp", "tp", "ep")
"""Degrees that take ranks from the copies, whose rows become further micro-batches."""


def layouts() -> LayoutBatch:
    """Draws layouts, and adds them with each single choice and each single degree changed."""
    draw, space = np.random.default_rng(1), Space(devices=CLUSTER.devices, domain=CLUSTER.domain)
    batch = expand(JOB, space, cores(JOB, space))
    drawn = batch.take(draw.choice(np.flatnonzero((batch.replicate % 2 == 0) & (batch.recompute == 2)), LAYOUTS))
    changed = [drawn, *(dataclasses.replace(drawn, **{name: value + 0 * drawn.pp}) for name, value in CHOICES.items())]
    for name in DEGREES:
        ranks = {} if name == "ep" else {"replicate": drawn.replicate / 2, "microbatches": drawn.microbatches * 2}
        changed.append(dataclasses.replace(drawn, **{name: getattr(drawn, name) * 2, **ranks}))
    columns = {name: np.concatenate([getattr(batch, name) for batch in changed]) for name in array_fields()}
    return LayoutBatch.of(columns)


def figures(cost: Any, layout: int) -> Iterator[float]:
    """Yields one layout's figures of a cost."""
    for name in cost.__dataclass_fields__:
        value = getattr(cost, name)
        if dataclasses.is_dataclass(value):
            yield from figures(value, layout)
        else:
            yield float(value if np.ndim(value) == 0 else value[layout])


@pytest.mark.parametrize("engine", [MESHWRIGHT, MEGATRON_PLAIN, NANOTRON, TITAN], ids=lambda engine: engine.name)
@pytest.mark.parametrize("timed", [True, False])
def test_a_layout_alone_has_the_costs_that_it_has_among_others(engine: FrameworkProfile, timed: bool) -> None:
    batch, machine = layouts(), Machine.of(CLUSTER)
    together = LayerCosts.of(JOB, batch, machine, engine, timed)
    assert len(batch.layer_kinds()[0]) < batch.count
    for layout in range(batch.count):
        alone = LayerCosts.of(JOB, batch.take([layout]), machine, engine, timed)
        costs = zip((*together.layers, together.embedding, together.head), (*alone.layers, alone.embedding, alone.head))
        for among_others, by_itself in costs:
            assert list(figures(among_others, layout)) == list(figures(by_itself, 0))
