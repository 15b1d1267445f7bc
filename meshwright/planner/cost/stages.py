"""Which layers stand on which rank of the pipeline, by an engine's rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from meshwright.errors import PlanError
from meshwright.planner.cost.layout_batch import Array
from meshwright.spec.balanced_cuts import Cuts
from meshwright.spec.model_shape import LayerShape, ModelShape


class _Same:
    """A shape as a key: the object itself, not what it says.

    Args:
        shape: which.
    """

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape

    def __hash__(self) -> int:
        """Of the object."""
        return id(self.shape)

    def __eq__(self, other: object) -> bool:
        """Whether it is the same object."""
        return isinstance(other, _Same) and other.shape is self.shape


def kinds(shape: ModelShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns for each block its kind, and for each kind a block that is of it."""
    return _kinds(_Same(shape))


@lru_cache(maxsize=8)
def _kinds(same: _Same) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """As `kinds`, which a search asks for hundreds of times."""
    shape = same.shape
    firsts: dict[int, int] = {}
    seen: dict[object, int] = {}
    numbers = []
    for block in shape.blocks:
        key = firsts.get(id(block))
        if key is None:
            key = seen.setdefault(block, len(seen))
            firsts[id(block)] = key
        numbers.append(key)
    return tuple(numbers), tuple(numbers.index(kind) for kind in range(len(seen)))


def divide(
    shape: ModelShape, stages: int, rule: str, split: Sequence[float] | None = None
) -> tuple[tuple[int, int], ...]:
    """Returns the first and one past the last block of each stage.

    Args:
        shape: the model.
        stages: of the pipeline, all ranks together.
        rule: one of `engine.SPLITS`.
        split: layers of each stage where they are named.

    Raises:
        PlanError: more stages than blocks where each must have one.
    """
    count = len(shape.blocks)
    if split:
        return _bounds([int(size) for size in split], count)
    if stages == 1:
        return ((0, count),)
    tail = shape.vocab * shape.width
    if rule == "compute":
        return _thresholds([_visited(block) for block in shape.blocks], float(tail), stages)
    if rule == "balanced":
        return _balanced(tuple(block.parameters for block in shape.blocks), tail + shape.other_parameters, stages)
    ends = rule == "slots" or (count % stages and not (count + 2) % stages)
    slots = count + (2 if ends else 0)
    sizes = [slots // stages + (stages - number <= slots % stages) for number in range(stages)]
    if ends:
        sizes[0], sizes[-1] = sizes[0] - 1, sizes[-1] - 1
    return _bounds(sizes, count)


def _visited(block: LayerShape) -> float:
    """Parameters that a token multiplies, norms among them."""
    share = block.active_experts / block.experts if block.experts else 0.0
    return block.parameters - (1.0 - share) * block.expert_parameters


def _bounds(sizes: Sequence[int], count: int) -> tuple[tuple[int, int], ...]:
    edges = [0]
    for size in sizes:
        edges.append(min(count, edges[-1] + size))
    edges[-1] = count
    return tuple(pairwise(edges))


def _thresholds(costs: Sequence[float], tail: float, stages: int) -> tuple[tuple[int, int], ...]:
    """Fills each stage until its share of the cost is reached; later stages may stay empty of layers.

    Source: nanotron, src/nanotron/models/base.py, build_model.
    """
    total = sum(costs) + tail
    edges, done, stage = [0], 0.0, 1
    for number, cost in enumerate(costs):
        done += cost
        if done >= total * stage / stages * (1 - 1e-9) and stage < stages:
            edges.append(number + 1)
            stage += 1
    edges += [len(costs)] * (stages + 1 - len(edges))
    return tuple(pairwise(edges))


def _balanced(costs: tuple[int, ...], tail: int, stages: int) -> tuple[tuple[int, int], ...]:
    """Makes the dearest stage as cheap as can be, the tail counted with the last layer; `divide` cuts alike."""
    count = len(costs)
    if stages > count:
        raise PlanError(f"{stages} stages of {count} layers: each stage needs a layer; nearest that works: {count}")
    bounds, _ = _cuts((*costs[:-1], costs[-1] + tail)).bounds(stages)
    return tuple(pairwise(bounds[0].tolist()))


@lru_cache(maxsize=8)
def _cuts(costs: tuple[int, ...]) -> Cuts:
    """The cuts of a model, which are found for one number of stages after the other."""
    return Cuts([[costs]])


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCut:
    """The layers of a pipeline's ranks, of which each may run several stages."""

    bounds: tuple[tuple[int, int], ...]
    """First layer of each stage, and one past its last."""
    counts: Array
    """Layers of each kind on each rank, (kinds, P)."""
    first: int
    """Rank of the first stage."""
    last: int
    """Rank of the last stage."""


def cut(
    shape: ModelShape,
    ranks: int,
    chunks: int,
    owners: tuple[int, ...],
    rule: str,
    split: Sequence[float] | None,
) -> StageCut:
    """Returns which layers stand on which rank.

    Args:
        shape: the model.
        ranks: of the pipeline.
        chunks: stages of a rank.
        owners: the rank of each stage.
        rule: one of `engine.SPLITS`.
        split: layers of each stage where they are named.

    Raises:
        PlanError: more stages than blocks where each must have one.
    """
    numbers, firsts = kinds(shape)
    if rule == "balanced" and not split and ranks * chunks > 1:
        tail = shape.vocab * shape.width + shape.other_parameters
        costs = tuple(block.parameters for block in shape.blocks)
        return _balanced_cut(costs, tail, numbers, len(firsts), ranks, owners)
    return _counted(divide(shape, ranks * chunks, rule, split), numbers, len(firsts), ranks, owners)


@lru_cache(maxsize=1024)
def _balanced_cut(
    costs: tuple[int, ...], tail: int, numbers: tuple[int, ...], many: int, ranks: int, owners: tuple[int, ...]
) -> StageCut:
    """As `cut`; a search asks for the same cuts of a model again and again."""
    return _counted(_balanced(costs, tail, len(owners)), numbers, many, ranks, owners)


def _counted(
    bounds: tuple[tuple[int, int], ...], numbers: tuple[int, ...], many: int, ranks: int, owners: tuple[int, ...]
) -> StageCut:
    """The layers of each of ``many`` kinds on each rank, which nobody may change."""
    sizes = [stop - start for start, stop in bounds]
    cells = np.repeat(np.array(owners), sizes) + np.array(numbers[: sum(sizes)]) * ranks
    counts = np.bincount(cells, minlength=many * ranks).astype(float).reshape(many, ranks)
    counts.flags.writeable = False
    return StageCut(bounds=bounds, counts=counts, first=owners[0], last=owners[-1])
