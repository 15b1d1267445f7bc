"""The analysis of a model that a layout needs beyond its modules, done once before ranks start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from meshwright.errors import PlanError
from meshwright.models.analysis.clone import TOKENS
from meshwright.models.analysis.context import Context, read_context, read_sequence
from meshwright.models.analysis.expert_list_trial import check_expert_lists, check_expert_reads
from meshwright.models.analysis.experts import require_experts
from meshwright.models.analysis.layer_graph import STAGE_TOKENS, read_layer_graph
from meshwright.models.analysis.objective_trial import ForwardTrial, try_forward
from meshwright.models.analysis.outside_reads import OutsideRead
from meshwright.models.analysis.stored_tensors import find_stored_tensor
from meshwright.models.analysis.table import overridden_table, sharding_table
from meshwright.models.analysis.unweighted_products import find_unweighted_products
from meshwright.models.build import BuiltModel
from meshwright.models.random_draws import drawing_parts
from meshwright.parallel import expert, tensor_stages
from meshwright.spec.axis import Mechanics
from meshwright.spec.experts import LayerExperts
from meshwright.spec.layer_graph import LayerGraph, divide
from meshwright.spec.layout import Layout
from meshwright.spec.layout_fields import BALANCED_ATTENTIONS
from meshwright.spec.placement import halved
from meshwright.spec.sharding_table import ShardingTable


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelAnalysis:
    """Facts of a model that a layout needs beyond its modules."""

    table: ShardingTable | None = None
    """How its weights are split; for ``tp`` and ``cp``."""
    layer_graph: LayerGraph | None = None
    """Tensors that pass between consecutive layers; for ``pp``."""
    experts: Sequence[LayerExperts] = ()
    """Its experts' weights; for ``ep``, and to count their tokens."""
    attention: str = ""
    """How ``cp`` computes attention."""
    rows: int = 1
    """Number of which a micro-batch's rows must be a multiple under ``cp``."""
    tried: str = ""
    """Row lengths on which ``cp`` was tried, and why no longer ones."""
    heads_refused: str = ""
    """Why ``cp`` doesn't exchange heads, where no way was named and gathering is what works."""
    trial: ForwardTrial | None = None
    """Its own loss, and the buffers that forward changes; None for a custom training loop."""

    @property
    def has_own_loss(self) -> bool:
        """Whether the model's loss has terms beside the cross-entropy of its targets."""
        return self.trial is not None and not self.trial.objective.plain


def _check_trained(model: BuiltModel, layout: Layout, earlier: ModelAnalysis | None) -> None:
    """Refuses frozen models, but for one beside the trained model of a custom loop, of which no trial is run."""
    may_be_frozen = earlier is not None and earlier.trial is not None and layout.degree(Mechanics.STAGES) == 1
    if not may_be_frozen and not any(parameter.requires_grad for parameter in model.module.parameters()):
        raise PlanError(
            "every weight of the model is frozen (requires_grad=False), so nothing would be trained; leave some of "
            "them trained, or add adapters"
        )


def _check_operations(model: BuiltModel, layout: Layout) -> None:
    """Refuses what a layout would do to operations: hide draws, or round angles of positions."""
    if layout.compile and (drawing := drawing_parts(model)):
        raise PlanError(
            f"compile=true hides what {drawing[0]} draws, and random numbers must not depend on the layout; leave "
            "compile out, or set the model's dropout to 0"
        )
    if layout.precision == "tf32" and (unweighted := find_unweighted_products(model)):
        raise PlanError(
            f"precision=tf32 would round a product in {unweighted[0]} that no weight enters, as those of positions and "
            "frequencies are, which 10 bits don't hold; compute it in a module with buffers and no weights, whose "
            "products stay exact; nearest that works: precision=float32"
        )


def _check_trial(trial: ForwardTrial, layout: Layout) -> None:
    """Refuses a layout under which the model's loss or buffers would differ from those on one device.

    Raises:
        PlanError: with the term or buffer, and the nearest layout that works.
    """
    objective, batches = trial.objective, sum(layout.reader_shares()) * layout.calls
    names = objective.content
    if not objective.plain and (degree := layout.degree(Mechanics.TOKENS)) > 1:
        raise PlanError(
            f"{layout.format_degree(Mechanics.TOKENS)} gives each rank some tokens of a row, and the model's own "
            f"loss has terms ({names}) that it computes from whole rows; use shard={degree}"
        )
    if not objective.plain and layout.sequence:
        raise PlanError(
            f"sequence=true splits the tokens between the groups of a layer, and the model's own loss has terms "
            f"({names}) that may be computed from them there; drop sequence"
        )
    if not objective.logits and batches > 1 and objective.terms[0].mean != "targets":
        raise PlanError(
            f"the model gives a loss and no logits, and its loss isn't a mean over targets, so {batches} micro-batches "
            "can't be added up; return logits (B, S, V) beside the loss, or use one reader and microbatches=1"
        )
    if layout.loss_chunk.tokens > 0 and (reason := trial.head.refused):
        raise PlanError(
            f"loss_chunk={layout.loss_chunk} computes the logits of so many tokens at a time, for which they must be "
            f"the product of a linear head, but {reason}; leave loss_chunk out, and the loss has whole logits"
        )
    # Buffers that depend on the rows of a call would differ with the layout's micro-batches.
    fixed = [buffer.name for buffer in trial.moving if buffer.data]
    if fixed and (layout.world > 1 or layout.calls > 1):
        raise PlanError(
            f"its forward changes the buffer '{fixed[0]}' by the rows that it sees (running statistics), so what it "
            f"computes depends on which rows lie in one call, and {layout} has several; use one rank and "
            "microbatches=1, or a norm without statistics of the batch"
        )
    if trial.mixes_rows and batches > 1:
        raise PlanError(
            f"its logits of a row depend on the other rows of the call (experts with a capacity, a norm over the "
            f"batch), and {layout} computes a batch in {batches} calls; nearest that works: one reader and "
            "microbatches=1, where more ranks split the model (tp=2), or code that looks at each row by itself"
        )
    if trial.moving and layout.degree(Mechanics.STAGES) > 1:
        raise PlanError(
            f"its forward changes the buffer '{trial.moving[0].name}' once a step, and under "
            f"{layout.format_degree(Mechanics.STAGES)} each micro-batch would change it again in its stage; nearest "
            f"that works: shard, replicate or tp in place of {layout.axis(Mechanics.STAGES)}"
        )
    if trial.moving and layout.ep_halves:
        raise PlanError(
            f"its forward changes the buffer '{trial.moving[0].name}' once a step, and under ep_halves=true each half "
            "of a micro-batch would change it; drop ep_halves"
        )


def _check_trial_rows(model: BuiltModel, layout: Layout) -> None:
    """Refuses splits that are tried out on rows of more tokens than the model has learned positions.

    Raises:
        PlanError: with both numbers, and the nearest that works.
    """
    stages = layout.degree(Mechanics.STAGES) > 1
    split = layout.degree(Mechanics.MATRICES) * layout.degree(Mechanics.TOKENS) > 1
    needed = STAGE_TOKENS if stages else TOKENS if split else 0
    positions = model.structure.positions
    if positions is not None and positions < needed:
        raise PlanError(
            f"{layout} is tried out on a small clone with rows of {needed} tokens, and the model has {positions} "
            f"learned positions; nearest that works: model.context = {needed}, whose rows may be shorter, or shard or "
            "replicate"
        )


def check_modules(model: BuiltModel, layout: Layout) -> None:
    """Refuses modules that a layout would change, as far as they show it without a trial.

    Raises:
        PlanError: with the weight or the module, and the nearest that works.
    """
    _check_embeddings(model, layout)
    _check_shared_weights(model, layout)


def _check_embeddings(model: BuiltModel, layout: Layout) -> None:
    """Refuses a layout under which an embedding's own rule for its rows would see other rows than on one device.

    Raises:
        PlanError: with the embedding, its option, and the nearest that works.
    """
    readers, tp = len(layout.reader_shares()), layout.degree(Mechanics.MATRICES)
    for name, module in model.module.named_modules():
        if not isinstance(module, nn.Embedding):
            continue
        if module.max_norm is not None and (readers > 1 or tp > 1):
            raise PlanError(
                f"'{name}' has max_norm={module.max_norm:g}: each call shortens in place the rows of {name}.weight "
                f"that it looks up, and ranks of {layout} would each change other rows or copies; nearest that works: "
                "pp or cp, or an embedding without max_norm"
            )
        if module.scale_grad_by_freq and module.weight.requires_grad and readers * layout.calls > 1:
            raise PlanError(
                f"'{name}' has scale_grad_by_freq=True: the gradient of each row of {name}.weight is divided by how "
                f"often one call looks it up, and {layout} looks a batch up in {readers * layout.calls} calls; "
                "nearest that works: one reader and microbatches=1 (pp or cp), or an embedding without it"
            )


def _check_shared_weights(model: BuiltModel, layout: Layout) -> None:
    """Refuses shards of a weight that several layers share: FSDP2 shards a layer's weights with that layer alone.

    Raises:
        PlanError: with the weight, its layers, and the nearest that works.
    """
    if not has_layer_units(layout):
        return
    owners: dict[nn.Parameter, tuple[str, nn.Module]] = {}
    for layer in model.structure.layers:
        module = model.module.get_submodule(layer)
        for name, parameter in module.named_parameters():
            owner, owner_module = owners.setdefault(parameter, (layer, module))
            if owner_module is not module:
                raise PlanError(
                    f"'{layer}.{name}' is a weight of layer '{owner}' too, and {layout} gathers and shards each layer "
                    "by itself; nearest that works: replicate, pp or cp in float32, or own weights in each layer"
                )


def has_layer_units(layout: Layout) -> bool:
    """Returns whether a layout gathers each layer's weights by itself (`parallel.data_parallel`)."""
    has_units = layout.zero > 0 or layout.offload == "parameters"
    return has_units or (layout.is_mixed_precision and not layout.has_compute_copies)


def _check_outside_reads(trial: ForwardTrial, layout: Layout) -> None:
    """Refuses reads of a layer's weights where FSDP2 hasn't gathered them yet, or has freed them.

    Raises:
        PlanError: with the weight, its layer, and the nearest that works.
    """
    for read in trial.outside if has_layer_units(layout) else ():
        refuse_outside_read(read, layout)


def refuse_outside_read(read: OutsideRead, layout: Layout) -> None:
    """Refuses one such read, of a layout that gathers each layer's weights by itself.

    Raises:
        PlanError: with the weight, its layer, and the nearest that works.
    """
    cure = "or have its layer's own forward compute what is needed of it, and return that"
    # The stages of a pipeline and ZeRO 1 and 2 keep gathered what a forward has gathered, to the end of the step.
    frees = layout.zero == 3 and layout.degree(Mechanics.STAGES) == 1
    if read.early:
        raise PlanError(
            f"'{read.weight}' is read before a call of its layer '{read.layer}' (its forward alone is none), and "
            f"{layout} gathers a layer's weights in its call; nearest that works: replicate in float32, {cure}"
        )
    if frees:
        raise PlanError(
            f"'{read.weight}' is read after the call of its layer '{read.layer}', behind which {layout} frees its "
            f"weights; nearest that works: zero=2, {cure}"
        )


def analyse_model(
    model: BuiltModel, layout: Layout, earlier: ModelAnalysis | None = None, tokens: int = 0
) -> ModelAnalysis:
    """Analyses a model for a layout, and refuses a layout that the model doesn't allow.

    Args:
        model: on the meta device; it isn't changed.
        layout: to be run.
        earlier: an analysis for a layout with the same degrees of ``tp`` and ``cp``, which is reused.
        tokens: tokens per row of the run, with which splits of tokens are tried; 0 if unknown.

    Raises:
        PlanError: with the rule, what was found, and the nearest layout that works.
    """
    _check_trained(model, layout, earlier)
    _check_operations(model, layout)
    _check_trial_rows(model, layout)
    earlier = earlier or ModelAnalysis()
    # A forward of a small clone finds the model's own loss, and the buffers that forward changes.
    trial = earlier.trial or try_forward(model)
    _check_trial(trial, layout)
    check_modules(model, layout)
    _check_outside_reads(trial, layout)
    table, layer_graph, experts = earlier.table, earlier.layer_graph, earlier.experts
    split = layout.degree(Mechanics.MATRICES) * layout.degree(Mechanics.TOKENS)  # heads are split by both
    if split > 1 and table is None:
        table = overridden_table(model, sharding_table(model, split, objective=trial.objective))
    if model.config.sharding and split == 1:
        raise PlanError("model.sharding has no effect without tp or cp; write tp=2 or more, or drop it")
    if layout.degree(Mechanics.STAGES) > 1:
        # Needs a traced forward, so an earlier one is reused.
        layer_graph = layer_graph or read_layer_graph(model, trial.objective)
        _check_stages(model, layer_graph, layout)
    experts = experts or require_experts(model.module, layout.degree(Mechanics.EXPERTS))
    if layout.degree(Mechanics.EXPERTS) > 1:
        _check_experts(model, layout, experts, trial)
    tensor_stages.check(table, layout)
    tensor_stages.check_overlap(model.module, table, layout)
    if layout.sequence and table is not None:
        _check_sequence(model, layout, table, tokens)
    context = Context(
        attention=earlier.attention, rows=earlier.rows, tried=earlier.tried, heads_refused=earlier.heads_refused
    )
    # Tried again only if the layout names another way to compute attention.
    if (
        layout.degree(Mechanics.TOKENS) > 1
        and table is not None
        and (not context.attention or layout.attention not in ("", context.attention))
    ):
        context = _context_split(model, layout, table, tokens)
    return ModelAnalysis(
        table=table,
        layer_graph=layer_graph,
        experts=experts,
        rows=context.rows,
        attention=context.attention,
        tried=context.tried,
        heads_refused=context.heads_refused,
        trial=trial,
    )


def _check_experts(model: BuiltModel, layout: Layout, experts: Sequence[LayerExperts], trial: ForwardTrial) -> None:
    """Refuses lists that can't be spread, halves that would share what forward stores, and to keep no exchange."""
    expert.check(experts, layout.degree(Mechanics.EXPERTS))
    if layout.ep_halves and not trial.objective.plain and (stored := find_stored_tensor(model, trial.objective)):
        raise PlanError(
            f"ep_halves=true runs two halves of a micro-batch in turns, and each would find in '{stored}' what the "
            "other stored there for its loss; drop ep_halves, or return it beside the layer's output"
        )
    if layout.ep_keep:
        _check_kept_exchange(model, layout, experts)
    check_expert_lists(model, layout, [buffer.name for buffer in trial.moving], trial.objective)
    check_expert_reads(model, layout, trial.objective, TOKENS)


def _check_kept_exchange(model: BuiltModel, layout: Layout, experts: Sequence[LayerExperts]) -> None:
    """Refuses to keep what came from experts in layers that have none."""
    names, recompute = model.structure.layers, layout.recompute
    recomputed = [names[number] for number in recompute.layers(len(names))]
    if not any(rows.module.startswith(f"{name}.") for rows in experts for name in recomputed):
        raise PlanError(
            f"ep_keep=true has no effect with recompute={recompute}: no mixture of experts is in the layers that "
            f"recompute, {', '.join(recomputed)}; nearest that works: recompute={recompute.mode}, or drop ep_keep"
        )


def _check_stages(model: BuiltModel, layer_graph: LayerGraph, layout: Layout) -> None:
    """Refuses pipeline stages into which the model can't be divided, by the rule that ranks apply later."""
    sizes = {name: item.numel() for name, item in model.module.named_parameters(remove_duplicate=False)}
    divide(layer_graph, sizes, model.structure.ties, layout.pipeline().stages, layout.split)


def _check_sequence(model: BuiltModel, layout: Layout, table: ShardingTable, tokens: int) -> None:
    degree = layout.degree(Mechanics.MATRICES)
    if reason := read_sequence(model, table, degree, tokens):
        raise PlanError(
            "sequence=true splits the tokens between the parts that "
            f"{layout.format_degree(Mechanics.MATRICES)} splits, but {reason}; leave sequence out"
        )


def _context_split(model: BuiltModel, layout: Layout, table: ShardingTable, tokens: int) -> Context:
    degree = layout.degree(Mechanics.TOKENS)
    context = read_context(model, table, degree, layout.degree(Mechanics.MATRICES), layout.attention, tokens)
    if context.refused:
        raise PlanError(
            f"{layout.format_degree(Mechanics.TOKENS)} splits each row's tokens, but the model doesn't allow it: "
            f"{context.refused}; use shard={degree}"
        )
    if context.attention in BALANCED_ATTENTIONS and layout.compile:
        raise PlanError(
            f"attention={context.attention} looks for attention in the model's calls, which compile=true hides; "
            "drop one"
        )
    return context


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
    divisor = layout.degree(Mechanics.TOKENS) * (layout.degree(Mechanics.MATRICES) if layout.sequence else 1)
    # gather and ring balance causal attention by giving each rank two chunks of tokens.
    divisor *= 2 if facts.attention in BALANCED_ATTENTIONS else 1
    if sequence % divisor:
        near = sequence // divisor * divisor or divisor
        raise PlanError(
            f"rows of {sequence} tokens don't divide into {divisor} parts; nearest that works: {near} tokens"
        )
    layout.check_batch(rows)
    shares = {stop - start for start, stop in (layout.span(rank, rows) for rank in range(layout.world))}
    micro_batches = [(0, share // layout.microbatches) for share in shares]
    calls = [half for span in micro_batches for half in halved(span)] if layout.ep_halves else micro_batches
    bad_sizes = [stop - start for start, stop in calls if (stop - start) % facts.rows]
    if bad_sizes:
        raise PlanError(
            f"this model shapes its output as whole rows: under {layout.format_degree(Mechanics.TOKENS)} a micro-batch"
            f"{', and each half of it,' if layout.ep_halves else ''} must have a multiple of {facts.rows} rows, and it "
            f"has {bad_sizes[0]}; change train.batch or microbatches"
        )
