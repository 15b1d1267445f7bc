"""What a rank holds of the model's state before the data axes shard it, as numbers."""

from __future__ import annotations

from dataclasses import dataclass

Tensors = tuple[tuple[int, int], ...]
"""(rows, elements of a row) of each weight."""


def elements(tensors: Tensors) -> int:
    """Returns the number of elements of weights that are held whole."""
    return sum(rows * columns for rows, columns in tensors)


def shard_elements(tensors: Tensors, shards: int, index: int = 0) -> int:
    """Returns the elements that one of ``shards`` ranks holds when each weight's rows are dealt out in runs.

    Runs are rows / shards, rounded up; the first rank holds most, and the last ones may hold none.
    """
    held = 0
    for rows, columns in tensors:
        run = -(-rows // shards)
        held += (min(rows, (index + 1) * run) - min(rows, index * run)) * columns
    return held


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """What a rank holds of one layer."""

    own: Tensors
    """All but what is in `experts`."""
    experts: Tensors = ()
    """Experts that ``ep`` spreads: their shards lie on other ranks than those of the rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageWeights:
    """What a rank holds of one stage."""

    rest: Tensors
    """Outside of the layers."""
    layers: tuple[LayerWeights, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWeights:
    """What a rank holds before the data axes shard it."""

    stages: tuple[StageWeights, ...]
    """One without a pipeline."""
    shards: int
    """Ranks that share the shards of all but the experts."""
    expert_shards: int = 1
    """Ranks that share the shards of the experts that ``ep`` spreads."""
    twins: Tensors = ()
    """Of `stages`, tied weights that another stage of the same rank holds too; they are trained once."""

    @property
    def own(self) -> Tensors:
        """All weights but the experts that ``ep`` spreads."""
        parts = ((stage.rest, *(layer.own for layer in stage.layers)) for stage in self.stages)
        return tuple(item for stage in parts for part in stage for item in part)

    @property
    def experts(self) -> Tensors:
        """The experts that ``ep`` spreads."""
        return tuple(item for stage in self.stages for layer in stage.layers for item in layer.experts)

    @property
    def elements(self) -> int:
        """Number of all."""
        return elements(self.own) + elements(self.experts)
