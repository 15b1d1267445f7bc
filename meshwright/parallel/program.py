"""A built layout that can run: micro-batches in, summed gradients and loss sums out."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import nn

from meshwright.parallel.compression import RoundingKey
from meshwright.parallel.dropout_rng import DropoutRng
from meshwright.parallel.error_feedback import ErrorFeedback
from meshwright.parallel.fsdp import reshard_all
from meshwright.parallel.halves import Halves
from meshwright.parallel.keyed_random import seed_all
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.moving_buffers import MovingBuffers
from meshwright.parallel.progress_hooks import LayerProgressHooks
from meshwright.parallel.stage_module import Compute, ExpertCounts, LossView, RowBatch, StageModule, Stamp
from meshwright.parallel.state_meter import StateMeter
from meshwright.parallel.step_timer import StepTimer
from meshwright.parallel.training_modes import evaluation_mode
from meshwright.parallel.turns import Held
from meshwright.parallel.weights import Weight, named_weights, refresh_compute
from meshwright.spec.axis import Mechanics

T = TypeVar("T")


class Program:
    """The model as this rank runs it under a layout.

    Args:
        stages: wrapped and materialised; exactly one here.
        compute: forward and loss of one micro-batch.
        view: what the loss must know of the layout.
        mesh: ranks and groups; None for a single rank without a process group.
        clock: books the parts of a step.
    """

    def __init__(
        self, stages: Sequence[StageModule], compute: Compute, view: LossView, mesh: Mesh | None, clock: StepTimer
    ) -> None:
        self.stages, self.mesh, self.step_timer, self.view = tuple(stages), mesh, clock, view
        self._compute = compute
        copies = 1
        if mesh is not None:
            copies = mesh.island.size // mesh.layout.degree(Mechanics.STAGES)
        self.weights: list[Weight] = []
        """Every trained weight that this rank holds a part of, once."""
        self.frozen: list[Weight] = []
        """Those that aren't trained."""
        self.twins: Sequence[Weight] = ()
        """Further copies of trained weights in other stages of this rank."""
        self.halves: Halves | None = None
        """Runs the halves of each micro-batch in turns; None where it runs as one."""
        self.before_sums: Callable[[], None] | None = None
        """Called in a step between its last backward and the sums over ranks."""
        self.after_sums: Callable[[], None] | None = None
        """Called behind these sums."""
        for stage in self.stages:
            for weight in named_weights(stage.module, stage.local_shards, copies, frozen=True, masters=stage.masters):
                (self.weights if weight.parameter.requires_grad else self.frozen).append(weight)
        self.reader_shares: Sequence[int] = mesh.layout.reader_shares() if mesh is not None else (1,)
        """Share of each reader in the rows of every micro-batch, which dynamic balance changes between steps."""
        self.progress_hooks = LayerProgressHooks()
        """Report which layer runs to their ``listener``."""
        self.dropout_rng: DropoutRng | None = None
        """Random numbers of forwards that may draw some."""
        self.rounding_key = RoundingKey()
        """Of the random roundings of compressed sums; every step sets it."""
        self.error_feedback: ErrorFeedback | None = None
        """What this copy owes under sums with error feedback."""
        self.expert_counts: ExpertCounts | None = None
        """Counts the tokens of each expert, in a mixture."""
        self.term_counts: Callable[[RowBatch], torch.Tensor] | None = None
        """What a micro-batch counts for in each term of the model's own loss, (1 + terms,) float64."""
        self.loss_terms: tuple[str, ...] = ()
        """Names of the terms that the sums have beside the cross-entropy."""
        self.counts_targets = False
        """Whether the model's own loss chooses which targets count."""
        self.moving_buffers = MovingBuffers([stage.module for stage in self.stages], ())
        """Buffers that forward changes."""
        modules, has_secondary = [stage.module for stage in self.stages], mesh is not None and mesh.layout.secondary > 0
        buffers = mesh.log.buffers if mesh is not None and mesh.layout.is_lossy else None
        self.state_meter: StateMeter | None = StateMeter(modules, self.weights, has_secondary, buffers)
        """Looks at the state's bytes while set; the trainer unsets it after the first steps."""

    @property
    def module(self) -> nn.Module:
        """The module of the first stage."""
        return self.stages[0].module

    @property
    def weights_device(self) -> torch.device:
        """The device of this rank's weights, also where none of them is trained."""
        return (self.weights or self.frozen)[0].local.device

    @property
    def ranks_per_batch(self) -> int:
        """Number of ranks that read the same rows and tokens."""
        if self.mesh is None:
            return 1
        shape = self.mesh.layout.within_island().shape()
        return math.prod(size for name, size in shape.items() if name not in self.mesh.loss_axes)

    @property
    def reporters(self) -> int:
        """Number of ranks that report the same loss sums: those along the axes that read the same data."""
        return self.ranks_per_batch

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, buffer) of the buffers that the model itself saves, and of those that forward changes."""
        for stage in self.stages:
            for prefix, child in stage.module.named_modules():
                for name, buffer in child._buffers.items():
                    full_name = f"{prefix}.{name}" if prefix else name
                    is_saved = name not in child._non_persistent_buffers_set or full_name in self.moving_buffers.names
                    if buffer is not None and is_saved:
                        yield full_name, buffer

    def hold(self, item: Held) -> None:
        """Has each half of a micro-batch, or pass of a pair, that runs in turns with another keep its own."""
        if self.halves is not None:
            self.halves.turns.hold(item)

    def change_reader_shares(self, shares: Sequence[int]) -> None:
        """Takes other shares of the rows, from the next step on; every rank calls it after the same step."""
        self.reader_shares = shares

    def forward_backward(
        self, batches: Sequence[RowBatch], scale: float, key: tuple[int, int], stamp: Stamp | None = None
    ) -> torch.Tensor:
        """Runs a step's micro-batches and sums gradients over every axis that reads other data.

        Args:
            batches: this rank's micro-batches, in order.
            scale: factor on the summed loss before backward.
            key: (seed, step) of its random numbers (dropout).
            stamp: where to report progress.

        Returns:
            This rank's (loss sum, target tokens, right predictions), float64, not yet summed over ranks.
        """
        sums_by_microbatch: list[torch.Tensor] = []
        self.rounding_key.seed, self.rounding_key.step = key
        # Tells the data axes whether a sum would be added to gradients, which must be complete then.
        no_gradients = all(weight.parameter.grad is None for weight in self.weights)
        buffers_before = self.moving_buffers.copy() if len(batches) > 1 else None
        for microbatch in range(len(batches)):
            if microbatch and buffers_before:
                self.moving_buffers.restore(
                    buffers_before
                )  # a step is one call of the model, in however many micro-batches
            for sync in self.stages[0].gradient_syncs:
                sync.begin_microbatch(microbatch == len(batches) - 1, no_gradients and microbatch == 0)
            if stamp:
                stamp.phase("forward", microbatch)
            loss, sums = self._run_forward(batches, microbatch, scale, key)
            self.step_timer.lap("forward")
            if self.state_meter is not None:
                self.state_meter.sample()
            if stamp:
                stamp.phase("backward", microbatch)
            loss.backward()
            self.progress_hooks.outside()
            sums_by_microbatch.append(sums)
            # Frees the micro-batch's graph before the next forward.
            del loss
            self.step_timer.lap("backward")
            if self.state_meter is not None:
                self.state_meter.sample()
        if self.before_sums is not None:
            self.before_sums()
        for sync in self.stages[0].gradient_syncs:
            sync.finish()
        if self.after_sums is not None:
            self.after_sums()
        self.step_timer.lap("reduce")
        return functools.reduce(torch.add, sums_by_microbatch)

    def _run_forward(
        self, batches: Sequence[RowBatch], microbatch: int, scale: float, key: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what `Compute` does of a micro-batch, whose halves may take turns."""

        def run(batch: RowBatch, first_row: int, _: object) -> tuple[torch.Tensor, torch.Tensor]:
            forward = functools.partial(self._compute, self.module, batch, scale, self.view)
            return self.forward_with_rng(forward, key, first_row, batch.tokens.shape)

        batch, row = batches[microbatch], self.first_row_of(batches, microbatch)
        if self.halves is None:
            return run(batch, row, ())
        one, other = self.halves.run(batch, row, run, ((), ()))
        return one[0] + other[0], one[1] + other[1]

    def first_row(self, rows: int) -> int:
        """Returns the number, in the global batch, of the first of the ``rows`` rows that this rank reads."""
        if self.mesh is None:
            return 0
        shares, reader = self.reader_shares, self.mesh.layout.reader(self.mesh.rank)[0]
        # Rows of one share, times the shares of the readers before this one.
        return rows // shares[reader] * sum(shares[:reader])

    def first_row_of(self, batches: Sequence[RowBatch], microbatch: int) -> int:
        """Returns the number, in the global batch, of the first row of one of this rank's micro-batches."""
        rows = [len(batch.tokens) for batch in batches]
        return self.first_row(sum(rows)) + sum(rows[:microbatch])

    def forward_with_rng(
        self, forward: Callable[[], T], key: tuple[int, int], first_row: int, shape: Sequence[int]
    ) -> T:
        """Runs the forward of some rows: its random numbers are those of their places in the global batch.

        Args:
            forward: runs it; it may be called twice.
            key: (seed, step).
            first_row: number of the first row in the global batch.
            shape: of the rows' tokens, (B, ...).
        """
        # What nobody foresaw draws from torch: at least the same numbers whenever the step is done again.
        seed_all(hash((*key, first_row)) % 2**63)
        if self.dropout_rng is None:
            return forward()
        # A forward that runs twice must start from the same buffers (batch norm's statistics).
        undo = functools.partial(self.moving_buffers.restore, self.moving_buffers.copy())
        return self.dropout_rng.run(key, first_row, shape, forward, undo)

    @torch.no_grad()
    def evaluate(self, batch: RowBatch) -> torch.Tensor:
        """Returns (loss sum, target tokens, right predictions) of one batch, without gradients."""
        buffers_before = self.moving_buffers.copy()
        try:
            with evaluation_mode([self.module]):
                return self._compute(self.module, batch, 1.0, self.view)[1]
        finally:
            self.moving_buffers.restore(buffers_before)

    def weights_changed(self, weights: Iterable[Weight] | None = None) -> None:
        """Frees or renews weights that compute, as the ranks' own parts changed outside of an update.

        Args:
            weights: those that changed; all of them when None.
        """
        for stage in self.stages:
            reshard_all(stage.module)
        refresh_compute((*self.weights, *self.frozen) if weights is None else weights)

    @torch.no_grad()
    def swap_weights(self, weights: Sequence[Weight], others: Sequence[torch.Tensor]) -> None:
        """Exchanges the rank's own parts of weights with other values.

        Args:
            weights: of this program.
            others: the other values, each of the shape and type of a weight's local part, on any device.
        """
        for weight, other in zip(weights, others, strict=True):
            own = weight.local.clone()
            weight.local.copy_(other)
            other.copy_(own)
        self.weights_changed()

    def clear_gradients(self) -> None:
        """Frees all gradients."""
        for weight in self.weights:
            weight.parameter.grad = None
