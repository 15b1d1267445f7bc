"""What a layout needs to know of a model beyond its modules: read once, before a rank starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.errors import PlanError
from meshwright.models.build import BuiltModel
from meshwright.models.context import Context, read_context, read_sequence
from meshwright.models.draw_trial import drawing_parts
from meshwright.models.experts import require_experts
from meshwright.models.layer_graph import read_layer_graph
from meshwright.models.objective_trial import ForwardTrial, try_forward
from meshwright.models.table import sharding_table
from meshwright.parallel import tensor_stages
from meshwright.spec.axis import Mechanics
from meshwright.spec.experts import ExpertRows
from meshwright.spec.layer_graph import LayerGraph, divide
from meshwright.spec.layout import Layout
from meshwright.spec.sharding_override import overridden
from meshwright.spec.sharding_table import ShardingTable


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelAnalysis:
    """What a layout needs to know of a model beyond its modules; read once, before ranks are forked."""

    table: ShardingTable | None = None
    """How its weights can be split; for ``tp`` and ``cp``."""
    layer_graph: LayerGraph | None = None
    """What passes from layer to layer; for ``pp``."""
    experts: Sequence[ExpertRows] = ()
    """Where its experts are; for ``ep``, and to count their tokens."""
    attention: str = ""
    """How ``cp`` computes attention."""
    rows: int = 1
    """Of how many rows a micro-batch must be a multiple under ``cp``."""
    tried: str = ""
    """Rows on which ``cp`` was tried, and why none longer."""
    trial: ForwardTrial | None = None
    """Its own loss, and the buffers that forward changes; None for a loop of the user's own."""


def _check_trial(trial: ForwardTrial, layout: Layout) -> None:
    """Refuses a layout under which the model's loss or buffers would be others than on one device.

    Raises:
        PlanError: with the term or buffer, and the nearest layout that works.
    """
    objective, parts = trial.objective, sum(layout.shares()) * layout.microbatches
    names = ", ".join(term.name for term in objective.terms)
    if not objective.plain and (degree := layout.degree(Mechanics.TOKENS)) > 1:
        raise PlanError(
            f"{layout.written(Mechanics.TOKENS)} gives each rank some tokens of a row, and the model's own loss has "
            f"terms ({names}) that it computes from whole rows; use shard={degree}"
        )
    if not objective.plain and layout.sequence:
        raise PlanError(
            f"sequence=true splits the tokens between the groups of a layer, and the model's own loss has terms "
            f"({names}) that may be computed from them there; drop sequence"
        )
    if not objective.logits and parts > 1 and objective.terms[0].mean != "targets":
        raise PlanError(
            f"the model gives a loss and no logits, and its loss isn't a mean over targets, so {parts} micro-batches "
            "can't be added up; return logits (B, S, V) beside the loss, or use one reader and microbatches=1"
        )
    fixed = [buffer.name for buffer in trial.moving if buffer.data]
    if fixed and (layout.world > 1 or layout.microbatches > 1):
        raise PlanError(
            f"its forward changes the buffer '{fixed[0]}' by the rows that it sees (running statistics), so what it "
            f"computes depends on which rows lie in one call, and {layout} has several; use one rank and "
            "microbatches=1, or a norm without statistics of the batch"
        )


def analyse_model(
    model: BuiltModel, layout: Layout, known: ModelAnalysis | None = None, tokens: int = 0
) -> ModelAnalysis:
    """Reads what a layout needs of a model, and refuses a layout that the model doesn't allow.

    Args:
        model: on meta; it stays as it is.
        layout: to be run.
        known: facts that were read for a layout with the same degrees of ``tp`` and ``cp``; they are kept.
        tokens: in the run's rows, on which splits of tokens are tried; 0 where no run is known.

    Raises:
        PlanError: with the rule, what was found, and the nearest layout that works.
    """
    if layout.compile and (drawing := drawing_parts(model)):
        raise PlanError(
            f"compile=true hides what {drawing[0]} draws, and random numbers must not depend on the layout; leave "
            "compile out, or set the model's dropout to 0"
        )
    known = known or ModelAnalysis()
    trial = known.trial or try_forward(model)
    _check_trial(trial, layout)
    table, layer_graph, experts = known.table, known.layer_graph, known.experts
    split = layout.degree(Mechanics.MATRICES) * layout.degree(Mechanics.TOKENS)  # heads are split by both
    if split > 1 and table is None:
        table = sharding_table(model, split, objective=trial.objective)
        if model.config.sharding:
            names = [name for name, _ in model.module.named_parameters(remove_duplicate=False)]
            table = overridden(table, model.config.sharding, names)
    if model.config.sharding and split == 1:
        raise PlanError("model.sharding has no effect without tp or cp; write tp=2 or more, or drop it")
    if layout.degree(Mechanics.STAGES) > 1:
        layer_graph = layer_graph or read_layer_graph(model, trial.objective)
        _check_stages(model, layer_graph, layout)
    experts = experts or require_experts(model.module, layout.degree(Mechanics.EXPERTS))
    tensor_stages.check(table, layout)
    if layout.sequence and table is not None:
        _check_sequence(model, layout, table, tokens)
    rows, attention, tried = known.rows, known.attention, known.tried
    if (
        layout.degree(Mechanics.TOKENS) > 1
        and table is not None
        and (not attention or layout.attention not in ("", attention))
    ):
        found = _context(model, layout, table, tokens)
        rows, attention, tried = found.rows, found.attention, found.tried
    return ModelAnalysis(
        table=table, layer_graph=layer_graph, experts=experts, rows=rows, attention=attention, tried=tried, trial=trial
    )


def _check_stages(model: BuiltModel, layer_graph: LayerGraph, layout: Layout) -> None:
    """Refuses stages where the model can't be cut so; the ranks divide it by the same rule."""
    sizes = {name: item.numel() for name, item in model.module.named_parameters(remove_duplicate=False)}
    divide(layer_graph, sizes, model.structure.ties, layout.pipeline().stages, layout.split)


def _check_sequence(model: BuiltModel, layout: Layout, table: ShardingTable, tokens: int) -> None:
    degree = layout.degree(Mechanics.MATRICES)
    if why := read_sequence(model, table, degree, tokens):
        raise PlanError(
            f"sequence=true splits the tokens between the parts that "
            f"{layout.written(Mechanics.MATRICES)} splits, but {why}; leave sequence out"
        )


def _context(model: BuiltModel, layout: Layout, table: ShardingTable, tokens: int) -> Context:
    degree = layout.degree(Mechanics.TOKENS)
    found = read_context(model, table, degree, layout.degree(Mechanics.MATRICES), layout.attention, tokens)
    if found.refused:
        raise PlanError(
            f"{layout.written(Mechanics.TOKENS)} splits each row's tokens, but the model doesn't allow it: "
            f"{found.refused}; use shard={degree}"
        )
    if found.attention == "gather" and layout.compile:
        raise PlanError("attention=gather looks for attention in the model's calls, which compile=true hides; drop one")
    return found


def check_shapes(facts: ModelAnalysis, layout: Layout, rows: int, sequence: int) -> None:
    """Refuses a batch whose rows or tokens a layout can't divide.

    Args:
        facts: of the model.
        layout: to be run.
        rows: of the global batch.
        sequence: tokens a row.

    Raises:
        PlanError: with the numbers and the nearest that work.
    """
    parts = layout.degree(Mechanics.TOKENS) * (layout.degree(Mechanics.MATRICES) if layout.sequence else 1)
    parts *= 2 if facts.attention == "gather" else 1
    if sequence % parts:
        near = sequence // parts * parts or parts
        raise PlanError(f"rows of {sequence} tokens don't divide into {parts} parts; nearest that works: {near} tokens")
    layout.check_batch(rows)
    shares = {last - first for first, last in (layout.span(rank, rows) for rank in range(layout.world))}
    odd = [share // layout.microbatches for share in shares if share // layout.microbatches % facts.rows]
    if odd:
        raise PlanError(
            f"this model shapes its output as whole rows: under "
            f"{layout.written(Mechanics.TOKENS)} a micro-batch must have a "
            f"multiple of {facts.rows} rows, and it has {odd[0]}; change train.batch or microbatches"
        )
