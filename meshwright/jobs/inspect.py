"""The job ``inspect``: what a model is made of, how each axis can split it, and what a layout's ranks would hold."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from meshwright.errors import MeshwrightError
from meshwright.jobs.explain_layer import LayerExplanation, explain_layer
from meshwright.jobs.model_reading import model_parts
from meshwright.jobs.module_stack import module_stacks
from meshwright.jobs.requests import InspectConfig, Layouts, with_fields
from meshwright.json_types import JsonObject
from meshwright.models.analysis.experts import find_experts
from meshwright.models.analysis.layer_graph import LayerGraphAnalysis, analyse_layer_graph
from meshwright.models.analysis.objective_trial import try_forward
from meshwright.models.analysis.table import ShardingAnalysis, analyse_sharding, overridden_table
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.measure import measure_shape
from meshwright.parallel import expert
from meshwright.parallel.build import check
from meshwright.planner.memory import Position, paper_memory, position_memory
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout
from meshwright.spec.sharding_table import LayerSharding
from meshwright.train.model_analysis import ModelAnalysis, analyse_model

_Analysis = TypeVar("_Analysis")


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectResult:
    """A model's sizes, structure and possible splits, as plain values."""

    model: str
    """Its name."""
    shape: JsonObject
    """Its sizes, as `spec.model_shape` has them."""
    structure: JsonObject
    """Names of its parts, and its layers by kind."""
    experts: tuple[JsonObject, ...]
    """Its modules of experts, and how many each has."""
    sharding: JsonObject
    """How tensor parallelism can split each kind of layer, and what stays whole; ``refused`` where it can't at all."""
    pipeline: JsonObject
    """Where the layers can be cut into stages; ``refused`` where they can't."""
    layouts: tuple[JsonObject, ...]
    """Bytes of state by place for each layout that was named."""
    stacks: tuple[JsonObject, ...] = ()
    """For each layout ``layout``, ``rank`` and ``modules``: what a call of the module that was named goes through."""
    explanations: tuple[LayerExplanation, ...] = ()
    """The decisions on the layer that was named, weight by weight, with the evidence that the analysis used."""

    def to_json(self) -> dict[str, object]:
        """Returns plain values under the names of the fields."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        values |= {name: list(values[name]) for name in ("experts", "layouts", "stacks")}
        return values | {"explanations": [explanation.to_json() for explanation in self.explanations]}


def inspect(
    config: InspectConfig | None = None,
    /,
    *,
    model: str | ModelConfig | None = None,
    layout: Layouts | None = None,
    explain: str | None = None,
) -> InspectResult:
    """Reads off a model what it is made of and how each axis can split it; nothing is allocated.

    Args:
        config: what to look at; the arguments that follow go before its fields of the same names.
        model: a type such as ``"llama"``, a directory or ``module:function``; or a config with its sizes.
        layout: layouts whose bytes of state are priced.
        explain: a layer such as ``"model.layers.0"``, or a module, whose decisions are explained with their evidence.

    Raises:
        ConfigError: for a model that can't be built, or a layer to explain that it hasn't.
        PlanError: for a layout that can't be, or that the model doesn't allow.
    """
    config = with_fields(config or InspectConfig(), model=model, layout=layout, explain=explain)
    layouts = [Layout.parse(text) for text in config.layout]
    built = build_meta(config.model)
    # A training run reads the table and the layer graph with the model's own loss in its output.
    trial = _attempt(lambda: try_forward(built))
    objective = None if isinstance(trial, MeshwrightError) else trial.objective
    degree = next((split for layout in layouts if (split := layout.degree(Mechanics.MATRICES)) > 1), 2)
    sharding_analysis = _attempt(lambda: analyse_sharding(built, degree, objective))
    if config.model.sharding and not isinstance(sharding_analysis, MeshwrightError):
        table = overridden_table(built, sharding_analysis.table)
        sharding_analysis = dataclasses.replace(sharding_analysis, table=table)
    graph_analysis = _attempt(lambda: analyse_layer_graph(built, objective))
    analysis = ModelAnalysis(
        table=None if isinstance(sharding_analysis, MeshwrightError) else sharding_analysis.table,
        layer_graph=None if isinstance(graph_analysis, MeshwrightError) else graph_analysis.layer_graph,
        trial=None if isinstance(trial, MeshwrightError) else trial,
    )
    explanations: tuple[LayerExplanation, ...] = ()
    if config.explain:
        if isinstance(trial, MeshwrightError):
            raise trial
        if isinstance(sharding_analysis, MeshwrightError):
            raise sharding_analysis
        explanations = (
            explain_layer(built, config.explain, sharding_analysis, graph_analysis, trial, layouts, degree),
        )
    return InspectResult(
        model=config.model.name,
        shape=measure_shape(built).to_json(),
        structure=_describe_structure(built),
        experts=tuple(_describe_experts(built)),
        sharding=_describe_sharding(sharding_analysis),
        pipeline=_describe_pipeline(graph_analysis),
        layouts=tuple(_price_layout(built, layout, analysis, degree) for layout in layouts),
        stacks=tuple(_read_stacks(config, layout) for layout in layouts) if config.stack else (),
        explanations=explanations,
    )


def _attempt(analyse: Callable[[], _Analysis]) -> _Analysis | MeshwrightError:
    """Returns an analysis, or the refusal that says why the model has none."""
    try:
        return analyse()
    except MeshwrightError as error:
        return error


def _read_stacks(config: InspectConfig, layout: Layout) -> JsonObject:
    """Returns the hooks and wrappers of the named module and its submodules under a layout, on a model of its own."""
    name = "" if config.stack == "." else config.stack
    stacks = module_stacks(build_meta(config.model), layout, name, config.rank)
    return {"layout": str(layout), "rank": config.rank, "modules": [stack.to_json() for stack in stacks]}


def _describe_experts(built: BuiltModel) -> Iterator[JsonObject]:
    """Yields the modules of experts with their number and weights."""
    for rows in find_experts(built.module):
        yield {"module": rows.module, "experts": rows.experts, "parameters": list(rows.parameters)}


def _describe_structure(built: BuiltModel) -> JsonObject:
    """Returns the modules' names by role, and the layers grouped by kind."""
    structure = built.structure
    kinds: dict[Any, dict[str, Any]] = {}
    for name in structure.layers:
        layer = built.module.get_submodule(name)
        # Layers are of one kind when class, parameter names and shapes agree.
        key = type(layer), tuple((role, tuple(item.shape)) for role, item in layer.named_parameters())
        count = sum(item.numel() for item in layer.parameters())
        kinds.setdefault(key, {"type": type(layer).__name__, "parameters": count, "layers": []})["layers"].append(name)
    roles = ("embedding", "position_embedding", "final_norm", "head", "vocab", "width", "positions", "context")
    return {role: getattr(structure, role) for role in roles} | {
        "ties": [list(names) for names in structure.ties],
        "layers": list(kinds.values()),
    }


def _describe_sharding(analysis: ShardingAnalysis | MeshwrightError) -> JsonObject:
    """Returns the rows of the sharding table by kind of layer, as plain values."""
    if isinstance(analysis, MeshwrightError):
        return {"refused": str(analysis)}
    table = analysis.table
    # Layers are of one kind when their rows of the table are equal.
    kinds: dict[str, dict[str, Any]] = {}
    for name, rows in table.layers.items():
        layer_sharding = _layer_rows_json(rows)
        kinds.setdefault(json.dumps(layer_sharding), {**layer_sharding, "layers": []})["layers"].append(name)
    return {
        "vocabulary": list(table.vocabulary),
        "whole": dict(table.refused),
        "kinds": list(kinds.values()),
    }


def _layer_rows_json(rows: LayerSharding) -> JsonObject:
    groups = [
        {
            "module": group.module,
            "column_linears": list(group.column_linears),
            "replicated_inputs": list(group.replicated_inputs),
            "row_linear": group.row_linear,
            "units": group.units,
            "heads": group.heads,
            "shared": list(group.shared),
        }
        for group in rows.groups
    ]
    return {
        "groups": groups,
        "whole": dict(rows.refused),
        "sequence": rows.sequence,
        "sequence_refused": rows.sequence_refused,
    }


def _describe_pipeline(analysis: LayerGraphAnalysis | MeshwrightError) -> JsonObject:
    """Returns the possible cuts of the layer graph as plain values."""
    if isinstance(analysis, MeshwrightError):
        return {"refused": str(analysis)}
    layer_graph = analysis.layer_graph
    return {
        "layers": len(layer_graph.layers),
        "stages": len(layer_graph.layers) - sum(0 < index < len(layer_graph.layers) for index in layer_graph.blocked),
        "payload": sorted({len(tensors) for tensors in layer_graph.boundary_tensors[1:]}),
        "blocked": {str(layer_index): reason for layer_index, reason in layer_graph.blocked.items()},
    }


def _price_layout(built: BuiltModel, layout: Layout, known_analysis: ModelAnalysis, degree: int) -> JsonObject:
    """Returns a layout's bytes of state for each position of the mesh.

    Args:
        built: the model, on meta.
        layout: to be priced.
        known_analysis: of the model.
        degree: number of ranks for which ``known_analysis`` has the sharding table.
    """
    check(layout, "cuda", len(built.structure.layers))
    if layout.degree(Mechanics.MATRICES) * layout.degree(Mechanics.TOKENS) not in (1, degree):
        known_analysis = dataclasses.replace(known_analysis, table=None)
    analysis = analyse_model(built, layout, known_analysis)
    expert.check(analysis.experts, layout.degree(Mechanics.EXPERTS))
    model_weights = model_parts(built, analysis)
    positions = position_memory(layout, model_weights)
    fullest = max(positions, key=lambda position: position.total_bytes)
    return {
        "layout": str(layout),
        "ranks": layout.world,
        "parameters": model_weights.total,
        "positions": [_position_json(position) for position in positions],
        "fullest": _position_json(fullest),
        "formula": dict(fullest.formula),
        "zero_paper_bytes": paper_memory(layout, fullest.weights.elements),
    }


def _position_json(position: Position) -> JsonObject:
    return {"place": dict(position.place), "memory": dict(position.memory), "total": position.total_bytes}
