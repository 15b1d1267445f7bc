"""The model as names and shapes, and the weights of it that each rank of a layout holds."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from meshwright.errors import PlanError
from meshwright.planner.rank_weights import LayerWeights, RankWeights, StageWeights
from meshwright.spec.axes import known_axes
from meshwright.spec.axis import Mechanics
from meshwright.spec.end_units import EndUnits
from meshwright.spec.experts import LayerExperts
from meshwright.spec.groups import carved_index, carved_shards, coordinates, state_index
from meshwright.spec.layer_graph import LayerGraph, divide, weights_by_stage
from meshwright.spec.layout import Layout
from meshwright.spec.sharding_table import ShardingTable, vocabulary_span

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSizes:
    """The model as counts of trainable parameters: enough for layouts of data axes alone."""

    total: int
    """All trainable parameters, tied ones once."""
    layers: tuple[int, ...]
    """Parameters of each repeated layer, in order."""

    @property
    def rest(self) -> int:
        """Parameters outside the layers: embedding, head, last norm."""
        return self.total - sum(self.layers)

    def positions(self, layout: Layout) -> Iterator[tuple[dict[str, int], RankWeights]]:
        """Yields ({}, the weights of every rank): data axes don't split the model."""
        layers = tuple(LayerWeights(own=((elements, 1),)) for elements in self.layers)
        stage = StageWeights(outside_layers=((self.rest, 1),), layers=layers)
        yield {}, RankWeights(stages=(stage,), shards=layout.state_shards)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelParts:
    """The model as names and shapes, with the tables of how each axis splits it: enough for every layout."""

    shapes: Mapping[str, Shape]
    """Shape of every parameter in the order of definition, a tied one under each of its names."""
    layers: tuple[str, ...]
    """Names of its repeated layers, in order."""
    ties: tuple[tuple[str, ...], ...] = ()
    """Groups of names that are one parameter."""
    frozen: frozenset[str] = frozenset()
    """Names of parameters that aren't trained, and so have no gradient and no optimizer state."""
    table: ShardingTable | None = None
    """Needed by layouts with ``tp``."""
    layer_graph: LayerGraph | None = None
    """Needed by layouts with ``pp``."""
    experts: tuple[LayerExperts, ...] = ()
    """Needed by layouts with ``ep``."""
    attention: str = "heads"
    """How ``cp`` computes attention where the layout doesn't say."""
    wide_routing: bool = False
    """Whether the weights of tokens' experts stay in float32 where the model computes in fewer bits."""
    ends: EndUnits = EndUnits()  # noqa: RUF009 - frozen
    """Modules outside the layers that are FSDP units of their own where no pipeline cuts the model."""

    @classmethod
    def of(
        cls,
        parameters: Iterable[tuple[str, Any]],
        layers: Sequence[str],
        ties: Sequence[Sequence[str]] = (),
        table: ShardingTable | None = None,
        layer_graph: LayerGraph | None = None,
        experts: Sequence[LayerExperts] = (),
        attention: str = "",
        wide_routing: bool = False,
        ends: EndUnits = EndUnits(),  # noqa: B008 - frozen
    ) -> Self:
        """Reads names and shapes off a module.

        Args:
            parameters: its ``named_parameters(remove_duplicate=False)``; only shapes and ``requires_grad`` are read.
            layers: names of its repeated layers, in order.
            ties: groups of names that are one parameter.
            table: the sharding table, for ``tp``.
            layer_graph: the layer graph, for ``pp``.
            experts: the rows of routed experts, for ``ep``.
            attention: how ``cp`` computes attention by default; empty for by heads.
            wide_routing: whether the routing weights stay in float32.
            ends: modules outside the layers that can be FSDP units of their own.
        """
        parameters_by_name = dict(parameters)
        return cls(
            shapes={name: tuple(parameter.shape) for name, parameter in parameters_by_name.items()},
            layers=tuple(layers),
            ties=tuple(tuple(names) for names in ties),
            frozen=frozenset(name for name, parameter in parameters_by_name.items() if not parameter.requires_grad),
            table=table,
            layer_graph=layer_graph,
            experts=tuple(experts),
            attention=attention or "heads",
            wide_routing=wide_routing,
            ends=ends,
        )

    @property
    def total(self) -> int:
        """Trainable parameters, tied ones once."""
        return sum(math.prod(self.shapes[name]) for name in self.trained(self.shapes))

    def positions(self, layout: Layout) -> Iterator[tuple[dict[str, int], RankWeights]]:
        """Yields the weights of a rank by its indices along ``pp`` and ``tp``; along ``ep`` of the fullest rank.

        Raises:
            PlanError: when the layout needs a table of the model that wasn't given.
        """
        return WeightPlacement(self, layout).positions()

    def weights_of_rank(self, layout: Layout, rank: int) -> tuple[RankWeights, int, int]:
        """Returns (weights of a rank, its index among the ranks of its shards, the same for its experts' shards)."""
        return WeightPlacement(self, layout).weights_of_rank(rank)

    def split_table(self, layout: Layout) -> ShardingTable | None:
        """Returns the table of what ``tp`` splits: not the experts that ``ep`` spreads."""
        spreads = layout.degree(Mechanics.EXPERTS) > 1
        return self.table.without_experts([rows.module for rows in self.experts if spreads]) if self.table else None

    def first_names(self) -> dict[str, str]:
        """Returns the canonical (first) name of each name of a tied weight."""
        return {name: names[0] for names in self.ties for name in names}

    def trained(self, names: Iterable[str]) -> list[str]:
        """Returns the names that are trained, without further names of a tied weight."""
        canonical_names, names_by_canonical = self.first_names(), dict[str, str]()
        for name in names:
            if name not in self.frozen:
                names_by_canonical.setdefault(canonical_names.get(name, name), name)
        return list(names_by_canonical.values())


class WeightPlacement:
    """The weights of a model that each rank of a layout holds, by indices along ``pp``, ``tp`` and ``ep``.

    Args:
        model: names, shapes and tables.
        layout: the degrees.
    """

    def __init__(self, model: ModelParts, layout: Layout) -> None:
        self._model, self._layout = model, layout
        self.expert_parameters: set[str] = set()
        """Names of the weights that ``ep`` spreads."""
        if layout.degree(Mechanics.EXPERTS) > 1:
            self.expert_parameters = {f"{rows.module}.{key}" for rows in model.experts for key in rows.parameters}
        self._by_stage = self._names_by_stage()
        self._local: dict[tuple[int, int], dict[str, Shape]] = {}

    def positions(self) -> Iterator[tuple[dict[str, int], RankWeights]]:
        """Yields (indices along ``pp`` and ``tp``, weights of the fullest such rank along ``ep``)."""
        layout = self._layout
        for stage in range(layout.degree(Mechanics.STAGES)):
            for tp_index in range(layout.degree(Mechanics.MATRICES)):
                axis_indices = {layout.axis(Mechanics.STAGES): stage, layout.axis(Mechanics.MATRICES): tp_index}
                fullest_expert_index = max(sorted(self._expert_indices(tp_index)), key=self._local_expert_rows)
                yield (
                    {name: axis_index for name, axis_index in axis_indices.items() if layout.degree(name) > 1},
                    self.rank_weights(stage, tp_index, fullest_expert_index),
                )

    def weights_of_rank(self, rank: int) -> tuple[RankWeights, int, int]:
        """Returns (weights of a rank, its index among the ranks of its shards, the same for its experts' shards)."""
        layout = self._layout
        axis_indices = coordinates(rank, layout.degrees)
        carved_position = carved_index(layout.axis(Mechanics.EXPERTS), rank, layout.degrees)
        expert_shard_index, expert_index = divmod(carved_position, layout.degree(Mechanics.EXPERTS))
        stage, tp_index = axis_indices[layout.axis(Mechanics.STAGES)], axis_indices[layout.axis(Mechanics.MATRICES)]
        shard = state_index(rank, layout.degrees, layout.zero)
        return self.rank_weights(stage, tp_index, expert_index), shard, expert_shard_index if layout.zero else 0

    def rank_weights(self, pp: int, tp: int, ep: int) -> RankWeights:
        """Returns the weights of the ranks with these indices along ``pp``, ``tp`` and ``ep``."""
        layout, local_shapes, canonical_names = self._layout, self._local_shapes(tp, ep), self._model.first_names()
        seen_names: set[str] = set()
        twins: list[tuple[int, int]] = []
        stages = []
        for names in self._by_stage[pp]:
            # A second stage of this rank may hold a tied weight again: its masters count once (`twins`).
            canonical_of = {name: canonical_names.get(name, name) for name in names}
            twins += [_rows_and_columns(local_shapes[name]) for name in names if canonical_of[name] in seen_names]
            seen_names |= set(canonical_of.values())
            stages.append(self._stage_weights(names, local_shapes))
        return RankWeights(
            stages=tuple(stages),
            shards=layout.state_shards,
            expert_shards=carved_shards(layout.axis(Mechanics.EXPERTS), layout.degrees, layout.zero),
            twins=tuple(twins),
        )

    def stages(self, pp: int) -> list[list[str]]:
        """Returns the trained names of each stage at an index along ``pp``."""
        return self._by_stage[pp]

    def shapes(self, tp: int, ep: int) -> Mapping[str, Shape]:
        """Returns the shape of each weight on the ranks with these indices along ``tp`` and ``ep``."""
        return self._local_shapes(tp, ep)

    def stage_weights(self, names: Sequence[str], tp: int, ep: int) -> StageWeights:
        """Returns the local sizes of a stage's weights on the ranks with these indices along ``tp`` and ``ep``."""
        return self._stage_weights(names, self._local_shapes(tp, ep))

    def units(self, names: Sequence[str]) -> list[list[str]]:
        """Returns the names of a stage's weights by FSDP unit, the first summed last: ends, then layers, then head."""
        by_layer: dict[str | None, list[str]] = {None: []} | {layer: [] for layer in self._model.layers}
        for name in names:
            by_layer[_layer_of(name, by_layer)].append(name)
        ends = self._ends.by_unit(by_layer.pop(None))
        return [unit for unit in (ends["embedding"], ends["rest"], *by_layer.values(), ends["head"]) if unit]

    @property
    def _ends(self) -> EndUnits:
        """The units beside the layers: of a pipeline none, whose schedule gathers and frees a stage as a whole."""
        return self._model.ends if self._layout.degree(Mechanics.STAGES) == 1 else EndUnits()

    def _names_by_stage(self) -> list[list[list[str]]]:
        """Returns the trained names of each stage, by index along ``pp``."""
        model, layout = self._model, self._layout
        if layout.degree(Mechanics.STAGES) == 1:
            return [[model.trained(model.shapes)]]
        schedule = layout.pipeline()
        names_of_stages = weights_by_stage(
            _require_layer_graph(model, layout), list(model.shapes), stage_bounds(model, layout), model.ties
        )
        stages = [model.trained(name for name in model.shapes if name in names) for names in names_of_stages]
        return [
            [stages[stage] for stage in schedule.rank_stages(pp_index)]
            for pp_index in range(layout.degree(Mechanics.STAGES))
        ]

    def _stage_weights(self, names: Sequence[str], local_shapes: Mapping[str, Shape]) -> StageWeights:
        layers: dict[str, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {
            layer: ([], []) for layer in self._model.layers
        }
        outside_layers = []
        for name in names:
            layer = _layer_of(name, layers)
            if layer is None:
                outside_layers.append(name)
            else:
                layers[layer][name in self.expert_parameters].append(_rows_and_columns(local_shapes[name]))
        nonempty_layers = [(own, experts) for own, experts in layers.values() if own or experts]
        ends = {
            unit: tuple(_rows_and_columns(local_shapes[name]) for name in unit_names)
            for unit, unit_names in self._ends.by_unit(outside_layers).items()
        }
        return StageWeights(
            outside_layers=ends["rest"],
            embedding=ends["embedding"],
            head=ends["head"],
            layers=tuple(LayerWeights(own=tuple(own), experts=tuple(experts)) for own, experts in nonempty_layers),
        )

    def _local_shapes(self, tp: int, ep: int) -> dict[str, Shape]:
        """Returns the shape of each weight on the ranks with these indices, cached."""
        if (tp, ep) not in self._local:
            local_shapes = dict(self._model.shapes)
            if self._layout.degree(Mechanics.MATRICES) > 1:
                self._split_over_tp(local_shapes, tp)
            for rows in self._model.experts if self.expert_parameters else ():
                span = rows.span(ep, self._layout.degree(Mechanics.EXPERTS))
                for key in rows.parameters:
                    shape = local_shapes[name := f"{rows.module}.{key}"]
                    local_shapes[name] = _resized(shape, 0, rows.local_size(key, shape[0], span))
            self._local[tp, ep] = local_shapes
        return self._local[tp, ep]

    def _split_over_tp(self, local_shapes: dict[str, Shape], tp: int) -> None:
        """Narrows ``local_shapes`` in place to the rows or columns of an index along ``tp``."""
        table, degree = self._model.split_table(self._layout), self._layout.degree(Mechanics.MATRICES)
        if table is None:
            raise PlanError(f"tp={degree}: its bytes follow from the model's sharding table, which wasn't read")
        for layer, split, shares, group in table.splits(degree):
            name = f"{layer}.{split.name}"
            if name in local_shapes:
                size = sum(stop - start for start, stop in split.spans(*shares[tp], group.units))
                local_shapes[name] = _resized(local_shapes[name], split.dim, size)
        start, stop = vocabulary_span(table.vocab, degree, tp)
        canonical_names = self._model.first_names()
        split_vocabulary = {
            canonical_names.get(name, name)
            for name, shape in local_shapes.items()
            if name.rpartition(".")[0] in table.vocabulary and shape[:1] == (table.vocab,)
        }
        for name in [name for name in local_shapes if canonical_names.get(name, name) in split_vocabulary]:
            local_shapes[name] = _resized(local_shapes[name], 0, stop - start)

    def _expert_indices(self, tp: int) -> set[int]:
        """Returns the indices along ``ep`` of the ranks with an index along ``tp``."""
        layout = self._layout
        carved_axes = known_axes()[layout.axis(Mechanics.EXPERTS)].carves
        tp_degree, ep_degree = layout.degree(Mechanics.MATRICES), layout.degree(Mechanics.EXPERTS)
        row_count = math.prod(layout.degree(name) for name in carved_axes) // tp_degree
        return {(row * tp_degree + tp) % ep_degree for row in range(row_count)}

    def _local_expert_rows(self, index: int) -> int:
        spans = [rows.span(index, self._layout.degree(Mechanics.EXPERTS)) for rows in self._model.experts]
        return sum(stop - start for start, stop in spans)


def stage_bounds(model: ModelParts, layout: Layout) -> tuple[int, ...]:
    """Returns the first layer of each stage of a pipeline, and the number of layers.

    Raises:
        PlanError: when the model can't be cut so.
    """
    sizes = {name: math.prod(shape) for name, shape in model.shapes.items()}
    return divide(_require_layer_graph(model, layout), sizes, model.ties, layout.pipeline().stages, layout.split)


def _require_layer_graph(model: ModelParts, layout: Layout) -> LayerGraph:
    if model.layer_graph is None:
        raise PlanError(
            f"{layout.format_degree(Mechanics.STAGES)}: "
            "its bytes follow from the model's layer graph, which wasn't read"
        )
    return model.layer_graph


def _layer_of(name: str, layers: Container[object]) -> str | None:
    """Returns the layer of a weight; None outside of all layers."""
    path = name.rpartition(".")[0]
    while path and path not in layers:
        path = path.rpartition(".")[0]
    return path or None


def _rows_and_columns(shape: Shape) -> tuple[int, int]:
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def _resized(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])
