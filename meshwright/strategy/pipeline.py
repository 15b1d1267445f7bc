"""A pipeline for a module of one's own: stages cut out of it, a schedule that runs them, epochs over a loader."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from meshwright.axes.comm.wire import TrafficLog
from meshwright.errors import DataError, PlanError
from meshwright.models.anatomy import Anatomy
from meshwright.plan import Layout
from meshwright.runtime.build import build, check
from meshwright.runtime.clock import Clock
from meshwright.runtime.mesh import Mesh
from meshwright.runtime.program import Compute, LossView
from meshwright.strategy.facts import shared_facts
from meshwright.strategy.held import HeldModel
from meshwright.strategy.mesh import compute_device, ranks_of
from meshwright.strategy.own import Model, as_source, check_equal, precise, read_model
from meshwright.train.feed import MicroBatch
from meshwright.train.step import fill_missing

Loss = Callable[[Any, torch.Tensor], torch.Tensor]
"""(what the model gave, targets) to the mean over the rows (or targets) of a micro-batch."""
Make = Callable[[Any], torch.optim.Optimizer]
"""Parameters to an optimizer: ``functools.partial(torch.optim.AdamW, lr=1e-3)``."""


class PipelineEngine:
    """Trains a module of one's own as stages on the ranks of ``pp``, with data and tensor axes beside it.

    ::

        engine = PipelineEngine(model, "pp=2,replicate=2", loss, functools.partial(torch.optim.AdamW, lr=1e-3),
                                microbatches=4)
        for epoch in range(10):
            mean = engine.train_epoch(loader)     # DistributedSampler(data, count, index) of engine.reader

    The model repeats blocks, or is an `nn.Sequential`; its own forward runs on every stage, with the layers of other
    stages left out, and is proven on a small copy first. What it computes is what one device would, where no layer
    mixes rows: a BatchNorm sees micro-batches, and its running statistics one more forward than there were steps.

    Args:
        model: with real weights, the same on all ranks, or a function that builds one; see `HybridParallelStrategy`.
        layout: with ``pp``, and perhaps ``schedule``, ``split``, ``replicate``, ``shard``, ``tp``, ``ep``.
        loss: (output, targets) to a mean over rows; the output of a transformers model is its logits.
        optimizer: parameters to an optimizer, which is stepped after each batch.
        microbatches: parts that each batch is cut into; the layout's when None.
        example: one input (B, ...) of a model that doesn't take tokens (B, S).
        clip: largest norm of the whole gradient; 0 for no clipping.
        device: where to compute; when None, this rank's GPU under nccl, else where the weights are.

    Raises:
        PlanError: the layout fits neither the ranks nor the model.
        ConfigError: the model needs an example, or its weights differ between ranks.
    """

    def __init__(
        self,
        model: Model,
        layout: Layout | str,
        loss: Loss,
        optimizer: Make,
        microbatches: int | None = None,
        *,
        example: torch.Tensor | None = None,
        clip: float = 0.0,
        device: torch.device | str | None = None,
    ) -> None:
        plan = _with_microbatches(ranks_of(layout), microbatches)
        where = compute_device(model if isinstance(model, nn.Module) else None, device)
        built = read_model(model, seed=1)
        self.layout = plan = precise(plan, built)
        check(plan, where.type, len(built.anatomy.layers))
        self._mesh = Mesh(plan, where.type, TrafficLog())
        check_equal(built, self._mesh.world)
        facts = shared_facts(built, plan, example, split_vocabulary=False)
        source = as_source(built, facts, None, _compute(built.anatomy, loss))
        self._program = build(source, plan, self._mesh, where, Clock(where.type))
        self._program.meter = None
        self._held = HeldModel(self._program, plan, self._mesh.rank, built.anatomy.ties, _nothing, _nothing)
        self.optimizer = self._held.optimizer(optimizer, None, {})
        """Over this rank's parts; a scheduler of torch.optim may drive it."""
        self.steps = 0
        """Optimizer steps done."""
        self.norm: torch.Tensor | None = None
        """2-norm of the whole gradient in the last step, before it was clipped; None without clipping."""
        self._device, self._clip = where, clip

    @property
    def reader(self) -> tuple[int, int]:
        """(index, count) of this rank among those that read other rows: ``rank`` and ``num_replicas`` of a sampler."""
        return self._held.reader

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The stages that this rank runs; the layers of others have no weights in them."""
        return tuple(part.module for part in self._program.parts)

    @property
    def bytes(self) -> int:
        """Bytes of the weights that this rank holds."""
        return self._held.bytes

    def train_epoch(self, loader: Iterable[Any]) -> float:
        """Trains on every batch, a step each, and returns the mean loss.

        Args:
            loader: (inputs, targets) of this rank's reader, tensors of as many rows as every other reader's; ranks that
                read the same rows get the same batches.

        Raises:
            DataError: a batch doesn't divide into the micro-batches, or there is none.
        """
        return self._mean([self._step(*self._taken(batch)) for batch in loader])

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """Trains on one batch and returns its loss, the mean over all readers."""
        return self._mean([self._step(*self._taken((inputs, targets)))])

    def evaluate(self, loader: Iterable[Any]) -> float:
        """Returns the mean loss over every row, without training on it; batches may be of any size."""
        sums = [self._program.evaluate(MicroBatch(*self._moved(batch), None)) for batch in loader]
        self._held.release()
        return self._mean(sums)

    def state_dict(self) -> dict[str, Any]:
        """Returns weights and optimizer state for torch.distributed.checkpoint; see `HybridParallelStrategy`."""
        return self._held.state_dict(self.optimizer)

    def _moved(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = batch
        return inputs.to(self._device), targets.to(self._device)

    def _taken(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = self._moved(batch)
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
        readers = self.reader[1]
        count = self.layout.microbatches
        parts = [MicroBatch(x, y, None) for x, y in zip(inputs.chunk(count), targets.chunk(count))]
        sums = self._program.forward_backward(parts, 1.0 / (count * readers), (0, self.steps))
        fill_missing(self._program)
        if self._clip:
            self.norm = self._held.clip(self._clip)
        self.optimizer.step()
        self._program.clear_gradients()
        self.steps += 1
        return sums

    def _mean(self, sums: list[torch.Tensor]) -> float:
        """Sums (loss sum, rows) over batches and ranks."""
        if not sums:
            raise DataError("the loader gave no batch; with drop_last=True a part smaller than a batch gives none")
        total = torch.stack(sums).sum(dim=0)
        self._mesh.world.all_reduce(total).wait()
        return float(total[0] / total[1])


def _with_microbatches(layout: Layout, microbatches: int | None) -> Layout:
    """Refuses two answers, and what the engine can't run."""
    if microbatches is not None and layout.microbatches not in (1, microbatches):
        raise PlanError(
            f"microbatches={microbatches}, but the layout says microbatches={layout.microbatches}; give one of them"
        )
    if layout.degree("cp") > 1:
        raise PlanError(f"cp={layout.degree('cp')}: the engine's loss reads whole rows; use tp, or `meshwright train`")
    if layout.precision == "fp16":
        raise PlanError("precision=fp16 needs a loss scale that the engine lacks: write precision=bf16")
    if layout.offload == "optimizer":
        raise PlanError("offload=optimizer belongs to the trainer's own AdamW: write offload=parameters")
    return dataclasses.replace(layout, microbatches=microbatches or layout.microbatches)


def _compute(anatomy: Anatomy, loss: Loss) -> Compute:
    """The computation of a micro-batch; its sums are (loss x rows, rows, 0)."""

    def compute(module: nn.Module, batch: MicroBatch, scale: float, _: LossView) -> tuple[torch.Tensor, torch.Tensor]:
        plain = not anatomy.transformers
        output: Any = module(batch.tokens) if plain else module(batch.tokens, use_cache=False).logits
        found = loss(output, batch.targets)
        value = found.detach().to(torch.float64) * len(batch.targets)
        rows = torch.full_like(value, float(len(batch.targets)))
        return found * scale, torch.stack([value, rows, torch.zeros_like(value)])

    return compute


def _nothing() -> None:
    """Gradients are whole once the schedule has run."""
