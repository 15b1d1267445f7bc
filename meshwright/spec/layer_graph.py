"""The layer graph of a model: its layers in the order of their calls, and what enters each. Stages are cut along it."""

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
    """How a model's forward goes through its layers, as a probe saw it; L layers have L - 1 places to cut."""

    layers: tuple[str, ...]
    """Names of the layers, in the order of their calls; each is called once."""
    input_weights: tuple[frozenset[str], ...]
    """For each layer, weights outside of the layers that reach it other than through the layer before it."""
    output_weights: tuple[frozenset[str], ...]
    """For each layer, weights outside of the layers that what it takes from the layer before passes; at last the head's
    and all others between the last layer and the output. L + 1 of them."""
    boundary_tensors: tuple[tuple[Path, ...], ...]
    """For each layer, the tensors that it takes from the layer before: what crosses a cut in front of it."""
    returns: tuple[LayerOutput, ...]
    """For each layer, what it gives back."""
    blocked: Mapping[int, str] = field(default_factory=dict)
    """Layers in front of which no cut can be, with the reason."""
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
    owner = _layer_of_weight(layer_graph, names)
    stages = []
    for start, stop in pairwise(bounds):
        # Weights outside of the layers that the stage's own forward passes: before, between and behind its layers.
        outer_weights = frozenset().union(
            *layer_graph.input_weights[start:stop], *layer_graph.output_weights[start + 1 : stop + 1]
        )
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

    A layer costs its weights, each once; what comes after the last layer is added to that one.

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
    if split:
        for bound in split.bounds[1:-1]:
            if bound in layer_graph.blocked:
                raise PlanError(f"split={split} cuts in front of layer {bound}, but {layer_graph.blocked[bound]}")
        return split.bounds
    costs = _costs(layer_graph, sizes, ties)
    # The head runs with the last layer, on the last stage.
    costs[-1] += sum(sizes[name] for name in layer_graph.output_weights[-1])
    bounds, possible = Cuts([[costs]], blocked=layer_graph.blocked).bounds(stages)
    if not possible[0]:
        bound, reason = next(iter(layer_graph.blocked.items()))
        raise PlanError(
            f"the model can't be cut into {stages} stages: in front of layer {bound}, {reason}; nearest that works: "
            f"{count - len(layer_graph.blocked)} stages at most"
        )
    return tuple(int(bound) for bound in bounds[0])


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
    if stages > layers:
        cure = f"take {layers} stages or fewer" if layers > 1 else "nearest that works: tp, cp or shard in place of pp"
        shared = ", of which all calls share the weights" if layers == 1 else ""
        raise PlanError(f"{stages} stages need a layer each, but the model has {layers}{shared}; {cure}")
    if not split:
        return
    sizes = split.layers
    even = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    cure = f"split={'-'.join(map(str, even))}"
    if len(sizes) != stages:
        raise PlanError(f"split={split} has {len(sizes)} stages, the schedule {stages}; for one, {cure}")
    if sum(sizes) != layers or min(sizes) < 1:
        raise PlanError(f"split={split} has {sum(sizes)} layers, the model {layers}; for one, {cure}")
