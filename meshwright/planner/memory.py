"""Bytes of model state per rank, by layout: what the runtime's own tensors add up to, beside the ZeRO paper's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.planner.model_parts import ModelParts, StateSizes
from meshwright.planner.rank_weights import LayerWeights, RankWeights, StageWeights, elements, shard_elements
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout

__all__ = ["ModelParts", "Position", "StateSizes", "paper_memory", "position_memory", "rest_bytes", "state_memory"]

ACTIVE_STAGES = 3
"""Stages of a rank that torch keeps gathered at a time. Source: torch 2.13, pipelining, `_add_unshard_reshard`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """The state of the ranks at one place of the axes that split the model."""

    place: Mapping[str, int] = field(default_factory=dict)
    """Index along ``pp`` and ``tp``, where they are used."""
    held: RankWeights
    """What it holds before the data axes shard it."""
    memory: Mapping[str, int]
    """Bytes of parameters, gradients and optimizer of the fullest of these ranks."""
    formula: Mapping[str, str]
    """For each of these the formula that gave it."""

    @property
    def total_bytes(self) -> int:
        """All of the memory."""
        return sum(self.memory.values())


def position_memory(layout: Layout, sizes: StateSizes | ModelParts) -> list[Position]:
    """Returns the state of every place along ``pp`` and ``tp``.

    Args:
        layout: of data axes alone where ``sizes`` are numbers.
        sizes: the model.

    Raises:
        PlanError: when the layout doesn't fit the model, or what it needs to know of it wasn't given.
    """
    priced = []
    for place, held in sizes.positions(layout):
        memory, formula = _priced(layout, held)
        if isinstance(sizes, ModelParts) and held.elements != sizes.total:
            told = f", n = {held.elements} of N = {sizes.total}"
            spread = elements(held.experts)
            told += f", x = {spread} of experts" if spread else ""
            formula = {part: text + told for part, text in formula.items()}
        else:
            formula = {part: re.sub(r"\bn\b", "N", text) for part, text in formula.items()}
        priced.append(Position(place=place, held=held, memory=memory, formula=formula))
    return priced


def state_memory(layout: Layout, sizes: StateSizes | ModelParts) -> tuple[dict[str, int], dict[str, str]]:
    """Returns (bytes of the fullest rank, formula) for parameters, gradients and optimizer state.

    N is the number of parameters, n those that a rank holds before the data axes shard them, d the ranks that share
    their state (``shard`` x ``cp``), c the bytes of a compute element, w those of a master weight (and of a reduced
    gradient). Where ``ep`` spreads experts, x of the n are experts and e ranks share their shards. Uneven dims add at
    most one row a weight, which the bytes count and the formula doesn't.

    Source: Rajbhandari et al., ZeRO (SC 2020), section 3.1 (K = 12 bytes of optimizer state with float32 masters) and
    figure 1; that FSDP2 keeps no low-precision shard at rest, and that level 3 holds the layer at work, the one
    gathered ahead and the rest outside the layers, is the runtime's own property, checked by its tests.
    """
    fullest = max(position_memory(layout, sizes), key=lambda position: position.total_bytes)
    return dict(fullest.memory), dict(fullest.formula)


def rest_bytes(layout: Layout, model: ModelParts, rank: int) -> int:
    """Returns the bytes of master weights that one rank of the world keeps, exactly; a tied weight counts once."""
    held, shard, expert_shard = model.held_by(layout, rank)
    if not _sharded(layout):
        return _wide(layout) * (held.elements - elements(held.twins))
    own = shard_elements(held.own, held.shards, shard) - shard_elements(held.twins, held.shards, shard)
    return _wide(layout) * (own + shard_elements(held.experts, held.expert_shards, expert_shard))


def _wide(layout: Layout) -> int:
    return 8 if layout.precision == "float64" else 4


def _sharded(layout: Layout) -> bool:
    """Whether masters are apart from what computes."""
    return bool(layout.zero) or layout.mixed or layout.offload == "parameters"


def _priced(layout: Layout, held: RankWeights) -> tuple[dict[str, int], dict[str, str]]:
    """Bytes and formulas of one place."""
    wide = _wide(layout)
    narrow = 2 if layout.mixed else wide
    count = held.elements
    if not _sharded(layout):
        trained = count - elements(held.twins)
        memory = {"parameters": wide * count, "gradients": wide * count, "optimizer": 2 * wide * trained}
        return memory, {"parameters": "w n", "gradients": "w n", "optimizer": "2 w n"}
    parameters, told = _gathered(layout, held)
    rest = shard_elements(held.own, held.shards) + shard_elements(held.experts, held.expert_shards)
    twins = shard_elements(held.twins, held.shards)
    # A pipeline scatters once a step, after its last backward, whatever the level.
    whole = layout.degree(Mechanics.STAGES) > 1 or (layout.zero <= 1 and layout.microbatches > 1)
    part = "((n - x) / d + x / e)" if held.experts else "n / d"
    memory = {
        "parameters": narrow * parameters,
        "gradients": wide * count if whole else wide * rest,
        "optimizer": 3 * wide * rest - 2 * wide * twins,
    }
    return memory, {
        "parameters": told,
        "gradients": "w n" if whole else f"w {part}",
        "optimizer": f"3 w {part}",
    }


def _gathered(layout: Layout, held: RankWeights) -> tuple[int, str]:
    """Elements that are gathered at most, and the formula."""
    if layout.degree(Mechanics.STAGES) > 1:
        stages = sorted((_stage_elements(stage, held) for stage in held.stages), reverse=True)
        return sum(stages[:ACTIVE_STAGES]), "c n" if len(stages) <= ACTIVE_STAGES else f"c ({ACTIVE_STAGES} stages)"
    (stage,) = held.stages
    if layout.zero < 3:
        return _stage_elements(stage, held), "c n"
    layers = [_layer_elements(layer, held) for layer in stage.layers]
    ahead = [layer.own for layer in stage.layers[1:]]
    behind = [layer.own for layer in stage.layers[:-1]]
    pairs = [
        size + max(_whole(own, held.shards) for own in near) for size, *near in zip(layers, [*ahead, ()], [(), *behind])
    ]
    return _whole(stage.rest, held.shards) + max(pairs, default=0), "c (rest + 2 largest neighbouring layers)"


def _stage_elements(stage: StageWeights, held: RankWeights) -> int:
    return _whole(stage.rest, held.shards) + sum(_layer_elements(layer, held) for layer in stage.layers)


def _layer_elements(layer: LayerWeights, held: RankWeights) -> int:
    return _whole(layer.own, held.shards) + _whole(layer.experts, held.expert_shards)


def _whole(tensors: tuple[tuple[int, int], ...], shards: int) -> int:
    """Elements of gathered weights: shards are all as long as the longest."""
    return shards * shard_elements(tensors, shards)


def paper_memory(layout: Layout, count: int) -> int:
    """Returns the ZeRO paper's bytes of model state per rank: c + g + K per parameter, divided as the level says.

    Source: Rajbhandari et al., ZeRO (SC 2020), figure 1, with compute elements and gradients of c bytes and K = 3w.
    """
    wide = _wide(layout)
    narrow = 2 if layout.mixed else wide
    shards = layout.state_shards
    divided = (3 * wide, narrow, narrow)[: layout.zero]
    whole = (3 * wide, narrow, narrow)[layout.zero :]
    return count * sum(divided) // shards + count * sum(whole)
