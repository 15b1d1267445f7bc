"""Explains one layer of a model: for each weight how axes split it and why, its stage's cuts, what is recomputed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.errors import ConfigError, MeshwrightError, nearest_path
from meshwright.json_types import JsonObject
from meshwright.models.analysis.evidence import TensorUse
from meshwright.models.analysis.experts import find_experts
from meshwright.models.analysis.explain import WeightExplanation, explain_vocabulary, explain_weights
from meshwright.models.analysis.layer_graph import LayerGraphAnalysis
from meshwright.models.analysis.objective_trial import ForwardTrial
from meshwright.models.analysis.table import ShardingAnalysis
from meshwright.models.build import BuiltModel
from meshwright.models.random_draws import drawing_parts
from meshwright.spec.layer_graph import Path, divide
from meshwright.spec.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerExplanation:
    """The decisions on one layer, or on a module outside of the layers, with the evidence for each."""

    module: str
    """Its name in the model."""
    type: str
    """Its class."""
    alike: tuple[str, ...]
    """Layers that share its evidence, itself included; none for a module outside of the layers."""
    read_off: str
    """What the evidence was read off, in words."""
    degree: int
    """Degree of ``tp`` of the local shapes."""
    weights: tuple[WeightExplanation, ...]
    """In the order of the module."""
    sequence: str
    """Whether tokens can be split between its groups, and the trial that says so; "" outside of the layers."""
    pipeline: tuple[JsonObject, ...]
    """The cuts in front of it and behind it: ``where``, ``possible``, ``reason``, ``tensors`` and ``evidence``."""
    stages: tuple[JsonObject, ...]
    """For each layout with stages ``layout``, ``stage`` and ``recomputes``."""
    recompute: tuple[str, ...]
    """What is computed again in backward, and what that needs."""

    def to_json(self) -> dict[str, object]:
        """Returns plain values under the names of the fields."""
        return dataclasses.asdict(self)


def explain_layer(
    built: BuiltModel,
    name: str,
    sharding: ShardingAnalysis,
    layer_graph: LayerGraphAnalysis | MeshwrightError,
    trial: ForwardTrial,
    layouts: Sequence[Layout],
    degree: int = 2,
) -> LayerExplanation:
    """Explains a layer, or a module inside or outside of one, by the evidence of the analysis.

    Args:
        built: the model on meta.
        name: a layer such as ``model.layers.0``, a module in it, or one outside such as ``lm_head``.
        sharding: the model's table, as the runtime applies it, with its evidence.
        layer_graph: the model's, or the refusal of every cut.
        trial: the model's forward in training.
        layouts: whose stages and recompute are named.
        degree: of ``tp``.

    Raises:
        ConfigError: the model has no such module with weights; names the nearest.
    """
    layers = built.structure.layers
    shapes = {key: tuple(item.shape) for key, item in built.module.named_parameters(remove_duplicate=False)}
    below = {key: shape for key, shape in shapes.items() if key.startswith(f"{name}.")}
    layer = next((item for item in layers if f"{name}.".startswith(f"{item}.")), "")
    if not name or not below or (not layer and any(item.startswith(f"{name}.") for item in layers)):
        raise ConfigError(f"explain: {_unknown_layer(built, name)}")
    evidence, table = sharding.evidence, sharding.table
    if layer:
        weights = explain_weights(below, layer, table, evidence, find_experts(built.module), degree)
        alike = tuple(item for item in layers if evidence.layers[item] is evidence.layers[layer])
    else:
        weights, alike = explain_vocabulary(below, name, table, evidence, degree), ()
    source = "the model itself, its weights random" if evidence.full_size else "a narrower clone"
    return LayerExplanation(
        module=name,
        type=type(built.module.get_submodule(name)).__name__,
        alike=alike,
        read_off=f"{source}, in float64 ({evidence.parameters} parameters)",
        degree=degree,
        weights=tuple(weights),
        sequence=_sequence_text(sharding, layer) if layer else "",
        pipeline=tuple(_describe_cuts(layer_graph, layer)) if layer else (),
        stages=tuple(_describe_layouts(built, layer_graph, layer, layouts)) if layer else (),
        recompute=tuple(_recompute_facts(built, layer, layer_graph, trial)) if layer else (),
    )


def _unknown_layer(built: BuiltModel, name: str) -> str:
    """Words the refusal of an unknown layer, with the nearest names."""
    layers = built.structure.layers
    outside = [
        path
        for path, module in built.module.named_modules()
        if any(True for _ in module.parameters(recurse=False))
        and not any(f"{path}.".startswith(f"{layer}.") for layer in layers)
    ]
    inside = [path for path, _ in built.module.named_modules() if any(path.startswith(f"{item}.") for item in layers)]
    # a layer's own name is likelier than a module's inside of one
    hint = nearest_path(name, [*layers, *outside]) or nearest_path(name, [*layers, *outside, *inside])
    span = f"; its layers are {layers[0]} to {layers[-1]}" if layers else ""
    others = (
        f"; {'outside of them it has' if layers else 'it has'} {', '.join(outside)}" if outside and not hint else ""
    )
    return f"the model has no layer with weights '{name}'{hint}{span}{others}"


def _sequence_text(sharding: ShardingAnalysis, layer: str) -> str:
    """Returns the trial of a split of tokens between the groups of a layer."""
    trial = sharding.evidence.layers[layer].sequence
    if trial is None:
        return "not tried: the layer takes or gives no hidden state"
    if trial.failure:
        return f"refused: with tokens split over {trial.degree} threads between the groups, {trial.failure}"
    return (
        f"works: with tokens split over {trial.degree} threads between the groups, the layer gives the unsplit output "
        f"and every gradient, off by at most {trial.error:.0e}"
    )


def _describe_cuts(layer_graph: LayerGraphAnalysis | MeshwrightError, layer: str) -> Iterator[JsonObject]:
    """Yields the boundaries in front of a layer and behind it."""
    if isinstance(layer_graph, MeshwrightError):
        yield {"where": "anywhere", "possible": False, "reason": str(layer_graph), "tensors": [], "evidence": []}
        return
    graph, evidence = layer_graph.layer_graph, layer_graph.evidence
    if layer not in graph.layers:
        yield {"where": "anywhere", "possible": False, "reason": "it isn't called", "tensors": [], "evidence": []}
        return
    index = graph.layers.index(layer)
    for boundary, where in ((index, "in front"), (index + 1, "behind")):
        reason, is_behind_all = graph.blocked.get(boundary, ""), boundary == len(graph.layers)
        crossing = graph.boundary_tensors[boundary]
        uses = [] if is_behind_all else evidence.inputs[boundary]
        tried = boundary in evidence.trial.bounds[1:-1] and not reason
        results = [f"result {number} of {layer}" for (number,) in crossing] if is_behind_all else []
        yield {
            "where": where,
            "possible": not reason,
            "reason": reason,
            "tensors": [*results, *(_tensor_text(use, graph.layers) for use in uses if use.path in crossing)],
            "evidence": [
                *(f"also reads {_tensor_text(use, graph.layers)}" for use in uses if use.path not in crossing),
                *([_trial_text(layer_graph)] if tried else []),
            ],
        }


def _tensor_text(use: TensorUse, layers: Sequence[str]) -> str:
    """Returns one tensor among a layer's arguments with its sources."""
    sources = [*(layers[index] for index in use.layers), *use.weights]
    made = f", made from {', '.join(sources)}" if sources else ""
    if use.path[0] == "side":
        return f"past its arguments, what was{made.removeprefix(',')}"
    return f"{_argument_name(use.path)} {use.shape}{made}"


def _argument_name(path: Path) -> str:
    """Returns a path into ``(args, kwargs)`` as Python writes it; the model's output for its end."""
    if path[0] == "tail":
        return "the model's output"
    return ("kwargs" if path[0] else "args") + "".join(f"[{key!r}]" for key in path[1:])


def _trial_text(layer_graph: LayerGraphAnalysis) -> str:
    """Returns the trial of stages in words."""
    trial = layer_graph.evidence.trial
    halves = f"backward can't come in halves: {trial.whole_backward}" if trial.whole_backward else "also in halves"
    return (
        f"trial: cut in front of layers {', '.join(map(str, trial.bounds[1:-1]))}, stages give the uncut model's "
        f"output and every gradient, off by at most {trial.error:.0e}, {halves}"
    )


def _describe_layouts(
    built: BuiltModel, layer_graph: LayerGraphAnalysis | MeshwrightError, layer: str, layouts: Sequence[Layout]
) -> Iterator[JsonObject]:
    """Yields for each layout the layer's stage, and whether it recomputes there."""
    index = built.structure.layers.index(layer)
    sizes = {name: item.numel() for name, item in built.module.named_parameters(remove_duplicate=False)}
    for layout in layouts:
        stages, stage = layout.pipeline().stages, 0
        if stages > 1 and not isinstance(layer_graph, MeshwrightError):
            bounds = divide(layer_graph.layer_graph, sizes, built.structure.ties, stages, layout.split)
            position = layer_graph.layer_graph.layers.index(layer)
            stage = sum(bound <= position for bound in bounds[1:-1])
        recomputes = layout.recompute.modes(len(built.structure.layers))[index]
        yield {"layout": str(layout), "stages": stages, "stage": stage, "recomputes": recomputes}


def _recompute_facts(
    built: BuiltModel, layer: str, layer_graph: LayerGraphAnalysis | MeshwrightError, trial: ForwardTrial
) -> Iterator[str]:
    """Yields what recompute runs again in a layer, and the state that the second run needs."""
    inputs = "its arguments"
    if isinstance(layer_graph, LayerGraphAnalysis) and layer in layer_graph.layer_graph.layers:
        index = layer_graph.layer_graph.layers.index(layer)
        uses = [_argument_name(use.path) for use in layer_graph.evidence.inputs[index] if use.path[0] != "side"]
        inputs = f"its arguments ({', '.join(uses)} with a gradient)" if uses else inputs
    yield f"structure: the layer is one unit; recompute=full keeps {inputs} and runs its forward again in backward"
    drawing = [name for name in drawing_parts(built) if f"{name}.".startswith(f"{layer}.")]
    if drawing:
        yield f"attribute: {', '.join(drawing)} may draw random numbers; the second run draws the same again"
    else:
        yield "attribute: none of its modules has a probability of dropout above zero"
    moving = [item.name for item in trial.moving if item.name.startswith(f"{layer}.")]
    if moving:
        yield f"trial: forward changes {', '.join(moving)}; the second run starts from the first one's and moves none"
    elif any(True for _ in built.module.get_submodule(layer).buffers()):
        yield "trial: a forward in training left its buffers as they were"
