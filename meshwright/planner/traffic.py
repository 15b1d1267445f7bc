"""Lists all collectives of one rank in a step, to compare with the bytes that a run counts."""

from __future__ import annotations

from meshwright.planner.collectives import Collectives, StateTraffic
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.layer_traffic import LayerTraffic
from meshwright.planner.model_parts import ModelParts
from meshwright.planner.rank_groups import CollectiveGroup
from meshwright.spec.layout import Layout


def step_collectives(job: PricedJob, layout: Layout, model: ModelParts, rank: int = 0) -> Collectives:
    """Returns one rank's collectives in a step, from the first forward to the reduction of metrics.

    Args:
        job: model and batch.
        layout: of the run.
        model: as names and sizes.
        rank: which rank; the runs' own records are of rank 0.
    """
    collectives = Collectives()
    # One all-reduce of metrics: loss, targets, hits, squared norm, stop, and the tokens of each expert, in float64.
    counts = 5 + (model.experts[0].experts if model.experts and not layout.compile else 0)
    name = "world" if layout.islands == 1 else "island"
    step_ranks = tuple(peer for peer in range(layout.world) if layout.island(peer) == layout.island(rank))
    collectives.add(CollectiveGroup(name, step_ranks), "all_reduce", 8 * counts)
    StateTraffic(model, layout, rank).add_to(collectives)
    LayerTraffic(job, layout, model, rank).add_to(collectives)
    return collectives
