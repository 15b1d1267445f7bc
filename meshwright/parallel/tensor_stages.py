"""Puts the tensor axis on the stages of a rank: places, movements, and the sums of gradients that are owed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from meshwright.errors import PlanError
from meshwright.parallel import tensor
from meshwright.parallel.forward_stack import ForwardLayer
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.parameter_slices import copied_runs
from meshwright.parallel.partial_grads import PartialGradReducer
from meshwright.parallel.stage_module import StageModule
from meshwright.parallel.transform import Transform, TransformContext, uses_axis
from meshwright.parallel.vocab_cross_entropy import VocabShard
from meshwright.spec.axes.tp import AXIS
from meshwright.spec.layout import Layout
from meshwright.spec.placement import LocalShard
from meshwright.spec.sharding_table import ShardingTable, vocabulary_span


def split(parts: Sequence[StageModule], table: ShardingTable, mesh: Mesh, apart: Sequence[str]) -> VocabShard | None:
    """Splits stages over ``tp``.

    Args:
        parts: this rank's stages; modules, places and sums are changed.
        table: of the whole model.
        mesh: ranks and groups.
        apart: names of modules that another axis splits: experts, where tokens travel to them.

    Returns:
        The run of the vocabulary whose logits this rank has; None for all of it.
    """
    axis_group, layout = mesh.axis_groups["tp"], mesh.layout
    if apart:
        table = without_experts(table)
    inside = tuple(f"{name}." for name in apart)
    copies = mesh.world.size // layout.degree("pp")
    neighbours = {number: mesh.neighbours("tp", number) for number in _shared_by(table, axis_group.size)}
    for part in parts:
        done = tensor.wrap_model(part.module, table, axis_group, copies, layout.sequence)
        for name, place in done.places.items():
            part.places[name] = _over(place, part.places.get(name), copies)
        owed = [item for item in done.owed if not item.name.startswith(inside)]
        part.sync.append(PartialGradReducer(part.module, owed, axis_group, neighbours))
    if not table.vocabulary or table.headless:
        return None
    return VocabShard(axis_group, *vocabulary_span(table.vocab, axis_group.size, axis_group.index))


def _over(place: LocalShard, held: LocalShard | None, copies: int) -> LocalShard:
    """Returns a place with the name and the copies that a tie between stages gave the weight before."""
    if held is None:
        return place
    more = held.copies // copies
    copied = tuple((start, stop, number * more) for start, stop, number in place.copied)
    return dataclasses.replace(place, name=held.name, copies=place.copies * more, copied=copied)


def without_experts(table: ShardingTable) -> ShardingTable:
    """Returns the table without the groups that split experts by channel."""
    layers = {
        name: dataclasses.replace(rows, groups=tuple(group for group in rows.groups if group.column_linears))
        for name, rows in table.layers.items()
    }
    return dataclasses.replace(table, layers=layers)


def _shared_by(table: ShardingTable, degree: int) -> list[int]:
    """Returns the numbers of neighbours that hold the same rows of some weight."""
    return sorted(
        {
            ranks
            for _, split, shares, group in table.splits(degree)
            for _, _, ranks in copied_runs(split, shares[0], group, degree)
        }
    )


def check(table: ShardingTable | None, layout: Layout) -> None:
    """Refuses a degree of ``tp`` that splits nothing, and token splits that the model's code doesn't allow.

    Raises:
        PlanError: with the rule, what was found, and the nearest layout that works.
    """
    degree = layout.degree("tp")
    if degree == 1 or table is None:
        return
    if not table.vocabulary and next(table.splits(degree), None) is None:
        reasons = {why for rows in table.layers.values() for why in rows.refused.values()} | set(table.refused.values())
        why = "; ".join(sorted(reasons)[:3]) or f"no group of matrices has {degree} parts"
        raise PlanError(f"tp={degree}: nothing of this model can be split: {why}; use shard={degree} instead")
    if not layout.sequence:
        return
    if not table.layers:
        raise PlanError(
            f"sequence=true splits the tokens between the layers that tp={degree} splits, but the model has no stack "
            "of repeated layers; leave sequence out"
        )
    for name, rows in table.layers.items():
        whole = [group.row_linear for group in rows.groups if group.heads and group.shares(degree) is None]
        if whole or not rows.sequence:
            why = f"{whole[0]} isn't split over {degree}" if whole else rows.sequence_refused
            raise PlanError(
                f"sequence=true splits the tokens between the parts that tp={degree} splits, but layer {name} needs "
                f"all of them elsewhere: {why}; leave sequence out"
            )


def _apply(work: TransformContext) -> None:
    """Splits this rank's stages; experts that another axis spreads stay whole here."""
    assert work.source.table is not None
    spread = [rows.module for rows in work.source.experts] if work.layout.degree("ep") > 1 else []
    work.view.vocab = split(work.stages, work.source.table, work.groups, spread)


TRANSFORM = Transform(layer=ForwardLayer.TENSOR, axis=AXIS.name, applies=uses_axis(AXIS.name), apply=_apply)
