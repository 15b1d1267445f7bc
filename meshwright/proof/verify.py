"""Proves that layouts compute what one device computes: same losses, norms, gradients and weights, on every rank.

The reference is plain PyTorch (`proof.reference`). Under a layout every rank compares its own parts with the
reference's, so a copy that is wrong on one rank alone is found too.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from meshwright.errors import ConfigError, MeshwrightError, PlanError
from meshwright.launch.contract import RankContext
from meshwright.launch.devices import found_devices
from meshwright.launch.fork import ForkLauncher
from meshwright.launch.rendezvous import init_group
from meshwright.models.analysis.objective import with_words
from meshwright.models.analysis.objective_trial import ForwardTrial, try_forward
from meshwright.models.analysis.table import sharding_table
from meshwright.models.build import BuiltModel
from meshwright.parallel.build import check
from meshwright.parallel.wire import WireOptions
from meshwright.proof.case import Case
from meshwright.proof.compare import Verdict, merge_ranks, one_line
from meshwright.proof.compressed_sums import CompressedSums
from meshwright.proof.difference import Difference
from meshwright.proof.one_device import SEED, References, to_device
from meshwright.proof.scope import expert_use, read_scope, split_shares
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction
from meshwright.train.config import OptimizerConfig, OuterConfig
from meshwright.train.feed import MicroBatch
from meshwright.train.loss import IGNORED
from meshwright.train.model_analysis import ModelAnalysis, analyse_model, check_shapes
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.outer import OuterOptimizer
from meshwright.train.scaler import LossScaler
from meshwright.train.session import build_program
from meshwright.train.step import Stepper

GROUP_S = 60.0
Expected = Mapping[str, Any]
"""What a reference wrote: losses, norms, gradients and weights, of each island where there are several."""
NARROW = 4
"""Elements of a head of the clone from which a proof's sharding table grows."""


def verify(case: Case, layouts: Sequence[Layout], on_verdict: Callable[[Verdict], None] | None = None) -> list[Verdict]:
    """Runs the reference once for each precision, and each layout after it, on forked ranks of this machine.

    Args:
        case: model and data.
        layouts: of any precisions.
        on_verdict: called with each verdict as it is reached.

    Returns:
        One verdict a layout; a layout that can't run is refused, with the reason.
    """
    try:
        built, trial = _read_model(case)
    except MeshwrightError as error:
        refusals = [Verdict.unproven(str(layout), refused=str(error)) for layout in layouts]
        for verdict in refusals:
            if on_verdict:
                on_verdict(verdict)
        return refusals
    if case.made_up and (words := trial.objective.words):
        batches = [_with_named_words(batch, words, step) for step, batch in enumerate(case.batches)]
        case = dataclasses.replace(case, batches=batches)
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="meshwright-verify-") as folder:
        references: dict[str, References] = {}
        analyses: dict[Hashable, ModelAnalysis] = {}
        read_path, reference = Path(), dict[str, Any]()
        for layout in layouts:
            if layout.precision not in references:
                references[layout.precision] = References(case, Path(folder), layout.precision, trial)
            path, refusal = references[layout.precision].reference_for(layout)
            analyses.setdefault(
                (layout.degree(Mechanics.MATRICES), layout.degree(Mechanics.TOKENS)), ModelAnalysis(trial=trial)
            )
            if not refusal and path != read_path:
                # Read here, once: ranks are forked with it. On the CPU: where CUDA is initialised none can be forked.
                read_path, reference = path, torch.load(path, map_location="cpu", weights_only=True)
            verdicts.append(
                Verdict.unproven(str(layout), refused=refusal)
                if refusal
                else _prove_layout(case, built, layout, reference, analyses)
            )
            if on_verdict:
                on_verdict(verdicts[-1])
    return verdicts


def _read_model(case: Case) -> tuple[BuiltModel, ForwardTrial]:
    """Builds the model, which every rank finds in memory as those of a run do, and tries its forward."""
    built = case.build()
    try:
        return built, try_forward(built)
    except PlanError:
        # Random numbers that can't be placed don't end it: `one_device` says in which part they are drawn, and in
        # evaluation mode there may be none.
        return built, try_forward(built, training=False)


def _launcher(ranks: int, layout: Layout | None, kind: Literal["cpu", "cuda"] | None) -> ForkLauncher:
    return ForkLauncher(ranks, devices=found_devices(ranks, kind), label=layout.coordinates if layout else None)


def _prove_layout(
    case: Case, built: BuiltModel, layout: Layout, reference: Expected, analyses: dict[Hashable, ModelAnalysis]
) -> Verdict:
    """Returns the verdict on one layout; whatever goes wrong under it is its own, and ends no other proof."""
    try:
        device = found_devices(layout.world, case.device).kind
        check(layout, device, len(built.structure.layers))
        key = (layout.degree(Mechanics.MATRICES), layout.degree(Mechanics.TOKENS))
        split_degree = layout.degree(Mechanics.MATRICES) * layout.degree(Mechanics.TOKENS)
        if case.rescaled and split_degree > 1 and analyses[key].table is None and not built.config.sharding:
            trial = analyses[key].trial
            table = sharding_table(built, split_degree, trial.objective if trial else None, narrow=NARROW)
            analyses[key] = dataclasses.replace(analyses[key], table=table)
        analysis = analyse_model(built, layout, analyses.get(key), tokens=max(case.lengths))
        analyses[key] = analysis
        for batch in case.batches:
            check_shapes(analysis, layout, *batch.tokens.shape)
    except MeshwrightError as error:
        return Verdict.unproven(str(layout), refused=str(error))
    except Exception as error:
        return Verdict.unproven(str(layout), crashed=one_line(error))
    scope = read_scope(built, layout, analysis, case.lengths, case.rescaled)
    try:
        launcher = _launcher(layout.world, layout, case.device)
        ranks = launcher.run(_train_under_layout, case, built, layout, reference, analysis, timeout_s=case.timeout_s)
        used_experts, idle_experts = expert_use(built, list(reference["gradients"].values()))
        shares_by_axis = split_shares(ranks, layout)
        scope = dataclasses.replace(scope, split=shares_by_axis, experts_used=used_experts, experts_idle=idle_experts)
    except (ConfigError, PlanError) as error:
        return Verdict.unproven(str(layout), refused=str(error))
    except Exception as error:  # a rank that raised, died or hung
        return Verdict.unproven(str(layout), crashed=one_line(error), scope=scope)
    return merge_ranks(str(layout), ranks, scope, allow_whole=case.allow_whole)


def _train_under_layout(
    context: RankContext, case: Case, built: BuiltModel, layout: Layout, reference: Expected, facts: ModelAnalysis
) -> dict[str, object]:
    """Trains under the layout on this rank and compares its parts with the reference."""
    torch.set_num_threads(1)
    init_group(context, timeout_s=case.timeout_s, group_s=GROUP_S)
    if layout.compress.exact_steps:
        # The proof's few steps see the method too, all but the first of them.
        compress = dataclasses.replace(layout.compress, exact_steps=min(1, len(case.batches) - 1))
        layout = dataclasses.replace(layout, compress=compress)
    device = torch.device(context.device)
    plan = Plan(layout=layout, prediction=Prediction(memory={}), ranks=layout.world, reason="to be proven")
    wire = WireOptions(timeout_s=case.timeout_s)
    program = build_program(built, plan, device, facts=facts, wire=wire)
    for stage in program.stages:
        stage.module.train(case.training)
    is_lossy = layout.is_lossy
    if layout.compress.keeps_errors:
        # Of a clone no weight may be large enough.
        is_lossy = any(layout.compress.leaves_out(weight.shape, weight.local.shape) for weight in program.weights)
    assert program.mesh is not None or layout.world == 1
    sums = CompressedSums(program, layout, SEED)
    recipe = case.recipe
    config = OptimizerConfig(
        lr=recipe.lr,
        beta1=recipe.betas[0],
        beta2=recipe.betas[1],
        eps=recipe.eps,
        weight_decay=recipe.weight_decay,
        clip=recipe.clip,
    )
    optimizer = LocalAdamW(program.weights, config, on_host=layout.offload == "optimizer")
    scaler = LossScaler(layout.precision == "fp16")
    scaler.scale = reference.get("scale", scaler.scale)
    stepper = Stepper(program, optimizer, scaler, clip=recipe.clip, seed=SEED)
    outer: OuterOptimizer | None = None
    if layout.islands > 1:
        # Each island has losses and gradients of its own; the weights after the last join are those of all.
        reference = {**reference, **reference["islands"][layout.island(context.rank)]}
        rounds = OuterConfig(**dataclasses.asdict(case.outer))
        stepper.outer = outer = OuterOptimizer(program, rounds, optimizer.weights_changed)
    held_elements = {weight.name: (math.prod(weight.shape), weight.sharded_on) for weight in program.weights}
    difference = Difference(reference, layout.precision, floor=recipe.lr * len(case.batches))
    for step, batch in enumerate(case.batches):
        share, targets = _rank_micro_batches(batch, layout, context.rank, device), int((batch.targets != IGNORED).sum())
        compared = step in reference["gradients"]
        sums.begin_step(step)
        stepper.probe = partial(difference.gradient, step, program.weights) if compared else None
        # A plan that miscounts by a power of two changes no bit: gradients are normalised by the true count.
        planned_targets = 2 * targets if layout.precision == "float64" else targets
        outcome = stepper.run(step, share, planned_targets, recipe.lr, False).read()
        sums.finish_step(bool(outcome["finite"]))
        difference.outcome(step, outcome["loss"], outcome["grad_norm"])
        if outer is not None:
            outer.after_step(step + 1, outcome["targets"], outcome["loss"], step + 1 == len(case.batches))
    difference.trained(program.weights, len(case.batches))
    for stage in program.stages:
        difference.changed(stage.module.named_buffers())
    rounding = {"method": sums.method, "distance": sums.distance, "expected": is_lossy}
    return difference.deviations | {"held": held_elements, "rounding": rounding}


def _rank_micro_batches(batch: MicroBatch, layout: Layout, rank: int, device: torch.device) -> list[MicroBatch]:
    """Cuts a rank's rows out of a global batch, and those into micro-batches."""
    own_rows, microbatches = slice(*layout.span(rank, len(batch.tokens))), layout.microbatches
    positions = (
        [None] * microbatches if batch.positions is None else list(batch.positions[own_rows].chunk(microbatches))
    )
    chunks = zip(batch.tokens[own_rows].chunk(microbatches), batch.targets[own_rows].chunk(microbatches), positions)
    return [
        to_device(MicroBatch(tokens, targets, position_chunk), device) for tokens, targets, position_chunk in chunks
    ]


def _with_named_words(batch: MicroBatch, words: Sequence[int], step: int) -> MicroBatch:
    """Returns a batch of which some tokens and targets are words that a loss names."""
    tokens, targets = (
        with_words(ids, words, 2 * step + place) for place, ids in enumerate((batch.tokens, batch.targets))
    )
    return dataclasses.replace(batch, tokens=tokens, targets=targets)


def random_batches(
    steps: int, rows: int, sequence: int | Sequence[int], vocab: int, documents: bool
) -> list[MicroBatch]:
    """Makes global batches whose target counts differ by row, so that a count per rank can't pass for a global one.

    Args:
        steps: number of batches.
        rows: rows of each.
        sequence: tokens a row; of several lengths the batches take turns.
        vocab: token ids are below this.
        documents: whether documents begin inside rows.
    """
    lengths = [sequence] if isinstance(sequence, int) else list(sequence)
    return [_made_up_batch(step, rows, lengths[step % len(lengths)], vocab, documents) for step in range(steps)]


def _made_up_batch(step: int, rows: int, sequence: int, vocab: int, documents: bool) -> MicroBatch:
    generator = torch.Generator().manual_seed(1000 + step)
    stream = torch.randint(0, vocab, (rows, sequence + 1), generator=generator)
    tokens, targets = stream[:, :-1].contiguous(), stream[:, 1:].clone()
    ignored_share = torch.linspace(0.0, 0.5, rows).unsqueeze(1)
    targets[torch.rand(rows, sequence, generator=generator) < ignored_share] = -100
    positions = None
    if documents:
        document_starts = torch.rand(rows, sequence, generator=generator) < 2.0 / sequence
        document_starts[:, 0] = True
        indices = torch.arange(sequence).expand(rows, sequence)
        positions = indices - torch.where(document_starts, indices, 0).cummax(dim=1).values
    return MicroBatch(tokens, targets, positions)
