"""The layer graph of a model: its layers in the order of their calls, and what enters each. Stages are cut along it.

A model of L layers can be cut in front of its first layer, between two layers, and behind its last one. The first stage
has what comes before the layers, the embedding, and the last stage what follows them, the head: either may have no
layer beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from meshwright.errors import PlanError
from meshwright.spec.balanced_cuts import Cuts
from meshwright.spec.layout_choices import StageSplit

Path = tuple[Any, ...]
"""Keys that lead from ``(args, kwargs)`` of a call to one of its tensors: ``(0, 0)``, ``(1, "hidden_states")``."""
END_STAGES = 2
"""Stages without a layer that a pipeline may have: the first, with the embedding, and the last, with the head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerOutput:
    """What a layer gives back: its tensors, and how they are nested."""

    nest: Any
    """A pytree's structure."""
    leaves: tuple[Path | None, ...]
    """For each leaf, where the next layer takes it in; None for what isn't taken in."""
    tensors: tuple[bool, ...]
    """For each leaf, whether it is a tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGraph:
    """How a model's forward goes through its layers, as a probe saw it; L layers have L + 1 places to cut."""

    layers: tuple[str, ...]
    """Names of the layers, in the order of their calls; each is called once."""
    input_weights: tuple[frozenset[str], ...]
    """For each layer, weights outside of the layers that reach it other than through the tensors of a cut."""
    output_weights: tuple[frozenset[str], ...]
    """For each layer, weights outside of the layers that the tensors of a cut in front of it pass since the layer
    before, for the first one since the tokens; at last the head's and all others behind the last layer. L + 1 of them.
    """
    boundary_tensors: tuple[tuple[Path, ...], ...]
    """For each layer, its arguments that cross a cut in front of it: all that are made of the layer before, and for the
    first layer of weights. At last, of the last layer's results in order, those that the output is made of. L + 1."""
    returns: tuple[LayerOutput, ...]
    """For each layer, what it gives back."""
    blocked: Mapping[int, str] = field(default_factory=dict)
    """Layers in front of which no cut can be, with the reason; L stands for behind the last one."""
    writes: bool = False
    """Whether some layer writes into the tensors that it takes in."""
    whole_backward: str = ""
    """Why a stage's backward can't come in two halves, inputs first and weights later: a schedule that asks for halves
    then computes all of it in the first; "" where it can."""


def weights_by_stage(
    layer_graph: LayerGraph, names: Sequence[str], bounds: Sequence[int], ties: Sequence[Sequence[str]] = ()
) -> list[frozenset[str]]:
    """Returns, for each stage, the names of the weights that it holds; every name is in some stage.

    Args:
        layer_graph: of the model.
        names: all names, a tied weight under each of its names.
        bounds: first layer of each stage, and the number of layers: ``(0, 5, 12)`` are two stages.
        ties: names of one weight.
    """
    owner, count = _layer_of_weight(layer_graph, names), len(layer_graph.layers)
    stages = []
    for number, (start, stop) in enumerate(pairwise(bounds)):
        # Weights outside of the layers that the stage's own forward passes: before, between and behind its layers.
        outer_weights = frozenset().union(
            *layer_graph.input_weights[start:stop], *layer_graph.output_weights[start + 1 : min(stop + 1, count)]
        )
        # The first stage has the embedding and the last one the head, whether or not they have layers.
        outer_weights |= layer_graph.output_weights[0] if number == 0 else frozenset()
        outer_weights |= layer_graph.output_weights[count] if number == len(bounds) - 2 else frozenset()
        stages.append({name for name in names if (start <= owner[name] < stop) or name in outer_weights})
    covered = set().union(*stages)
    for name in (name for name in names if name not in covered):
        # No gradient reaches it, but its value may matter, to any stage; unless it is another name of one that is held.
        tied_names = {tied_name for tie in ties if name in tie for tied_name in tie if tied_name != name}
        for stage in [stage for stage in stages if stage & tied_names] or stages:
            stage.add(name)
    return [frozenset(stage) for stage in stages]


def divide(
    layer_graph: LayerGraph, sizes: Mapping[str, int], ties: Sequence[Sequence[str]], stages: int, split: StageSplit
) -> tuple[int, ...]:
    """Returns the bounds of the stages, every layer in exactly one: its first layer, and at last the number of layers.

    A layer costs its weights, each once, and so does what comes after the last one, which may be a stage alone. With
    more stages than layers each layer is a stage, the head is the last one, and with one more the embedding the first.

    Args:
        layer_graph: of the model.
        sizes: elements of each weight, a tied one under each of its names.
        ties: names of one weight.
        stages: how many.
        split: layers of each stage; without any, bounds make the dearest stage as cheap as can be.

    Raises:
        PlanError: the split doesn't fit, or the model can't be cut there.
    """
    count = len(layer_graph.layers)
    check_split(split, stages, count)
    if split or stages > count:
        bounds = split.bounds if split else bounds_of_single_layers(count, stages)
        for bound in bounds[1:-1]:
            if bound in layer_graph.blocked:
                place = f"in front of layer {bound}" if bound < count else "behind the last layer"
                stages_text = f"split={split}" if split else f"{stages} stages of {count} layers"
                raise PlanError(f"{stages_text}: the model can't be cut {place}: {layer_graph.blocked[bound]}")
        return bounds
    head = sum(sizes[name] for name in layer_graph.output_weights[-1])
    cuts, possible = Cuts([[_costs(layer_graph, sizes, ties)]], [[head]], blocked=layer_graph.blocked).bounds(stages)
    if not possible[0]:
        bound, reason = next((bound, reason) for bound, reason in layer_graph.blocked.items() if 0 < bound < count)
        most = 1 + sum(bound not in layer_graph.blocked for bound in range(1, count + 1))
        raise PlanError(
            f"the model can't be cut into {stages} stages: in front of layer {bound}, {reason}; nearest that works: "
            f"{most} stages at most"
        )
    return tuple(int(bound) for bound in cuts[0])


def _costs(layer_graph: LayerGraph, sizes: Mapping[str, int], ties: Sequence[Sequence[str]]) -> list[int]:
    """Weights of each layer, in the order of the layer graph."""
    first_tied_name = {name: names[0] for names in ties for name in names}
    costs: list[dict[str, int]] = [{} for _ in layer_graph.layers]
    layer_of_weight = _layer_of_weight(layer_graph, sizes)
    for name, size in sizes.items():
        if layer_of_weight[name] >= 0:
            # By the first of its names, so that a tied weight counts once in a layer.
            costs[layer_of_weight[name]][first_tied_name.get(name, name)] = size
    return [sum(layer.values()) for layer in costs]


def _layer_of_weight(layer_graph: LayerGraph, names: Iterable[str]) -> dict[str, int]:
    """Returns for each weight the number of its layer; -1 outside of the layers."""
    layer_numbers = {layer: number for number, layer in enumerate(layer_graph.layers)}
    owners = {}
    for name in names:
        path = name
        while path and path not in layer_numbers:
            path = path.rpartition(".")[0]
        owners[name] = layer_numbers.get(path, -1)
    return owners


def check_split(split: StageSplit, stages: int, layers: int) -> None:
    """Refuses stages that the number of layers doesn't allow.

    Raises:
        PlanError: names the numbers and the nearest that works.
    """
    if stages > layers + END_STAGES or (stages > 1 and layers == 1):
        most = layers + END_STAGES
        cure = f"take {most} stages or fewer" if layers > 1 else "nearest that works: tp, cp or shard in place of pp"
        but_ends, shared = (", but for the first and the last,", "")
        if layers == 1:
            but_ends, shared = ",", ", of which all calls share the weights"
        raise PlanError(f"{stages} stages need a layer each{but_ends} and the model has {layers}{shared}; {cure}")
    if not split:
        return
    sizes = split.layers
    even = StageSplit(tuple(stop - start for start, stop in pairwise(even_bounds(layers, stages))))
    if len(sizes) != stages:
        raise PlanError(f"split={split} has {len(sizes)} stages, the schedule {stages}; for one, split={even}")
    if sum(sizes) != layers:
        raise PlanError(f"split={split} has {sum(sizes)} layers, the model {layers}; for one, split={even}")


def even_bounds(layers: int, stages: int) -> tuple[int, ...]:
    """Returns the bounds of stages of as many layers as can be, the first ones with one more."""
    if stages > layers:
        return bounds_of_single_layers(layers, stages)
    return tuple(stage * (layers // stages) + min(stage, layers % stages) for stage in range(stages + 1))


def bounds_of_single_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Returns the bounds of more stages than layers: the last one has the head alone, the first one maybe no layer.

    Args:
        layers: of the model.
        stages: one or two more (`END_STAGES`).
    """
    without_first = stages - layers - 1
    return (*[0] * without_first, *range(layers + 1), layers)
