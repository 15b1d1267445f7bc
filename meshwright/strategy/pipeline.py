"""Trains a custom module as a pipeline: cuts stages, runs a schedule over them, and steps on a loader's batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.errors import ConfigError, DataError
from meshwright.parallel.axis_group import TrafficLog
from meshwright.parallel.build import build, check
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.program import Program
from meshwright.parallel.step_timer import StepTimer
from meshwright.parallel.training_modes import set_training_modes, training_modes
from meshwright.spec.layout import Layout
from meshwright.strategy.custom_module import Model, check_equal, make_model_source, read_model, with_compute_precision
from meshwright.strategy.first_call import FirstCall
from meshwright.strategy.loss_weights import (
    Loss,
    LossBatch,
    TargetCounts,
    count_row_targets,
    known_rule,
    mean_cross_entropy,
    mean_of_sums,
    most_unequal,
    scalar_loss,
    try_rules,
    weighted_compute,
)
from meshwright.strategy.mesh import as_layout, compute_device, refuse_uneven_tokens
from meshwright.strategy.module_state import original_parameters, refuse_uses_of
from meshwright.strategy.pipeline_arguments import (
    inputs_and_targets,
    layout_or_mesh,
    single_module,
    takes_tokens,
    with_microbatches,
)
from meshwright.strategy.reached_weights import ReachedWeights
from meshwright.strategy.sharded_model import ShardedModel
from meshwright.strategy.shared_analysis import broadcast_analysis

Make = Callable[[Any], torch.optim.Optimizer]
"""Parameters to an optimizer: ``functools.partial(torch.optim.AdamW, lr=1e-3)``."""


class PipelineEngine:
    """Trains a custom module as stages on the ranks of ``pp``, with data and tensor axes beside it.

    ::

        engine = PipelineEngine(model, "pp=2,replicate=2", loss, functools.partial(torch.optim.AdamW, lr=1e-3),
                                microbatches=4)
        for epoch in range(10):
            mean = engine.train_epoch(loader)     # DistributedSampler(data, count, index) of engine.reader

    The model repeats blocks, or is an `nn.Sequential`; its own forward runs on every stage, with the layers of other
    stages left out, and is proven on a small copy first. The result equals one device's where no layer
    mixes rows: a BatchNorm sees micro-batches, and its running statistics one more forward than there were steps.
    Submodules in eval mode stay in it; a model that is in eval mode as a whole is trained.

    Args:
        model: with real weights, the same on all ranks, or a function that builds one; see `HybridParallelStrategy`.
        layout: with ``pp``, and perhaps ``schedule``, ``split``, ``replicate``, ``shard``, ``tp``, ``ep``; or a mesh.
        loss: (output, targets) to a mean over rows, or over targets other than -100; which of the two is tried on the
            first batches, and one that is neither is refused. The output of a transformers model is its logits.
            Cross-entropy when None.
        optimizer: parameters to an optimizer, which is stepped after each batch, or an optimizer of the model's
            parameters. AdamW at torch's own settings when None.
        microbatches: number of micro-batches of each batch; the layout's when None.
        model_stages: instead of ``model``: modules that run one after another, at least one for each rank of ``pp``.
        device_mesh: instead of ``layout``: of one dim, which is the pipeline, or of named dims.
        num_microbatches: another name of ``microbatches``.
        example: one input (B, ...) of a model that doesn't take tokens (B, S); without it such a model is built at the
            first batch.
        clip: largest norm of the whole gradient; 0 for no clipping.
        device: where to compute; when None, this rank's GPU under nccl, else where the weights are.
        local_rows: let what looks at several rows of a call see those of each reader's micro-batch alone.

    Raises:
        PlanError: the layout fits neither the ranks nor the model.
        ConfigError: the weights differ between ranks, or something is missing or given twice.
        DataError: in a step, the loss of all rows isn't that of the micro-batches by rows or by targets.
    """

    def __init__(
        self,
        model: Model | None = None,
        layout: Layout | str | DeviceMesh | None = None,
        loss: Loss | None = None,
        optimizer: Make | torch.optim.Optimizer | None = None,
        microbatches: int | None = None,
        *,
        model_stages: Sequence[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
        num_microbatches: int | None = None,
        example: torch.Tensor | None = None,
        clip: float = 0.0,
        device: torch.device | str | None = None,
        local_rows: bool = False,
    ) -> None:
        if microbatches is not None and num_microbatches is not None:
            raise ConfigError("microbatches and num_microbatches are one number: give one of them")
        plan = as_layout(layout_or_mesh(layout, device_mesh))
        self.layout = with_microbatches(plan, num_microbatches if microbatches is None else microbatches)
        self._model = single_module(model, model_stages)
        self._loss, self._optimizer_source, self._clip = scalar_loss(loss or mean_cross_entropy), optimizer, clip
        self._weight_rule, self._local_rows = known_rule(loss), local_rows
        self._device = compute_device(self._model if isinstance(self._model, nn.Module) else None, device)
        self._built: tuple[Program, ShardedModel, torch.optim.Optimizer] | None = None
        self.steps = 0
        """Optimizer steps done."""
        self.norm: torch.Tensor | None = None
        """2-norm of the whole gradient in the last step, before it was clipped; None without clipping."""
        # otherwise the first batch is the example
        if example is not None or not isinstance(self._model, nn.Module) or takes_tokens(self._model):
            self._build(example)

    def _build(self, example: torch.Tensor | None) -> None:
        """Cuts the model into stages and binds the optimizer."""
        original = original_parameters(
            self._model, self._optimizer_source if isinstance(self._optimizer_source, torch.optim.Optimizer) else None
        )
        built = read_model(self._model, seed=1)
        modes = training_modes(built.module)
        names = list(dict(built.module.named_parameters(remove_duplicate=False)))
        self.layout = plan = with_compute_precision(self.layout, built)
        check(plan, self._device.type, len(built.structure.layers))
        self._mesh = Mesh(plan, self._device.type, TrafficLog())
        # before any stage is cut: unequal weights would train without an error
        check_equal(built, self._mesh.world)
        # the engine's loss reads full logits
        analysis = broadcast_analysis(built, plan, example, split_vocabulary=False)
        first_call = FirstCall(built, plan, self.reader[1], None, self._local_rows, plan.microbatches)
        source = make_model_source(built, analysis, None, weighted_compute(built.structure, self._loss))
        program = build(source, plan, self._mesh, self._device, StepTimer(self._device.type))
        program.state_meter = None
        # A model that evaluates as a whole, as from_pretrained gives it, is trained here all the same.
        if modes[""]:
            for stage in program.stages:
                set_training_modes(stage.module, modes)
        sharded_model = ShardedModel(program, plan, self._mesh.rank, built.structure.ties, first_call)
        refuse_uses_of(original, sharded_model.optimizers)
        optimizer = self._optimizer_source or torch.optim.AdamW
        if isinstance(optimizer, torch.optim.Optimizer):
            sharded_model.optimizers.rebuild(optimizer, original.names)
        else:
            optimizer = sharded_model.optimizers.make_optimizer(optimizer, None, {})
        reached = ReachedWeights(program, names, self._mesh.world if plan.world > 1 else None)
        program.before_sums, program.after_sums = reached.note, reached.complete
        self._built = program, sharded_model, optimizer

    def _require_built(self) -> tuple[Program, ShardedModel, torch.optim.Optimizer]:
        """Returns program, shards and optimizer; an error before the first batch of a model without tokens."""
        if self._built is None:
            raise ConfigError(
                "the engine is built at its first batch, since the model takes no tokens: give one input as example= "
                "to have it built at once"
            )
        return self._built

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer over this rank's shards; a scheduler of torch.optim may drive it."""
        return self._require_built()[2]

    @property
    def _program(self) -> Program:
        """This rank's stages."""
        return self._require_built()[0]

    @property
    def sharded_model(self) -> ShardedModel:
        """This rank's shards of the model."""
        return self._require_built()[1]

    @property
    def mesh(self) -> Mesh:
        """The ranks and their process groups."""
        return self._mesh

    @property
    def reader(self) -> tuple[int, int]:
        """(index, count) of this rank among those that read other rows: ``rank`` and ``num_replicas`` of a sampler."""
        return self.layout.reader(torch.distributed.get_rank())

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The stages that this rank runs; the layers of others have no weights in them."""
        return tuple(stage.module for stage in self._program.stages)

    @property
    def bytes(self) -> int:
        """Bytes of the weights that this rank holds."""
        return self.sharded_model.bytes

    def train_epoch(self, loader: Iterable[object]) -> float:
        """Trains on every batch, a step each, and returns the mean loss.

        Args:
            loader: (inputs, targets) of this rank's reader, tensors of as many rows as every other reader's; ranks that
                read the same rows get the same batches.

        Raises:
            DataError: a batch doesn't divide into the micro-batches, there is none, or the loss isn't of its parts.
        """
        return self._mean([self._step(*self._training_batch(batch)) for batch in loader])

    def step(self, inputs: object, targets: torch.Tensor | None = None) -> float:
        """Trains on one batch, (inputs, targets) or in a form of `train_epoch`; returns its loss over all readers."""
        return self._mean([self._step(*self._training_batch(inputs if targets is None else (inputs, targets)))])

    def evaluate(self, loader: Iterable[object]) -> float:
        """Returns the mean loss over every row or target, without training on it; batches may be of any size."""
        sums: list[torch.Tensor] = []
        for batch in loader:
            inputs, targets, counts = self._on_device(batch)
            if not sums and not self._weight_rule.is_decided and self._has_parts:
                self._try_weights([LossBatch(inputs, targets)], [counts], self._totals(counts), is_due=False)
            weight = counts.weight(not self._weight_rule.by_targets)
            sums.append(self._program.evaluate(LossBatch(inputs, targets, weight)))
        # no backward frees the gathered weights
        self.sharded_model.release()
        return self._mean(sums)

    def state_dict(self) -> dict[str, Any]:
        """Returns weights and optimizer state for torch.distributed.checkpoint; see `HybridParallelStrategy`."""
        return self.sharded_model.state_dict(self.optimizer)

    def _on_device(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor, TargetCounts]:
        """Returns (inputs, targets) of a batch, (B, ...) each, on this rank's device, and the targets of its rows."""
        inputs, targets = inputs_and_targets(batch)
        refuse_uneven_tokens(self.layout, inputs)
        # before they go to a GPU, which the host would wait for
        counts = count_row_targets(targets)
        return inputs.to(self._device), targets.to(self._device), counts

    def _training_batch(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor, TargetCounts]:
        """Returns what `_on_device` does of a batch for training, and builds the engine at the first."""
        inputs, targets, counts = self._on_device(batch)
        if self._built is None:
            self._build(inputs[:2])
        count = self.layout.microbatches
        if len(inputs) % count or not len(inputs):
            lower = len(inputs) // count * count
            near = " or ".join(str(item) for item in (lower, lower + count) if item)
            raise DataError(
                f"a batch of {len(inputs)} rows doesn't divide into {count} micro-batches; nearest that works: {near} "
                "rows; a loader's last batch is left out with drop_last=True"
            )
        return inputs, targets, counts

    def _step(self, inputs: torch.Tensor, targets: torch.Tensor, counts: TargetCounts) -> torch.Tensor:
        """Trains on one batch; returns (3,) float64: loss sum, rows or targets, micro-batches of a finite loss."""
        self._program.step_timer.lap("data")
        count, chunks = self.layout.microbatches, counts.chunks(self.layout.microbatches)
        batches = [LossBatch(*chunk) for chunk in zip(inputs.chunk(count), targets.chunk(count))]
        totals = self._totals(counts)
        self.sharded_model.first_call.try_call(self._program.stages[0].module, (inputs,), {})
        self.sharded_model.first_call.settle()
        self.sharded_model.agreement.before_schedule()
        # after steps 1, 2, 4, 8 and so on, as what ranks must agree on
        is_due = not self.steps & (self.steps + 1)
        if self._has_parts and self._weight_rule.needs_trial(is_due):
            self._try_weights(batches, chunks, totals, is_due)
        by_rows = not self._weight_rule.by_targets
        # each micro-batch weighs its part of the rows, or targets, of all readers
        total = totals[0 if by_rows else 1].clamp(min=1.0)
        batches = [
            dataclasses.replace(batch, weight=chunk.weight(by_rows), total=total)
            for batch, chunk in zip(batches, chunks)
        ]
        sums = self._program.forward_backward(batches, 1.0, (0, int(self.sharded_model.random_step)))
        self.sharded_model.random_step += 1
        if self._clip:
            self.norm = self.sharded_model.clip(self._clip)
        self._program.step_timer.lap("norm")
        self.optimizer.step()
        self._program.clear_gradients()
        self._program.step_timer.lap("optimizer")
        self.steps += 1
        return sums

    @property
    def _has_parts(self) -> bool:
        """Whether a step's loss is put together of several calls."""
        return self.layout.microbatches * self.reader[1] > 1

    def _totals(self, counts: TargetCounts) -> torch.Tensor:
        """Returns (4,) float64 of all readers' rows: rows, targets, targets of -100, and rows without a target."""
        rows, number = len(counts.rows), sum(counts.rows)
        values = [rows, number, rows * counts.entries - number, counts.rows.count(0)]
        totals = torch.tensor(values, dtype=torch.float64, device=self._device)
        self._mesh.world.all_reduce(totals).wait()
        # ranks that read the same rows, by which the sum over the world overcounts
        return totals * (self.reader[1] / self.layout.world)

    def _try_weights(
        self, batches: Sequence[LossBatch], counts: Sequence[TargetCounts], totals: torch.Tensor, is_due: bool
    ) -> None:
        """Tries on one or two micro-batches what the loss is a mean over; every rank calls it, and takes one answer.

        Args:
            batches: this rank's micro-batches.
            counts: their targets.
            totals: (4,) float64, of `_totals`.
            is_due: whether to try where no target is -100: rows and targets weigh the same there.
        """
        _, _, ignored, empty_rows = totals.tolist()
        if not (is_due or ignored):
            return
        parts = []
        for index in most_unequal(counts):
            outputs: list[Any] = []
            self._program.evaluate(dataclasses.replace(batches[index], outputs=outputs))
            if outputs:
                # a forward may run twice
                parts.append((outputs[-1], batches[index].targets))
        self.sharded_model.release()
        fails = try_rules(self._loss, parts, ignored, empty_rows) if parts else (False, False)
        votes = torch.tensor(fails, dtype=torch.float64, device=self._device)
        self._mesh.world.all_reduce(votes).wait()
        targets_fail, rows_fail = votes.tolist()
        self._weight_rule.exclude(targets_fail > 0, rows_fail > 0)

    def _mean(self, sums: list[torch.Tensor]) -> float:
        """Returns the mean loss over batches and ranks.

        Args:
            sums: a batch each, (3,) float64: loss sum, rows or targets, and micro-batches with a finite loss.
        """
        if not sums:
            raise DataError("the loader gave no batch; with drop_last=True a part smaller than a batch gives none")
        total = torch.stack(sums)
        self._mesh.world.all_reduce(total).wait()
        return mean_of_sums(total)
