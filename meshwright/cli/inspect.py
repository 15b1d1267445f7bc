"""``meshwright inspect``: what a model is made of, how each axis can split it, and what a layout's ranks would hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meshwright.cli.arguments import answer, read_config, say, take_flag
from meshwright.cli.inputs import model_parts
from meshwright.cli.inspect_output import told
from meshwright.config import Config
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.models.config import ModelConfig
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout

if TYPE_CHECKING:
    from meshwright.models.build import BuiltModel
    from meshwright.planner.memory import Position
    from meshwright.spec.sharding_table import LayerRows, ShardingTable
    from meshwright.train.model_analysis import ModelAnalysis


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectConfig(Config):
    """What to look at: a model, and layouts to price."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model; its name may stand first, without a flag."""
    layout: tuple[str, ...] = ()
    """Layouts by text form, whose bytes of state are told; several may follow one ``--layout``."""


def run(argv: Sequence[str]) -> int:
    """Prints what there is to know of a model, for people or as JSON; exit status 0."""
    words = list(argv)
    as_json = take_flag(words, "--json")
    if words and not words[0].startswith("-"):
        words[:1] = ["--model", words[0]]
    named = {word.partition("=")[0] for word in words} & {"--model", "--model.name", "-h", "--help"}
    if not named:
        raise ConfigError("meshwright inspect needs a model: a type such as gpt2, a directory, or module:function")
    found = inspect(read_config(InspectConfig, words, "inspect"))
    if as_json:
        answer(json.dumps(found, indent=2))
    else:
        say("\n".join(told(found)))
    return 0


def inspect(config: InspectConfig) -> dict[str, Any]:
    """Returns what there is to know of a model, as plain values.

    Raises:
        ConfigError: for a model that can't be built.
        PlanError: for a layout that can't be, or that the model doesn't allow.
    """
    from meshwright.models.build import build_meta
    from meshwright.models.experts import find_experts
    from meshwright.models.measure import measure_shape
    from meshwright.train.model_analysis import ModelAnalysis

    layouts = [Layout.parse(text) for text in config.layout]
    built = build_meta(config.model)
    table, pipeline = _sharding(built), _pipeline(built)
    experts = [
        {"module": rows.module, "experts": rows.experts, "parameters": list(rows.parameters)}
        for rows in find_experts(built.module)
    ]
    facts = ModelAnalysis(table=table[0], layer_graph=pipeline[0])
    return {
        "model": config.model.name,
        "shape": measure_shape(built).to_json(),
        "structure": _structure(built),
        "experts": experts,
        "sharding": table[1],
        "pipeline": pipeline[1],
        "layouts": [_priced(built, layout, facts) for layout in layouts],
    }


def _structure(built: BuiltModel) -> dict[str, Any]:
    """Names of the parts, and the layers by kind."""
    structure = built.structure
    kinds: dict[Any, dict[str, Any]] = {}
    for name in structure.layers:
        layer = built.module.get_submodule(name)
        key = type(layer), tuple((part, tuple(item.shape)) for part, item in layer.named_parameters())
        count = sum(item.numel() for item in layer.parameters())
        kinds.setdefault(key, {"type": type(layer).__name__, "parameters": count, "layers": []})["layers"].append(name)
    parts = ("embedding", "position_embedding", "final_norm", "head", "vocab", "width", "positions", "context")
    return {part: getattr(structure, part) for part in parts} | {
        "ties": [list(names) for names in structure.ties],
        "layers": list(kinds.values()),
    }


def _sharding(built: BuiltModel) -> tuple[ShardingTable | None, dict[str, Any]]:
    """The sharding table, and what it says by kind of layer."""
    from meshwright.models.table import sharding_table

    try:
        table = sharding_table(built)
    except MeshwrightError as error:
        return None, {"refused": str(error)}
    kinds: dict[str, dict[str, Any]] = {}
    for name, rows in table.layers.items():
        found = _rows(rows)
        kinds.setdefault(json.dumps(found), found | {"layers": []})["layers"].append(name)
    return table, {
        "vocabulary": list(table.vocabulary),
        "whole": dict(table.refused),
        "kinds": list(kinds.values()),
    }


def _rows(rows: LayerRows) -> dict[str, Any]:
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


def _pipeline(built: BuiltModel) -> tuple[Any, dict[str, Any]]:
    """The layer graph, and where it can be cut."""
    from meshwright.models.layer_graph import read_layer_graph

    try:
        layer_graph = read_layer_graph(built)
    except MeshwrightError as error:
        return None, {"refused": str(error)}
    return layer_graph, {
        "layers": len(layer_graph.layers),
        "stages": len(layer_graph.layers) - len(layer_graph.blocked),
        "payload": sorted({len(taken) for taken in layer_graph.boundary_tensors[1:]}),
        "blocked": {str(at): why for at, why in layer_graph.blocked.items()},
    }


def _priced(built: BuiltModel, layout: Layout, known: ModelAnalysis) -> dict[str, Any]:
    """Bytes of state by place of a layout."""
    from meshwright.parallel import expert
    from meshwright.parallel.build import check
    from meshwright.planner.memory import paper_memory, position_memory
    from meshwright.train.model_analysis import analyse_model

    check(layout, "cuda", len(built.structure.layers))
    facts = analyse_model(built, layout, known)
    expert.check(facts.experts, layout.degree(Mechanics.EXPERTS))
    parts = model_parts(built, facts)
    positions = position_memory(layout, parts)
    fullest = max(positions, key=lambda position: position.total_bytes)
    return {
        "layout": str(layout),
        "ranks": layout.world,
        "parameters": parts.total,
        "positions": [_place(position) for position in positions],
        "fullest": _place(fullest),
        "formula": dict(fullest.formula),
        "zero_paper_bytes": paper_memory(layout, fullest.held.elements),
    }


def _place(position: Position) -> dict[str, Any]:
    return {"place": dict(position.place), "memory": dict(position.memory), "total": position.total_bytes}
