"""Sizes of the weights that a rank holds before the data axes shard them."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.spec.compression import count_blocks

Tensors = tuple[tuple[int, int], ...]
"""(rows, elements of a row) of each weight."""


def elements(tensors: Tensors) -> int:
    """Returns the number of elements of unsharded weights."""
    return sum(rows * columns for rows, columns in tensors)


def shard_elements(tensors: Tensors, shards: int, index: int = 0) -> int:
    """Returns the elements that one of ``shards`` ranks holds when each weight is sharded by rows (FSDP2, dim 0).

    A shard has rows / shards, rounded up; the first rank holds most, and the last ones may hold none.
    """
    total = 0
    for rows, columns in tensors:
        rows_per_shard = -(-rows // shards)
        total += (min(rows, (index + 1) * rows_per_shard) - min(rows, index * rows_per_shard)) * columns
    return total


def shard_blocks(tensors: Tensors, shards: int) -> int:
    """Returns the blocks of rounded numbers of one shard, padded to the first's: each weight begins a block."""
    return sum(count_blocks(-(-rows // shards) * columns) for rows, columns in tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """Weights of one layer that a rank holds."""

    own: Tensors
    """All weights but `experts`."""
    experts: Tensors = ()
    """Experts that ``ep`` spreads; other ranks shard them than shard the layer's other weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageWeights:
    """Weights of one stage that a rank holds."""

    outside_layers: Tensors
    """Weights outside of the layers, but for those of `embedding` and `head`."""
    layers: tuple[LayerWeights, ...]
    embedding: Tensors = ()
    """Of an embedding that is an FSDP unit of its own."""
    head: Tensors = ()
    """Of a head that is one, with the last norm where that belongs to it."""

    @property
    def ends(self) -> Tensors:
        """All weights outside of the layers."""
        return self.embedding + self.outside_layers + self.head


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWeights:
    """Weights that a rank holds before the data axes shard them."""

    stages: tuple[StageWeights, ...]
    """Its stages; one without a pipeline."""
    shards: int
    """Ranks that shard all weights but the experts."""
    expert_shards: int = 1
    """Ranks that shard the experts that ``ep`` spreads."""
    twins: Tensors = ()
    """Tied weights of `stages` that another stage of the same rank holds too; they have one master."""

    @property
    def own(self) -> Tensors:
        """All weights but the experts that ``ep`` spreads."""
        tensors_by_stage = ((stage.ends, *(layer.own for layer in stage.layers)) for stage in self.stages)
        return tuple(tensor for stage in tensors_by_stage for tensors in stage for tensor in tensors)

    @property
    def experts(self) -> Tensors:
        """The experts that ``ep`` spreads."""
        return tuple(tensor for stage in self.stages for layer in stage.layers for tensor in layer.experts)

    @property
    def elements(self) -> int:
        """Number of elements of all weights."""
        return elements(self.own) + elements(self.experts)
