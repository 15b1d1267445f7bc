"""Analyses a model for a layout on the first rank and broadcasts the result to the others."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from operator import attrgetter

import torch
import torch.distributed as dist

from meshwright.errors import MeshwrightError, PlanError, error_of
from meshwright.models.analysis.objective_trial import ForwardTrial
from meshwright.models.build import BuiltModel
from meshwright.models.structure import ModelStructure
from meshwright.parallel.byte_collectives import broadcast_bytes
from meshwright.records import RecordCodec, RecordError
from meshwright.spec.axes import known_axes
from meshwright.spec.axis import Mechanics
from meshwright.spec.experts import LayerExperts
from meshwright.spec.layer_graph import LayerGraph, LayerOutput
from meshwright.spec.layout import Layout
from meshwright.spec.sharding_table import (
    Block,
    Cutting,
    CuttingKind,
    LayerSharding,
    ParameterSplit,
    ShapeAttribute,
    ShardingGroup,
    ShardingTable,
)
from meshwright.strategy.custom_module import with_forward_trial
from meshwright.torch_compat.tensors import TreeSpec, treespec_dumps, treespec_loads
from meshwright.train.model_analysis import ModelAnalysis, analyse_model, check_modules


@dataclass(frozen=True)
class RankRefusal:
    """An error of the first rank, as it is sent to the others."""

    kind: str
    """Name of its class in `meshwright.errors`."""
    text: str
    """Its message."""


CODEC = RecordCodec(
    (
        RankRefusal,
        ModelAnalysis,
        ShardingTable,
        LayerSharding,
        ShardingGroup,
        ParameterSplit,
        ShapeAttribute,
        Cutting,
        Block,
        LayerGraph,
        LayerOutput,
        LayerExperts,
    ),
    {TreeSpec: (treespec_dumps, treespec_loads), CuttingKind: (attrgetter("value"), CuttingKind)},
)
"""Types of the first rank's broadcast; as JSON, never as a pickle."""


def broadcast_analysis(
    built: BuiltModel, layout: Layout, example: torch.Tensor | None, split_vocabulary: bool
) -> ModelAnalysis:
    """Returns the analysis of a model that a layout needs; only the first rank runs trials.

    Args:
        built: on meta; it stays unchanged.
        layout: to be run.
        example: (B, ...) one input of a model without token inputs.
        split_vocabulary: whether a rank's logits may be of its shard of the vocabulary alone.

    Raises:
        PlanError: the model doesn't allow the layout; raised on every rank.
    """
    if all(known_axes()[name].mechanics is Mechanics.NONE for name in layout.degrees):
        check_modules(built, layout)
        return ModelAnalysis()
    # torch's fake backend sends nothing, so each rank analyses by itself
    no_network = dist.get_backend() == "fake"
    is_first_rank = dist.get_rank() == 0
    try:
        analysis_or_refusal = _analyse(built, layout, example) if no_network or is_first_rank else None
    except Exception as error:
        # the others wait for an answer: they end with the reason, this rank with its own traceback
        if not no_network:
            words = f"the first rank couldn't read the model for {layout}: {type(error).__name__}: {error}"
            broadcast_bytes(CODEC.dumps(RankRefusal("PlanError", words)))
        raise
    if not no_network:
        analysis_or_refusal = CODEC.loads(broadcast_bytes(CODEC.dumps(analysis_or_refusal) if is_first_rank else b""))
    if isinstance(analysis_or_refusal, RankRefusal):
        raise error_of(analysis_or_refusal.kind, analysis_or_refusal.text)
    assert isinstance(analysis_or_refusal, ModelAnalysis)
    analysis = analysis_or_refusal
    if analysis.table is not None and not split_vocabulary:
        analysis = dataclasses.replace(analysis, table=_with_replicated_head(analysis.table, built.structure))
    return analysis


def _analyse(built: BuiltModel, layout: Layout, example: torch.Tensor | None) -> ModelAnalysis | RankRefusal:
    """Analyses the model; returns an error as a value, since the other ranks wait for an answer."""
    needs_trial = layout.degree(Mechanics.STAGES) > 1 or layout.degree(Mechanics.MATRICES) > 1
    try:
        # The loop computes the loss, not the model: no trial of it is run or sent.
        without_trial = ModelAnalysis(trial=ForwardTrial())
        analysis = analyse_model(with_forward_trial(built, example) if needs_trial else built, layout, without_trial)
        _refuse_expert_lists(analysis, layout)
        analysis = dataclasses.replace(analysis, trial=None)
        CODEC.dumps(analysis)
    except MeshwrightError as error:
        return RankRefusal(type(error).__name__, str(error))
    except (RecordError, NotImplementedError, TypeError) as error:
        # The others wait for an answer.
        return RankRefusal("PlanError", f"what the model's layers return can't be told to other ranks: {error}")
    return analysis


def _refuse_expert_lists(analysis: ModelAnalysis, layout: Layout) -> None:
    """Refuses a custom loop over weights of which each rank has others: a penalty on them would count its own alone.

    Raises:
        PlanError: with the nearest that works.
    """
    lists = [rows.module for rows in analysis.experts if rows.children]
    if lists and layout.degree(Mechanics.EXPERTS) > 1 and layout.degree(Mechanics.STAGES) == 1:
        raise PlanError(
            f"{layout.format_degree(Mechanics.EXPERTS)} in a custom loop: the experts of '{lists[0]}' are modules of a "
            "list, so each rank's parameters() would be other weights; nearest that works: the same layout with "
            "meshwright.train, experts that are rows of one weight, or shard or tp without ep"
        )


def _with_replicated_head(table: ShardingTable, structure: ModelStructure) -> ShardingTable:
    """Returns the table with full logits on every rank: without the head, nor an embedding tied to it."""
    vocabulary = tuple(name for name in table.vocabulary if name != structure.head)
    # an embedding that is the head's weight can't be split while the head is whole
    tied_names = {name for group in structure.ties for name in group}
    vocabulary = tuple(name for name in vocabulary if f"{name}.weight" not in tied_names)
    return dataclasses.replace(table, vocabulary=vocabulary, headless=True)
