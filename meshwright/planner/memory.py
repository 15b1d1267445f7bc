"""Bytes of model state per rank and layout: exactly as the runtime allocates them, and by the ZeRO paper's formula."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from meshwright.planner.collectives import ACTIVE_STAGES
from meshwright.planner.cost.element_bytes import master_bytes
from meshwright.planner.cost.meshwright_profile import MESHWRIGHT
from meshwright.planner.cost.state_bytes import StateElements, state_bytes
from meshwright.planner.model_parts import ModelParts, StateSizes
from meshwright.planner.rank_weights import LayerWeights, RankWeights, StageWeights, elements, shard_elements
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout

__all__ = ["ModelParts", "Position", "StateSizes", "paper_memory", "position_memory", "rest_bytes", "state_memory"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """The model state of the ranks with the same indices along ``pp`` and ``tp``."""

    place: Mapping[str, int] = field(default_factory=dict)
    """Index along ``pp`` and ``tp``, where they are used."""
    weights: RankWeights
    """Weights of such a rank before the data axes shard them."""
    memory: Mapping[str, int]
    """Bytes of parameters, gradients and optimizer of the fullest of these ranks."""
    formula: Mapping[str, str]
    """The formula behind each of these."""

    @property
    def total_bytes(self) -> int:
        """All of the memory."""
        return sum(self.memory.values())


def position_memory(layout: Layout, sizes: StateSizes | ModelParts) -> list[Position]:
    """Returns the state of the ranks at every pair of indices along ``pp`` and ``tp``.

    Args:
        layout: of data axes alone where ``sizes`` is a `StateSizes`.
        sizes: the model.

    Raises:
        PlanError: when the layout doesn't fit the model, or needs facts of it that weren't given.
    """
    positions = []
    for place, weights in sizes.positions(layout):
        memory, formula = _state_bytes_and_formulas(layout, weights)
        if isinstance(sizes, ModelParts) and weights.elements != sizes.total:
            note = f", n = {weights.elements} of N = {sizes.total}"
            expert_elements = elements(weights.experts)
            note += f", x = {expert_elements} of experts" if expert_elements else ""
            formula = {kind: text + note for kind, text in formula.items()}
        else:
            formula = {kind: re.sub(r"\bn\b", "N", text) for kind, text in formula.items()}
        positions.append(Position(place=place, weights=weights, memory=memory, formula=formula))
    return positions


def state_memory(layout: Layout, sizes: StateSizes | ModelParts) -> tuple[dict[str, int], dict[str, str]]:
    """Returns (bytes of the fullest rank, formula) for parameters, gradients and optimizer state.

    N is the number of parameters, n those that a rank holds before the data axes shard them, d the ranks that share
    their state (``shard`` x ``cp``), c the bytes of a compute element, w those of a master weight (and of a reduced
    gradient). Where ``ep`` spreads experts, x of the n are experts and e ranks share their shards. Uneven dims add at
    most one row a weight, which the bytes count and the formula doesn't.

    Source: Rajbhandari et al., ZeRO (SC 2020), section 3.1 (K = 12 bytes of optimizer state with float32 masters) and
    figure 1; that FSDP2 keeps no low-precision shard at rest, and that level 3 holds the unit at work, the one
    gathered ahead and what is in neither layers, embedding nor head, is the runtime's own property, checked by its
    tests.
    """
    fullest = max(position_memory(layout, sizes), key=lambda position: position.total_bytes)
    return dict(fullest.memory), dict(fullest.formula)


def rest_bytes(layout: Layout, model: ModelParts, rank: int) -> int:
    """Returns the exact bytes of master weights that one rank keeps between steps; a tied weight counts once."""
    weights, shard, expert_shard = model.weights_of_rank(layout, rank)
    if not _has_sharded_masters(layout):
        return master_bytes(layout.precision) * (weights.elements - elements(weights.twins))
    own_elements = shard_elements(weights.own, weights.shards, shard) - shard_elements(
        weights.twins, weights.shards, shard
    )
    return master_bytes(layout.precision) * (
        own_elements + shard_elements(weights.experts, weights.expert_shards, expert_shard)
    )


def _has_sharded_masters(layout: Layout) -> bool:
    """Whether master weights are separate from the weights that compute, sharded by FSDP2 or beside their copies."""
    return bool(layout.zero) or layout.is_mixed_precision or layout.offload == "parameters"


def _state_bytes_and_formulas(layout: Layout, weights: RankWeights) -> tuple[dict[str, int], dict[str, str]]:
    """Returns bytes of parameters, gradients and optimizer of a rank with these weights, and their formulas."""
    has_masters, count = _has_sharded_masters(layout), weights.elements
    gathered, gathered_formula = _peak_gathered_elements(layout, weights) if has_masters else (count, "w n")
    shard_count = shard_elements(weights.own, weights.shards) + shard_elements(weights.experts, weights.expert_shards)
    is_pipelined, zero = np.array(layout.degree(Mechanics.STAGES) > 1), np.array(layout.zero)
    states = MESHWRIGHT.states
    keeps_full_gradients = states.keeps_full_gradients(zero, np.array(layout.microbatches > 1), is_pipelined)
    is_lone = layout.has_compute_copies and layout.sums_no_gradients and layout.microbatches == 1
    memory = state_bytes(
        states,
        StateElements(
            total=count,
            owned=shard_count,
            gathered=gathered,
            twins=shard_elements(weights.twins, weights.shards) if has_masters else elements(weights.twins),
        ),
        keeps_full_gradients=keeps_full_gradients,
        has_masters=has_masters,
        unmixed_bytes=0.0 if layout.is_mixed_precision else master_bytes(layout.precision),
        is_lone=is_lone,
    )
    shard_formula = "((n - x) / d + x / e)" if weights.experts else "n / d"
    gradients_formula = "w n" if keeps_full_gradients or not has_masters else f"w {shard_formula}"
    if is_lone:
        gradients_formula = "c n"
    return {kind: int(size) for kind, size in memory.items()}, {
        "parameters": gathered_formula,
        "gradients": gradients_formula,
        "optimizer": f"3 w {shard_formula}" if has_masters else "2 w n",
    }


def _peak_gathered_elements(layout: Layout, weights: RankWeights) -> tuple[int, str]:
    """Returns the most elements that are gathered at once, and the formula."""
    if layout.degree(Mechanics.STAGES) > 1:
        stages = sorted((_gathered_stage_elements(stage, weights) for stage in weights.stages), reverse=True)
        return sum(stages[:ACTIVE_STAGES]), "c n" if len(stages) <= ACTIVE_STAGES else f"c ({ACTIVE_STAGES} stages)"
    (stage,) = weights.stages
    if layout.zero < 3:
        return _gathered_stage_elements(stage, weights), "c n"
    kinds = "embedding, layers, head" if stage.embedding or stage.head else "layers"
    formula = f"c (rest + 2 largest layers{' + others / s' if layout.secondary else ''})"
    return _peak_of_neighbours(stage, weights, layout.secondary), formula.replace("layers", f"of {kinds}", 1)


def _peak_of_neighbours(stage: StageWeights, weights: RankWeights, secondary: int) -> int:
    """Returns the most elements that ZeRO-3 gathers at once: the unit at work, the one gathered ahead, and the rest.

    Args:
        stage: the only one of the rank.
        weights: of the rank.
        secondary: neighbours that share each layer from its forward to its backward; 0 where layers are freed.
    """
    embedding, outside, head = (
        _gathered_elements(tensors, weights.shards) for tensors in (stage.embedding, stage.outside_layers, stage.head)
    )
    layers = [_gathered_elements(layer.own, weights.shards) for layer in stage.layers]
    # What is gathered ahead of each unit, and how large it is at work.
    own, sizes = [embedding, *layers, head], [_gathered_layer_elements(layer, weights) for layer in stage.layers]
    sizes = [embedding, *sizes, head]
    parts = [0, *(size // secondary if secondary else 0 for size in layers), 0]
    peaks = [sum(parts)]
    for index, size in enumerate(sizes):
        # Forward gathers the next unit; backward the previous one, from its part, which stays until it is there. It
        # gathers no embedding.
        neighbours = own[index + 1 : index + 2] + own[1:][max(0, index - 2) : max(0, index - 1)]
        peaks.append(sum(parts[:index]) + size + max(neighbours, default=0))
    return outside + max(peaks)


def _gathered_stage_elements(stage: StageWeights, weights: RankWeights) -> int:
    layers = sum(_gathered_layer_elements(layer, weights) for layer in stage.layers)
    return _gathered_elements(stage.ends, weights.shards) + layers


def _gathered_layer_elements(layer: LayerWeights, weights: RankWeights) -> int:
    return _gathered_elements(layer.own, weights.shards) + _gathered_elements(layer.experts, weights.expert_shards)


def _gathered_elements(tensors: tuple[tuple[int, int], ...], shards: int) -> int:
    """Returns elements of gathered weights, padded: every shard is as long as the longest."""
    return shards * shard_elements(tensors, shards)


def paper_memory(layout: Layout, count: int) -> int:
    """Returns the ZeRO paper's bytes of model state per rank: c + g + K a parameter, divided by the level's rule.

    Source: Rajbhandari et al., ZeRO (SC 2020), figure 1, with compute elements and gradients of c bytes and K = 3w.
    """
    master_size = master_bytes(layout.precision)
    compute_bytes = 2 if layout.is_mixed_precision else master_size
    shards = layout.state_shards
    sharded_bytes = (3 * master_size, compute_bytes, compute_bytes)[: layout.zero]
    replicated_bytes = (3 * master_size, compute_bytes, compute_bytes)[layout.zero :]
    return count * sum(sharded_bytes) // shards + count * sum(replicated_bytes)
