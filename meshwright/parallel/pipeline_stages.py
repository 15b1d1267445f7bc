"""Divides a model into pipeline stages: the schedule, the stages' bounds, and the weights that several stages hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from meshwright.errors import PlanError
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.model_source import ModelSource
from meshwright.parallel.stage import Stage, copy_module
from meshwright.parallel.stage_module import StageModule
from meshwright.schedules.action import Schedule
from meshwright.spec.axis import Mechanics
from meshwright.spec.layer_graph import LayerGraph, check_split, divide, weights_by_stage
from meshwright.spec.layout import Layout
from meshwright.spec.placement import LocalShard


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """How the model is divided; the same on every rank."""

    schedule: Schedule
    """What runs when, and which rank runs which stage."""
    bounds: tuple[int, ...]
    """First layer of each stage, and the number of layers."""
    weights_by_stage: tuple[frozenset[str], ...]
    """Names of each stage's weights, a tied one under each of its names there."""
    holders: dict[str, tuple[int, ...]]
    """Indices along ``pp`` that hold a weight, by the first of its names."""
    primary_names: dict[str, str]
    """Name of a weight to the first of its names."""


@dataclass(slots=True)
class PipelineStageModule(StageModule):
    """A stage of a pipeline, with the cut that makes it one."""

    cut: Stage | None = None
    """The stage itself, of the same module and layers."""
    division: Division | None = None
    """How the model is divided, the same for all stages."""


def check(layout: Layout, layers: int) -> None:
    """Refuses a pipeline that can't be, before a rank starts.

    Args:
        layout: with or without ``pp``.
        layers: that the model repeats.

    Raises:
        PlanError: with the rule and the nearest layout that works.
    """
    if layout.degree(Mechanics.STAGES) == 1:
        return
    schedule = layout.pipeline()
    check_split(layout.split, schedule.stages, layers)
    if layout.compile and schedule.splits_backward:
        raise PlanError(
            f"schedule={schedule.name} runs a backward in two halves, which torch.compile can't; write compile=false, "
            "or schedule=1f1b or interleaved"
        )


def build_stages(source: ModelSource, layout: Layout, mesh: Mesh) -> list[StageModule]:
    """Cuts the model into this rank's stages.

    Args:
        source: the model; its module becomes one of the stages.
        layout: with ``pp`` above 1.
        mesh: ranks.

    Raises:
        PlanError: the model can't be cut so.
    """
    if source.layer_graph is None:
        raise PlanError(
            "pp needs the model's layer graph, and the source has none; models.layer_graph.read_layer_graph reads it"
        )
    division = _divide_model(source.module, source.layer_graph, source.ties, layout)
    numbers = division.schedule.rank_stages(mesh.group_with(Mechanics.STAGES).index)
    copies = mesh.island.size // layout.degree(Mechanics.STAGES)
    # A rank with several stages needs a module for each; the source's own serves as the last.
    modules = [*(copy_module(source.module) for _ in numbers[1:]), source.module]
    stages: list[StageModule] = []
    for number, module in zip(numbers, modules):
        cut = Stage(module, source.layer_graph, division.bounds, number, division.weights_by_stage[number])
        stages.append(
            PipelineStageModule(
                module,
                cut.layers,
                _tied_shards(module, division, copies),
                stage_index=number,
                first_layer=cut.first,
                is_first=cut.is_first,
                is_last=cut.is_last,
                cut=cut,
                division=division,
            )
        )
    return stages


def _divide_model(
    module: nn.Module, layer_graph: LayerGraph, ties: Sequence[Sequence[str]], layout: Layout
) -> Division:
    """Divides the full model, which is on the meta device."""
    # A model whose backward can't come in halves runs each backward whole.
    schedule = layout.pipeline().unsplit() if layer_graph.whole_backward else layout.pipeline()
    sizes = {name: item.numel() for name, item in module.named_parameters(remove_duplicate=False)}
    bounds = divide(layer_graph, sizes, ties, schedule.stages, layout.split)
    names_of_stage = weights_by_stage(layer_graph, list(sizes), bounds, ties)
    primary_names = {name: name for name in sizes} | {name: names[0] for names in ties for name in names}
    holders: dict[str, set[int]] = {}
    for stage, names in enumerate(names_of_stage):
        for name in names:
            holders.setdefault(primary_names[name], set()).add(schedule.stage_rank(stage))
    return Division(
        schedule=schedule,
        bounds=bounds,
        weights_by_stage=tuple(names_of_stage),
        holders={name: tuple(sorted(indices)) for name, indices in holders.items()},
        primary_names=primary_names,
    )


def _tied_shards(module: nn.Module, division: Division, copies: int) -> dict[str, LocalShard]:
    """Returns the shards of tied weights that go by another name, or that other stages hold too."""
    shards = {}
    for name, item in module.named_parameters():
        primary_name = division.primary_names[name]
        holder_count = len(division.holders[primary_name])
        if primary_name != name or holder_count > 1:
            shards[name] = LocalShard.unsharded(primary_name, tuple(item.shape), holder_count * copies)
    return shards
