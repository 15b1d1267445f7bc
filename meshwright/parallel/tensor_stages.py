"""Applies the tensor axis to a rank's stages: shards, collectives, and the gradient sums that follow backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from torch import nn

from meshwright.errors import PlanError
from meshwright.parallel import tensor
from meshwright.parallel.forward_stack import ForwardLayer
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.parameter_slices import find_replicated_runs
from meshwright.parallel.partial_grads import PartialGradReducer
from meshwright.parallel.stage_module import StageModule
from meshwright.parallel.transform import Transform, TransformContext, uses_axis
from meshwright.parallel.vocab_shard import VocabShard
from meshwright.spec.axes.tp import AXIS
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout
from meshwright.spec.placement import LocalShard
from meshwright.spec.sharding_table import ShardingTable, vocabulary_span


def split(
    stages: Sequence[StageModule],
    table: ShardingTable,
    mesh: Mesh,
    expert_modules: Sequence[str],
    gathers_again: Collection[str] = (),
) -> VocabShard | None:
    """Splits stages over ``tp``.

    Args:
        stages: this rank's stages; their modules, shards and gradient sums are changed.
        table: of the whole model.
        mesh: ranks and groups.
        expert_modules: names of modules that another axis splits: experts, where tokens travel to them.
        gathers_again: names of layers whose backward gathers tokens a second time (`chunked_products.Overlap`).

    Returns:
        The run of the vocabulary whose logits this rank has; None for all of it.
    """
    axis_group, layout = mesh.group_with(Mechanics.MATRICES), mesh.layout
    table = table.without_experts(expert_modules)
    expert_prefixes = tuple(f"{name}." for name in expert_modules)
    copies = mesh.island.size // layout.degree(Mechanics.STAGES)
    # Of the whole model's table: all ranks must make the same groups, whatever stage they have.
    neighbours = {number: mesh.subgroup(axis_group.axis, number) for number in _shared_by(table, axis_group.size)}
    for stage in stages:
        ends = (stage.is_first, stage.is_last)
        sharded = tensor.wrap_model(
            stage.module, table, axis_group, copies, layout.sequence, ends, layout.tp_overlap, gathers_again
        )
        for name, shard in sharded.local_shards.items():
            stage.local_shards[name] = _with_tied_copies(shard, stage.local_shards.get(name), copies)
        # Experts that another axis spreads aren't split here, so their gradients are no summands.
        partial_grads = [item for item in sharded.partial_grads if not item.name.startswith(expert_prefixes)]
        reducer = PartialGradReducer(stage.module, partial_grads, axis_group, neighbours, stage.masters)
        stage.gradient_syncs.append(reducer)
    if not table.vocabulary or table.headless:
        return None
    return VocabShard(axis_group, *vocabulary_span(table.vocab, axis_group.size, axis_group.index))


def _with_tied_copies(shard: LocalShard, tied_shard: LocalShard | None, copies: int) -> LocalShard:
    """Returns a shard with the name and the copies that a tie between stages gave the weight before."""
    if tied_shard is None:
        return shard
    tie_factor = tied_shard.copies // copies
    copied = tuple((start, stop, number * tie_factor) for start, stop, number in shard.copied)
    return dataclasses.replace(shard, name=tied_shard.name, copies=shard.copies * tie_factor, copied=copied)


def _shared_by(table: ShardingTable, degree: int) -> list[int]:
    """Returns the numbers of neighbours that hold the same rows of some weight."""
    return sorted(
        {
            ranks
            for _, split, shares, group in table.splits(degree)
            for _, _, ranks in find_replicated_runs(split, shares[0], group, degree)
        }
    )


def check(table: ShardingTable | None, layout: Layout) -> None:
    """Refuses a degree of ``tp`` that splits nothing, and token splits that the model's code doesn't allow.

    Raises:
        PlanError: with the rule, what was found, and the nearest layout that works.
    """
    degree = layout.degree(Mechanics.MATRICES)
    if degree == 1 or table is None:
        return
    if not table.vocabulary and next(table.splits(degree), None) is None:
        reasons = {reason for rows in table.layers.values() for reason in rows.refused.values()} | set(
            table.refused.values()
        )
        reason = "; ".join(sorted(reasons)[:3]) or f"no group of matrices has {degree} parts"
        raise PlanError(f"tp={degree}: nothing of this model can be split: {reason}; use shard={degree} instead")
    if table.vocabulary and table.vocab < degree:
        raise PlanError(
            f"tp={degree} splits the vocabulary of embedding and head, whose {table.vocab} words leave ranks without "
            f"one; nearest that works: tp={table.vocab}, or model.vocab = {degree} or more"
        )
    if not layout.sequence:
        return
    if not table.layers:
        raise PlanError(
            f"sequence=true splits the tokens between the layers that tp={degree} splits, but the model has no stack "
            "of repeated layers; leave sequence out"
        )
    for name, rows in table.layers.items():
        unsplit_rows = [group.row_linear for group in rows.groups if group.heads and group.shares(degree) is None]
        if unsplit_rows or not rows.sequence:
            why_whole = rows.sequence_refused or rows.refused.get("", "")
            reason = f"{unsplit_rows[0]} isn't split over {degree}" if unsplit_rows else why_whole
            # A matrix of the layer itself, not of a module inside: its heads are made in the layer's own forward.
            inline = [group.row_linear for group in rows.groups if group.heads and "." not in group.row_linear]
            cure = (
                f"move the attention in front of {inline[0]} into a module of its own, called with the hidden state, "
                "which gets all tokens, or leave sequence out"
                if inline and not unsplit_rows
                else "leave sequence out"
            )
            raise PlanError(
                f"sequence=true splits the tokens between the parts that tp={degree} splits, but layer {name} needs "
                f"all of them elsewhere: {reason}; {cure}"
            )


def check_overlap(model: nn.Module, table: ShardingTable | None, layout: Layout) -> None:
    """Refuses ``tp_overlap`` for a model of which no linear module that ``tp`` splits can compute in chunks.

    Args:
        model: the whole model, as its author wrote it.
        table: what splits its layers.
        layout: any.

    Raises:
        PlanError: with the nearest layout that works.
    """
    if not layout.tp_overlap or table is None:
        return
    degree = layout.degree(Mechanics.MATRICES)
    for name, rows in table.layers.items():
        layer = model.get_submodule(name)
        if any(tensor.overlappable_linears(layer, group) for group in rows.groups if group.shares(degree)):
            return
    raise PlanError(
        f"tp_overlap={layout.tp_overlap} computes plain linear modules in chunks beside the traffic of tp={degree}, "
        "but none that it splits here is one: each has a forward or a weight of its own making; leave tp_overlap out"
    )


def _apply(context: TransformContext) -> None:
    """Splits this rank's stages; experts that another axis spreads stay whole here."""
    assert context.source.table is not None
    spread = [rows.module for rows in context.source.experts] if context.layout.degree(Mechanics.EXPERTS) > 1 else []
    layout, layers = context.layout, context.source.layers
    # Of a compiled layer that recomputes selectively the compiler can't keep some results of one operator alone.
    modes = zip(layers, layout.recompute.modes(len(layers)))
    gathers_again = {name for name, mode in modes if mode == "selective" and layout.compile}
    context.view.vocab = split(context.stages, context.source.table, context.required_mesh, spread, gathers_again)


TRANSFORM = Transform(layer=ForwardLayer.TENSOR, axis=AXIS.name, applies=uses_axis(AXIS.name), apply=_apply)
