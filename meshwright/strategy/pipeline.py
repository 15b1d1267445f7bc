"""Trains a custom module as a pipeline: cuts stages, runs a schedule over them, and steps on a loader's batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy

from meshwright.errors import ConfigError, DataError, PlanError
from meshwright.models.structure import ModelStructure, read_structure
from meshwright.parallel.axis_group import TrafficLog
from meshwright.parallel.build import build, check
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.program import Program
from meshwright.parallel.stage_module import Compute, LossView
from meshwright.parallel.step_timer import StepTimer
from meshwright.parallel.training_modes import set_training_modes, training_modes
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout
from meshwright.strategy.custom_module import Model, check_equal, make_model_source, read_model, with_compute_precision
from meshwright.strategy.mesh import as_layout, compute_device
from meshwright.strategy.module_state import original_parameters
from meshwright.strategy.sharded_model import ShardedModel
from meshwright.strategy.shared_analysis import broadcast_analysis
from meshwright.torch_compat.tensors import tree_leaves
from meshwright.train.feed import MicroBatch
from meshwright.train.loss import IGNORED
from meshwright.train.step import fill_missing

Loss = Callable[[Any, torch.Tensor], torch.Tensor]
"""(output, targets) to the mean over the rows (or targets) of a micro-batch; of whole numbers -100 is no target."""
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
        loss: (output, targets) to a mean over rows; the output of a transformers model is its logits. Cross-entropy
            when None.
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

    Raises:
        PlanError: the layout fits neither the ranks nor the model.
        ConfigError: the weights differ between ranks, or something is missing or given twice.
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
    ) -> None:
        if microbatches is not None and num_microbatches is not None:
            raise ConfigError("microbatches and num_microbatches are one number: give one of them")
        plan = as_layout(_layout_or_mesh(layout, device_mesh))
        self.layout = _with_microbatches(plan, num_microbatches if microbatches is None else microbatches)
        self._model = _single_module(model, model_stages)
        self._loss, self._optimizer_source, self._clip = loss or mean_cross_entropy, optimizer, clip
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
        self.layout = plan = with_compute_precision(self.layout, built)
        check(plan, self._device.type, len(built.structure.layers))
        self._mesh = Mesh(plan, self._device.type, TrafficLog())
        # before any stage is cut: unequal weights would train without an error
        check_equal(built, self._mesh.world)
        # the engine's loss reads full logits
        analysis = broadcast_analysis(built, plan, example, split_vocabulary=False)
        source = make_model_source(built, analysis, None, _compute(built.structure, self._loss))
        program = build(source, plan, self._mesh, self._device, StepTimer(self._device.type))
        program.state_meter = None
        # A model that evaluates as a whole, as from_pretrained gives it, is trained here all the same.
        if modes[""]:
            for stage in program.stages:
                set_training_modes(stage.module, modes)
        sharded_model = ShardedModel(program, plan, self._mesh.rank, built.structure.ties)
        # an optimizer of the replaced parameters would train nothing
        sharded_model.optimizers.mark_stale(original.parameters)
        optimizer = self._optimizer_source or torch.optim.AdamW
        if isinstance(optimizer, torch.optim.Optimizer):
            sharded_model.optimizers.rebuild(optimizer, original.names)
        else:
            optimizer = sharded_model.optimizers.make_optimizer(optimizer, None, {})
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
            DataError: a batch doesn't divide into the micro-batches, or there is none.
        """
        return self._mean([self._step(*self._training_batch(batch)) for batch in loader])

    def step(self, inputs: object, targets: torch.Tensor | None = None) -> float:
        """Trains on one batch, (inputs, targets) or in a form of `train_epoch`; returns its loss over all readers."""
        return self._mean([self._step(*self._training_batch(inputs if targets is None else (inputs, targets)))])

    def evaluate(self, loader: Iterable[object]) -> float:
        """Returns the mean loss over every row, without training on it; batches may be of any size."""
        sums = [self._program.evaluate(MicroBatch(*self._on_device(batch), None)) for batch in loader]
        # no backward frees the gathered weights
        self.sharded_model.release()
        return self._mean(sums)

    def state_dict(self) -> dict[str, Any]:
        """Returns weights and optimizer state for torch.distributed.checkpoint; see `HybridParallelStrategy`."""
        return self.sharded_model.state_dict(self.optimizer)

    def _on_device(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (inputs, targets) of a batch, (B, ...) each, on this rank's device."""
        inputs, targets = inputs_and_targets(batch)
        return inputs.to(self._device), targets.to(self._device)

    def _training_batch(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (inputs, targets) of a batch for training, (B, ...) each, and builds the engine at the first."""
        inputs, targets = self._on_device(batch)
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
        return inputs, targets

    def _step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Trains on one batch; returns (3,) float64: loss sum, targets, and 0."""
        self._program.step_timer.lap("data")
        count = self.layout.microbatches
        batches = [
            MicroBatch(inputs_chunk, targets_chunk, None)
            for inputs_chunk, targets_chunk in zip(inputs.chunk(count), targets.chunk(count))
        ]
        # the loss is a mean over targets: each micro-batch is weighted by its number of those of all readers
        random_step = self.sharded_model.random_step
        scale = 1.0 / max(1.0, self._targets_of_all(targets))
        sums = self._program.forward_backward(batches, scale, (0, int(random_step)))
        random_step += 1
        # a weight without a gradient on this rank may have one on another
        fill_missing(self._program)
        if self._clip:
            self.norm = self.sharded_model.clip(self._clip)
        self._program.step_timer.lap("norm")
        self.optimizer.step()
        self._program.clear_gradients()
        self._program.step_timer.lap("optimizer")
        self.steps += 1
        return sums

    def _targets_of_all(self, targets: torch.Tensor) -> float:
        """Returns how many targets all readers have in a step; ``targets: (B, ...)`` are this rank's."""
        total = torch.tensor(float(_count_targets(targets)), dtype=torch.float64, device=self._device)
        self._mesh.world.all_reduce(total).wait()
        # ranks that read the same rows, by which the sum over the world overcounts
        return float(total) * self.reader[1] / self.layout.world

    def _mean(self, sums: list[torch.Tensor]) -> float:
        """Sums (3,) rows of (loss sum, targets, 0) over batches and ranks; returns the mean loss."""
        if not sums:
            raise DataError("the loader gave no batch; with drop_last=True a part smaller than a batch gives none")
        total = torch.stack(sums).sum(dim=0)
        self._mesh.world.all_reduce(total).wait()
        return float(total[0] / total[1].clamp(min=1.0))


def mean_cross_entropy(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross-entropy, a scalar.

    Args:
        output: (..., V) logits.
        targets: (...) int64; -100 counts for nothing.
    """
    return cross_entropy(output.flatten(0, -2), targets.flatten())


def inputs_and_targets(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (inputs, targets) of a batch: a pair, or the ``input_ids`` and ``labels`` of a language model.

    Labels are shifted here, as transformers' models do: the target of a token is the label of the next.

    Raises:
        DataError: for anything else.
    """
    if isinstance(batch, Mapping):
        tokens, labels = batch.get("input_ids"), batch.get("labels")
        mask = batch.get("attention_mask")
        if tokens is not None and labels is not None:
            if mask is not None and not bool(mask.all()):
                raise DataError("the batch is padded (attention_mask has zeros): pack rows to one length instead")
            # the last token of a row has no next token
            return tokens, torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    elif isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    raise DataError("a batch is a pair (inputs, targets), or a mapping with input_ids and labels")


def takes_tokens(model: nn.Module) -> bool:
    """Returns whether a model has a token embedding, so that trials can run it on tokens."""
    return read_structure(model).embedding is not None


def _layout_or_mesh(layout: Layout | str | DeviceMesh | None, mesh: DeviceMesh | None) -> Layout | str | DeviceMesh:
    """Returns the one of two names that was given; a mesh of one dim without a name is the pipeline."""
    if (layout is None) == (mesh is None):
        raise ConfigError("give one of layout, as 'pp=4', and device_mesh")
    layout_or_mesh = mesh if layout is None else layout
    if isinstance(layout_or_mesh, DeviceMesh) and layout_or_mesh.ndim == 1 and layout_or_mesh.mesh_dim_names is None:
        return f"pp={layout_or_mesh.size()}"
    assert layout_or_mesh is not None
    return layout_or_mesh


def _single_module(model: Model | None, stages: Sequence[nn.Module] | None) -> Model:
    """Returns the model, or its stages as one `nn.Sequential`."""
    if (model is None) == (stages is None):
        raise ConfigError("give one of model and model_stages, a list of modules that run one after another")
    if stages is None:
        assert model is not None
        return model
    for index, stage in enumerate(stages):
        if not isinstance(stage, nn.Module):
            raise ConfigError(f"model_stages[{index}] is a {type(stage).__name__}: give modules")
    return nn.Sequential(*stages)


def _with_microbatches(layout: Layout, microbatches: int | None) -> Layout:
    """Returns the layout with a number of micro-batches; refuses two different numbers, and unsupported choices."""
    # 1 is the layout's default, so it isn't a second answer
    if microbatches is not None and layout.microbatches not in (1, microbatches):
        raise PlanError(
            f"microbatches={microbatches}, but the layout says microbatches={layout.microbatches}; give one of them"
        )
    if layout.degree(Mechanics.TOKENS) > 1:
        raise PlanError(
            f"{layout.format_degree(Mechanics.TOKENS)}: "
            "the engine's loss reads whole rows; use tp, or `meshwright train`"
        )
    if layout.precision == "fp16":
        raise PlanError("precision=fp16 needs a loss scale that the engine lacks: write precision=bf16")
    if layout.offload == "optimizer":
        raise PlanError("offload=optimizer belongs to the trainer's own AdamW: write offload=parameters")
    return dataclasses.replace(layout, microbatches=microbatches or layout.microbatches)


def _count_targets(targets: torch.Tensor) -> int:
    """Returns how many entries of ``targets: (B, ...)`` a mean is over; -100 is none among whole numbers."""
    return targets.numel() if targets.is_floating_point() else int((targets != IGNORED).sum())


def _compute(structure: ModelStructure, loss: Loss) -> Compute:
    """Returns the computation of a micro-batch; its sums are (loss x targets, targets, 0)."""

    def compute(module: nn.Module, batch: MicroBatch, scale: float, _: LossView) -> tuple[torch.Tensor, torch.Tensor]:
        is_plain_module = not structure.transformers
        output: Any = module(batch.tokens) if is_plain_module else module(batch.tokens, use_cache=False).logits
        number = _count_targets(batch.targets)
        # a mean over no target is NaN, and so is its gradient: such rows add nothing
        micro_batch_loss = loss(output, batch.targets) if number else _nothing(output)
        # a mean becomes a sum, so that batches of any size add up
        loss_sum = micro_batch_loss.detach().to(torch.float64) * number
        targets = torch.full_like(loss_sum, float(number))
        return micro_batch_loss * (scale * number), torch.stack([loss_sum, targets, torch.zeros_like(loss_sum)])

    return compute


def _nothing(output: Any) -> torch.Tensor:
    """Returns a scalar 0 with a gradient of 0 by every tensor of a model's output."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return torch.stack([(leaf * 0.0).sum() for leaf in tensors]).sum()
