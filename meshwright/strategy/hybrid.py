"""Runs a layout on a custom model in a custom loop: the runtime's axes on any module, stepped by `loss.backward()`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from meshwright.errors import ConfigError
from meshwright.parallel.model_source import Fill
from meshwright.parallel.weights import Weight
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout
from meshwright.strategy.custom_module import Model
from meshwright.strategy.forward_hooks import ForwardHooks
from meshwright.strategy.gradient_sync import GradientSync
from meshwright.strategy.loop_build import LoopUses, build_for_loop
from meshwright.strategy.loss_weights import Loss
from meshwright.strategy.mesh import Dim, as_layout, choose_layout, merge_dim, refuse_unsupported
from meshwright.strategy.module_state import original_parameters, refuse_uses_of, send_weights, settle_module
from meshwright.strategy.pipeline import PipelineEngine
from meshwright.strategy.sharded_model import ShardedModel
from meshwright.strategy.target_loss import TargetLoss


class HybridParallelStrategy:
    """Runs replicate, shard, tp and ep on a custom model in a custom loop.

    ::

        strategy = HybridParallelStrategy("replicate=2,tp=2")
        model = strategy.shard(model)
        optimizer = strategy.optimizer(torch.optim.AdamW, lr=1e-3)
        for x, y in loader:                       # DistributedSampler(data, count, index) of strategy.reader
            loss = loss_of(model(x), y)           # the mean over this rank's rows
            loss.backward()
            strategy.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

    Gradients are those of the mean of the readers' losses: of the mean over the global batch, where every reader has as
    many rows (or targets) and the loss is a mean over them. `loss` does so for any number of targets.

    Args:
        layout: degrees of ``replicate``, ``shard`` (with ``zero``), ``tp`` (with ``sequence``) and ``ep``, and
            ``recompute``, ``precision``, ``compile``, ``offload=parameters``; with ``pp`` the strategy runs the model
            itself, by `step`. Or a mesh whose dims are named as axes.
        device_mesh: another name of ``layout``, for a mesh; also where dims that are given by name are looked up.
        data_parallel_dim: instead of a layout: ranks of ``replicate``, a number or a dim of a mesh, as ``mesh["dp"]``.
        shard_dim: ranks of ``shard``.
        tensor_parallel_dim: ranks of ``tp``.
        pipeline_parallel_dim: ranks of ``pp``.
        pipeline_parallel_size: the same as a number.
        expert_parallel_dim: ranks of ``ep``, over which experts are dealt out; a dim of a mesh of its own reads rows of
            its own.
        zero: level of the dim of ``shard``; 3 when None.
        split_vocabulary: under ``tp``, split the head too: logits are then of a shard of the vocabulary, and the loss
            must be `loss`. Without it logits are whole.
        average: whether gradients are means over the readers, not sums.
        local_batch_norm: let BatchNorm compute its statistics over each rank's rows, as DistributedDataParallel does.
        local_rows: let all that looks at several rows of a call (experts with a capacity, norms) see each call's alone.

    Raises:
        PlanError: for a layout that doesn't fit the ranks, or that a custom loop can't run.
        ConfigError: when there is no process group.
    """

    def __init__(
        self,
        layout: Layout | str | DeviceMesh | None = None,
        *,
        device_mesh: DeviceMesh | None = None,
        data_parallel_dim: Dim = None,
        shard_dim: Dim = None,
        tensor_parallel_dim: Dim = None,
        pipeline_parallel_dim: Dim = None,
        pipeline_parallel_size: int | None = None,
        expert_parallel_dim: Dim = None,
        zero: int | None = None,
        split_vocabulary: bool = False,
        average: bool = True,
        local_batch_norm: bool = False,
        local_rows: bool = False,
    ) -> None:
        dims = {
            "replicate": data_parallel_dim,
            "shard": shard_dim,
            "tp": tensor_parallel_dim,
            "pp": merge_dim(pipeline_parallel_dim, pipeline_parallel_size),
            "ep": expert_parallel_dim,
        }
        self.layout = as_layout(choose_layout(layout, device_mesh, dims, zero))
        refuse_unsupported(self.layout)
        self._engine: PipelineEngine | None = None
        self._split_vocabulary = split_vocabulary
        self.average = average
        """Whether gradients are means over the readers, not sums."""
        self._sharded_model: ShardedModel | None = None
        self._local_batch_norm, self._local_rows = local_batch_norm or local_rows, local_rows
        self._target_loss: TargetLoss | None = None

    @overload
    def shard(
        self,
        model: Model,
        optimizer: None = None,
        *,
        loss: Loss | None = None,
        microbatches: int | None = None,
        clip: float = 0.0,
        from_rank: int | None = None,
        example: torch.Tensor | None = None,
        device: torch.device | str | None = None,
        fill: Fill | None = None,
        seed: int = 1,
    ) -> nn.Module: ...

    @overload
    def shard(
        self,
        model: Model,
        optimizer: Optimizer,
        *,
        loss: Loss | None = None,
        microbatches: int | None = None,
        clip: float = 0.0,
        from_rank: int | None = None,
        example: torch.Tensor | None = None,
        device: torch.device | str | None = None,
        fill: Fill | None = None,
        seed: int = 1,
    ) -> tuple[nn.Module, Optimizer]: ...

    def shard(
        self,
        model: Model,
        optimizer: Optimizer | None = None,
        *,
        loss: Loss | None = None,
        microbatches: int | None = None,
        clip: float = 0.0,
        from_rank: int | None = None,
        example: torch.Tensor | None = None,
        device: torch.device | str | None = None,
        fill: Fill | None = None,
        seed: int = 1,
    ) -> nn.Module | tuple[nn.Module, Optimizer]:
        """Shards a model and returns this rank's shards; every rank calls it together.

        Args:
            model: with real weights, the same on all ranks; or a function that builds one, which is run on meta, so
                that no rank ever has all of it; or a module on meta, with ``fill``.
            optimizer: over the model's parameters; it is rebuilt over the shards, in place: groups, rates,
                state and schedulers stay. One that isn't handed in is refused at its next step.
            loss: (output, targets) to a mean over rows, or over targets other than -100, for `step`; cross-entropy
                when None. Given, or under ``pp``, the strategy runs forward and backward itself.
            microbatches: number of micro-batches of a `step`.
            clip: largest norm of the whole gradient in `step`; 0 for no clipping.
            from_rank: use the weights and buffers of this rank's module, where others hold other ones.
            example: one input (B, ...) of a model that doesn't take tokens (B, S); needed by ``tp``.
            device: where to compute; when None, this rank's GPU under nccl, else the weights' own; ``"meta"``: nowhere.
            fill: values of a box of a weight, by name, for a module on meta.
            seed: of the weights of a model that a function builds, and of dropout: each forward that trains draws anew,
                the same numbers for the same rows of the global batch under every layout. Where readers have unequal
                numbers of rows, some rows share theirs.

        Returns:
            The module itself (or the function's), its parameters float32 or float64 shards now; with the optimizer
            where one was given. Submodules keep their modes. After an error the module has lost its weights.

        Raises:
            PlanError: the model doesn't allow the layout.
            ConfigError: the weights can't be had, or aren't equal.
        """
        if self._sharded_model is not None:
            raise ConfigError("this strategy has sharded a model; make one for each model")
        if from_rank is not None:
            send_weights(model, from_rank)
        if self.layout.degree(Mechanics.STAGES) > 1 or loss is not None:
            return self._run_by_engine(model, optimizer, loss, microbatches, clip, example, device, fill)
        if microbatches is not None or clip:
            raise ConfigError("microbatches and clip are of step(): give a loss too, or do both in your own loop")
        # before sharding replaces the parameters that the optimizer has
        original = original_parameters(model, optimizer)
        uses = LoopUses(self._split_vocabulary, self.average, self._local_rows)
        sharded_model = self._sharded_model = build_for_loop(model, self.layout, example, device, fill, seed, uses)
        self.layout = sharded_model.layout
        refuse_uses_of(original, sharded_model.optimizers)
        module = sharded_model.program.module
        settle_module(module, sharded_model.program)
        self._target_loss = TargetLoss(sharded_model.program, self._sync().target_totals, self.reader[1], self.average)
        ForwardHooks(sharded_model, seed, self.reader, self._local_batch_norm).attach(module)
        return module if optimizer is None else (module, sharded_model.optimizers.rebuild(optimizer, original.names))

    def _run_by_engine(
        self,
        model: Model,
        optimizer: Optimizer | None,
        loss: Loss | None,
        microbatches: int | None,
        clip: float,
        example: torch.Tensor | None,
        device: torch.device | str | None,
        fill: Fill | None,
    ) -> nn.Module | tuple[nn.Module, Optimizer]:
        """Builds a pipeline engine, which runs forward and backward itself."""
        if fill is not None:
            raise ConfigError("fill= isn't for a strategy that runs the model by step(): give weights, or a function")
        if not self.average or self._split_vocabulary:
            raise ConfigError("average=False and split_vocabulary=True belong to a loop of one's own, not to step()")
        engine = self._engine = PipelineEngine(
            model,
            self.layout,
            loss,
            optimizer,
            microbatches,
            example=example,
            clip=clip,
            device=device,
            local_rows=self._local_rows,
        )
        stage = engine.modules[0]
        self._sharded_model, self.layout = engine.sharded_model, engine.layout
        return stage if optimizer is None else (stage, optimizer)

    def step(self, batch: Any) -> float:
        """Trains on one batch of this rank's reader and returns its loss, the mean over all readers.

        Args:
            batch: (inputs, targets), or a mapping with ``input_ids`` and ``labels``.

        Raises:
            ConfigError: nothing says what the loss is, or what updates the weights.
            DataError: the micro-batches don't divide the batch, or the loss is a mean over neither rows nor targets.
        """
        if self._engine is None:
            raise ConfigError("step() needs a loss: shard(model, optimizer, loss=...); without one, write the loop")
        return self._engine.step(batch)

    def evaluate(self, loader: Iterable[object]) -> float:
        """Returns the mean loss over every row, of a strategy that runs the model by `step`."""
        if self._engine is None:
            raise ConfigError("evaluate() needs a loss: shard(model, optimizer, loss=cross_entropy)")
        return self._engine.evaluate(loader)

    @property
    def reader(self) -> tuple[int, int]:
        """(index, count) of this rank among those that read other rows: ``rank`` and ``num_replicas`` of a sampler."""
        return self.layout.reader(torch.distributed.get_rank())

    @property
    def bytes(self) -> int:
        """Bytes of this rank's weights; a gradient or an optimizer moment costs as many again."""
        return self.sharded_model.bytes

    @property
    def weights(self) -> Sequence[Weight]:
        """Every trained weight of which this rank has a shard."""
        return self.sharded_model.program.weights

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Wraps forward and backward of all micro-batches of a step but the last: gradients add up, unreduced."""
        sync = self._sync()
        sync.is_last_backward = False
        try:
            yield
        finally:
            sync.is_last_backward = True

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clips the full model's gradient by its 2-norm over all shards; returns the norm before, a float64 scalar."""
        return self.sharded_model.clip(max_norm)

    def grad_norm(self) -> torch.Tensor:
        """Returns the 2-norm of the full model's gradient, a float64 scalar, the same on every rank."""
        return self.sharded_model.norm()

    def optimizer(
        self, make: Callable[..., torch.optim.Optimizer], groups: Iterable[object] | None = None, **settings: object
    ) -> torch.optim.Optimizer:
        """Creates an optimizer over this rank's shards, plain tensors; its `step` waits for reduced gradients.

        Args:
            make: a class of torch.optim, or another over parameters that works element by element.
            groups: parameters of the sharded model or groups of them, as torch takes them; all when None.
            **settings: of ``make``.
        """
        return self.sharded_model.optimizers.make_optimizer(make, groups, settings)

    def loss(
        self, logits: torch.Tensor, targets: torch.Tensor, total: torch.Tensor | float | None = None
    ) -> torch.Tensor:
        """Returns the mean cross-entropy over the targets of the global batch; -100 counts for nothing.

        ::

            total = strategy.count_targets([y for _, y in micro_batches])
            for number, (x, y) in enumerate(micro_batches, 1):
                with strategy.accumulate() if number < len(micro_batches) else contextlib.nullcontext():
                    strategy.loss(model(x), y, total).backward()

        Args:
            logits: (B, S, V), or this rank's shard of V.
            targets: (B, S) int64; those of (B, S) logits, nothing is shifted.
            total: targets of all micro-batches of the step and all readers, as `count_targets` gives it. When None,
                those of this call on all readers, which all ranks then call together: for a step of one micro-batch,
                or of several with equally many targets, divided by their number.

        Returns:
            A scalar whose mean over the readers (`mean`), summed over the step's micro-batches where a total was given,
            is that of all targets, exactly, however many each has.

        Raises:
            ConfigError: in backward, where micro-batches of a step were each divided by other numbers of targets, or
                have more than ``total``; here, without a total, in a task of `DynamicTaskScheduler`.
        """
        return self.target_loss.mean(logits, targets, total)

    def count_targets(self, targets: torch.Tensor | Iterable[torch.Tensor]) -> torch.Tensor:
        """Returns the number of targets of all readers, () float64, for `loss`; every rank calls it once a step.

        Args:
            targets: (...) int64 of this rank's reader: one tensor, or those of every micro-batch; -100 is none.
        """
        return self.target_loss.count(targets)

    @property
    def target_loss(self) -> TargetLoss:
        """What divides the loss by targets."""
        if self._target_loss is None:
            raise ConfigError("loss() is of a loop of one's own: call shard(model) first; with loss= or pp, use step()")
        return self._target_loss

    def mean(self, value: torch.Tensor | float) -> float:
        """Returns the mean of a number over the readers, for logging."""
        return self.sharded_model.average(value)

    def state_dict(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
        """Returns ``{"model": ..., "optimizer": ...}`` for torch.distributed.checkpoint, to save or to load in place.

        Each entry records its boxes of the full weight, so that any layout, or none, loads another's checkpoint.
        Numbers of the optimizer's groups (rates, decays) aren't part of it.
        """
        return self.sharded_model.state_dict(optimizer)

    @property
    def sharded_model(self) -> ShardedModel:
        """This rank's shards of the model."""
        if self._sharded_model is None:
            raise ConfigError("no model has been sharded yet; call shard(model) first")
        return self._sharded_model

    def _sync(self) -> GradientSync:
        sync = self.sharded_model.sync
        assert sync is not None
        return sync
