"""What a layout needs to know of a model, read by the first rank and told to the others."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils._pytree import TreeSpec, treespec_dumps, treespec_loads

from meshwright.errors import MeshwrightError, error_of
from meshwright.models.build import BuiltModel
from meshwright.models.objective_trial import ForwardTrial
from meshwright.models.structure import ModelStructure
from meshwright.parallel.byte_collectives import broadcast_bytes
from meshwright.records import RecordCodec, RecordError
from meshwright.spec.axes import known_axes
from meshwright.spec.axis import Mechanics
from meshwright.spec.experts import ExpertRows
from meshwright.spec.layer_graph import LayerGraph, LayerOutput
from meshwright.spec.layout import Layout
from meshwright.spec.sharding_table import (
    Block,
    Cutting,
    LayerRows,
    ParameterSplit,
    ShapeAttribute,
    ShardingGroup,
    ShardingTable,
)
from meshwright.strategy.custom_module import tried_on
from meshwright.train.model_analysis import ModelAnalysis, analyse_model


@dataclass(frozen=True)
class RankRefusal:
    """An error that the first rank met, as it is told to the others."""

    kind: str
    """Name of its class in `meshwright.errors`."""
    text: str
    """What it says."""


CODEC = RecordCodec(
    (
        RankRefusal,
        ModelAnalysis,
        ShardingTable,
        LayerRows,
        ShardingGroup,
        ParameterSplit,
        ShapeAttribute,
        Cutting,
        Block,
        LayerGraph,
        LayerOutput,
        ExpertRows,
    ),
    {TreeSpec: (treespec_dumps, treespec_loads)},
)
"""What the first rank tells the others; as JSON, never as a pickle."""


def shared_facts(
    built: BuiltModel, layout: Layout, example: torch.Tensor | None, split_vocabulary: bool
) -> ModelAnalysis:
    """Reads what the layout needs of the model; only the first rank tries the model out.

    Args:
        built: on meta; it stays as it is.
        layout: to be run.
        example: (B, ...) one input of a model that takes no tokens.
        split_vocabulary: whether a rank's logits may be of its part of the vocabulary alone.

    Raises:
        PlanError: the model doesn't allow the layout; raised on every rank.
    """
    if all(known_axes()[name].mechanics is Mechanics.NONE for name in layout.degrees):
        return ModelAnalysis()
    pretend = dist.get_backend() == "fake"
    first = dist.get_rank() == 0
    found = _read(built, layout, example) if pretend or first else None
    if not pretend:
        found = CODEC.loads(broadcast_bytes(CODEC.dumps(found) if first else b""))
    if isinstance(found, RankRefusal):
        raise error_of(found.kind, found.text)
    assert isinstance(found, ModelAnalysis)
    facts = found
    if facts.table is not None and not split_vocabulary:
        facts = dataclasses.replace(facts, table=_with_whole_head(facts.table, built.structure))
    return facts


def _read(built: BuiltModel, layout: Layout, example: torch.Tensor | None) -> ModelAnalysis | RankRefusal:
    needs_trial = layout.degree(Mechanics.STAGES) > 1 or layout.degree(Mechanics.MATRICES) > 1
    try:
        # The loop computes the loss, not the model: nothing of it is tried, nor told.
        known = ModelAnalysis(trial=ForwardTrial())
        facts = analyse_model(tried_on(built, example) if needs_trial else built, layout, known)
        facts = dataclasses.replace(facts, trial=None)
        CODEC.dumps(facts)
    except MeshwrightError as error:
        return RankRefusal(type(error).__name__, str(error))
    except (RecordError, NotImplementedError, TypeError) as error:
        # The others wait for an answer.
        return RankRefusal("PlanError", f"what the model's layers return can't be told to other ranks: {error}")
    return facts


def _with_whole_head(table: ShardingTable, structure: ModelStructure) -> ShardingTable:
    """Returns the table with logits whole on every rank: without the head, nor an embedding that is the same weight."""
    kept = tuple(name for name in table.vocabulary if name != structure.head)
    tied = {name for group in structure.ties for name in group}
    kept = tuple(name for name in kept if f"{name}.weight" not in tied)
    return dataclasses.replace(table, vocabulary=kept, headless=True)
