"""Cuts a model into pipeline stages by a framework's rule, and counts the layers of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from meshwright.errors import PlanError
from meshwright.planner.cost.layout_batch import Array
from meshwright.schedules.spec import Placement
from meshwright.spec.balanced_cuts import Cuts
from meshwright.spec.layer_graph import END_STAGES, bounds_of_single_layers
from meshwright.spec.layout_choices import Recompute
from meshwright.spec.model_shape import LayerShape, ModelShape


class _IdentityKey:
    """A model shape as a cache key by identity, because hashing all of its blocks is slow.

    Args:
        shape: the model.
    """

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape

    def __hash__(self) -> int:
        """Returns the object's identity."""
        return id(self.shape)

    def __eq__(self, other: object) -> bool:
        """Whether it is the same object."""
        return isinstance(other, _IdentityKey) and other.shape is self.shape


def block_kinds(shape: ModelShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (kind of each block, index of the first block of each kind); equal blocks are one kind."""
    return _kinds(_IdentityKey(shape))


@lru_cache(maxsize=4096)
def recomputed_layers(number: int, layers: int) -> Array:
    """Returns which of a model's layers recompute where a number of them does, (number,) int64."""
    return np.array(sorted(Recompute("full", number).layers(layers)), dtype=int)


@lru_cache(maxsize=8)
def _kinds(key: _IdentityKey) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns `block_kinds`, cached: a search calls it hundreds of times."""
    shape = key.shape
    kind_by_identity: dict[int, int] = {}
    kind_by_block: dict[object, int] = {}
    kinds_of_blocks = []
    for block in shape.blocks:
        kind = kind_by_identity.get(id(block))
        if kind is None:
            kind = kind_by_block.setdefault(block, len(kind_by_block))
            kind_by_identity[id(block)] = kind
        kinds_of_blocks.append(kind)
    return tuple(kinds_of_blocks), tuple(kinds_of_blocks.index(kind) for kind in range(len(kind_by_block)))


def divide_blocks(
    shape: ModelShape, stages: int, rule: str, split: Sequence[float] | None = None
) -> tuple[tuple[int, int], ...]:
    """Returns (start, stop) of the blocks of each stage.

    Args:
        shape: the model.
        stages: of the pipeline, all ranks together.
        rule: one of `engine.SPLITS`.
        split: layers of each stage where they are named.

    Raises:
        PlanError: more stages than blocks where each must have one.
    """
    layers = len(shape.blocks)
    if split:
        return _bounds_of_sizes([int(size) for size in split], layers)
    if stages == 1:
        return ((0, layers),)
    head_parameters = shape.vocab * shape.width
    if rule == "compute":
        return _cut_at_thresholds([_active_parameters(block) for block in shape.blocks], float(head_parameters), stages)
    if rule == "balanced":
        return _balanced(
            tuple(block.parameters for block in shape.blocks), head_parameters + shape.other_parameters, stages
        )
    counts_ends = rule == "slots" or (layers % stages and not (layers + 2) % stages)
    slots = layers + (2 if counts_ends else 0)
    sizes = [slots // stages + (stages - stage <= slots % stages) for stage in range(stages)]
    if counts_ends:
        sizes[0], sizes[-1] = sizes[0] - 1, sizes[-1] - 1
    return _bounds_of_sizes(sizes, layers)


def _active_parameters(block: LayerShape) -> float:
    """Returns the parameters that a token visits, norms included."""
    share = block.active_experts / block.experts if block.experts else 0.0
    return block.parameters - (1.0 - share) * block.expert_parameters


def _bounds_of_sizes(sizes: Sequence[int], count: int) -> tuple[tuple[int, int], ...]:
    edges = [0]
    for size in sizes:
        edges.append(min(count, edges[-1] + size))
    edges[-1] = count
    return tuple(pairwise(edges))


def _cut_at_thresholds(costs: Sequence[float], tail: float, stages: int) -> tuple[tuple[int, int], ...]:
    """Fills each stage until it reaches its share of the cost; the last stages may have no layer.

    Source: nanotron, src/nanotron/models/base.py, build_model.
    """
    total = sum(costs) + tail
    edges, reached_cost, stage = [0], 0.0, 1
    for layer, cost in enumerate(costs):
        reached_cost += cost
        if reached_cost >= total * stage / stages * (1 - 1e-9) and stage < stages:
            edges.append(layer + 1)
            stage += 1
    edges += [len(costs)] * (stages + 1 - len(edges))
    return tuple(pairwise(edges))


def _balanced(costs: tuple[int, ...], tail: int, stages: int) -> tuple[tuple[int, int], ...]:
    """Minimizes the most expensive stage; the tail is the last one's, which may have no layer beside it."""
    layers = len(costs)
    if stages > layers + END_STAGES:
        raise PlanError(
            f"{stages} stages of {layers} layers: each but the first and the last needs a layer; nearest that works: "
            f"{layers + END_STAGES}"
        )
    if stages > layers:
        return tuple(pairwise(bounds_of_single_layers(layers, stages)))
    bounds, _ = _cached_cuts(costs, tail).bounds(stages)
    return tuple(pairwise(bounds[0].tolist()))


@lru_cache(maxsize=8)
def _cached_cuts(costs: tuple[int, ...], tail: int) -> Cuts:
    """Returns the cached solver of a model, which serves every number of stages."""
    return Cuts([[costs]], [[tail]])


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCut:
    """The layers of each rank of a pipeline; a rank may run several stages."""

    bounds: tuple[tuple[int, int], ...]
    """(start, stop) of the layers of each stage."""
    counts: Array
    """Layers of each kind on each rank, (kinds, P) float64, read-only."""
    first_rank: int
    """Rank of the first stage."""
    last_rank: int
    """Rank of the last stage."""
    owners: tuple[int, ...]
    """Rank of each stage."""
    first_counts: Array
    """Layers of each kind of the lowest stage of each rank, (kinds, P) float64, read-only."""
    last_counts: Array
    """Layers of each kind of the last stage, (kinds,) float64, read-only."""

    def places_in_counts(self, kinds_of_blocks: tuple[int, ...]) -> Array:
        """Returns where each layer counts in ``counts``, as an index into its values in a row, (layers,) int64.

        Args:
            kinds_of_blocks: of `block_kinds`.
        """
        ranks = np.repeat(self.owners, [stop - start for start, stop in self.bounds])
        return np.asarray(np.array(kinds_of_blocks) * self.counts.shape[1] + ranks)

    def of_stages(self, kinds_of_blocks: tuple[int, ...]) -> StageCut:
        """Returns the same cut with every stage alone on a rank of its own.

        Args:
            kinds_of_blocks: of `block_kinds`.
        """
        stages = len(self.owners)
        return _count_layers(self.bounds, kinds_of_blocks, len(self.counts), stages, tuple(range(stages)))


def cut_stages(
    shape: ModelShape,
    ranks: int,
    stages_per_rank: int,
    placement: Placement | tuple[int, ...],
    rule: str,
    split: Sequence[float] | None,
) -> StageCut:
    """Returns the layers of each rank.

    Args:
        shape: the model.
        ranks: degree of the pipeline, P.
        stages_per_rank: stages of a rank.
        placement: of the stages on the ranks: a rule, or the rank of each.
        rule: one of `engine.SPLITS`.
        split: layers of each stage where they are named.

    Raises:
        PlanError: more stages than blocks where each must have one.
    """
    named_sizes = tuple(split) if split else None
    return _cut_stages(_IdentityKey(shape), ranks, stages_per_rank, placement, rule, named_sizes)


@lru_cache(maxsize=1024)
def _cut_stages(
    key: _IdentityKey,
    ranks: int,
    stages_per_rank: int,
    placement: Placement | tuple[int, ...],
    rule: str,
    split: tuple[float, ...] | None,
) -> StageCut:
    """Returns `cut_stages`, cached: a search repeats the same cuts hundreds of times."""
    kinds_of_blocks, kind_blocks = block_kinds(key.shape)
    stages = ranks * stages_per_rank
    owners = placement if isinstance(placement, tuple) else tuple(placement.rank_of(i, ranks) for i in range(stages))
    bounds = divide_blocks(key.shape, stages, rule, split)
    return _count_layers(bounds, kinds_of_blocks, len(kind_blocks), ranks, owners)


def _count_layers(
    bounds: tuple[tuple[int, int], ...],
    kinds_of_blocks: tuple[int, ...],
    kind_count: int,
    ranks: int,
    owners: tuple[int, ...],
) -> StageCut:
    """The layers of each of ``kind_count`` kinds on each rank; the counts are read-only, as they are cached."""
    sizes = [stop - start for start, stop in bounds]
    kinds = np.array(kinds_of_blocks[: sum(sizes)])
    # One number for each (kind, stage) pair, so that one bincount counts all pairs.
    kind_and_stage = np.repeat(np.arange(len(owners)), sizes) + kinds * len(owners)
    by_stage = np.bincount(kind_and_stage, minlength=kind_count * len(owners)).astype(float).reshape(kind_count, -1)
    counts, first_counts = np.zeros((kind_count, ranks)), np.zeros((kind_count, ranks))
    for stage in range(len(owners) - 1, -1, -1):
        counts[:, owners[stage]] += by_stage[:, stage]
        first_counts[:, owners[stage]] = by_stage[:, stage]
    last_counts = by_stage[:, -1].copy()
    for array in (counts, first_counts, last_counts):
        array.flags.writeable = False
    return StageCut(
        bounds=bounds, counts=counts, first_rank=owners[0], last_rank=owners[-1], owners=owners,
        first_counts=first_counts, last_counts=last_counts,
    )  # fmt: skip
