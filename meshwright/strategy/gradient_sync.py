"""Reduces gradients to those of the global batch by the time `backward()` returns, whatever loop called it.

A backward through the sharded model opens a pass: gradients of an earlier pass are set aside, collectives are
announced, and a callback of the autograd engine ends the pass: reductions complete, the mean over readers is taken, and
the earlier gradients are added. So a second backward before the step adds up as it does on one device.
Source: Li et al., PyTorch Distributed (VLDB 2020), section 3.2, for the callback.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.errors import ConfigError
from meshwright.parallel.axis_group import AxisGroup
from meshwright.parallel.program import Program
from meshwright.parallel.weights import Weight, view_box
from meshwright.strategy.arrival_hooks import ArrivalHooks
from meshwright.strategy.reached_weights import ReachedWeights
from meshwright.strategy.sharded_gradient import is_sharded_gradient, plain_gradient, wrap_gradient
from meshwright.strategy.split_parameter import SplitWeightGuard
from meshwright.strategy.target_loss import TargetTotals
from meshwright.strategy.weight_reductions import maximum_over_ranks
from meshwright.torch_compat.tensors import (
    after_backward,
    foreach_mul_,
    in_backward,
    local_tensor,
    without_tensor_subclasses,
)


class GradientState(enum.Enum):
    """The meaning of `parameter.grad` between two backwards."""

    NONE = "none"
    """No backward yet."""
    LOCAL = "local"
    """Sums over this rank's micro-batches, unreduced."""
    SUMMED = "summed"
    """The gradient of the global batch."""


class GradientSync:
    """Drives the gradient reductions of a program through backwards that user code calls.

    Args:
        program: built, with one stage.
        readers: number of ranks that read other rows.
        average: whether gradients are means over the readers, not sums.
        publish: called when gradients are reduced, with None where a weight has none.
        guard: of the program's weights, which are plain within a backward.
    """

    def __init__(
        self, program: Program, readers: int, average: bool, publish: Callable[[], None], guard: SplitWeightGuard
    ) -> None:
        assert program.mesh is not None
        self._program, self._publish, self._guard = program, publish, guard
        self._world: AxisGroup = program.mesh.world
        names = [weight.name for weight in program.weights]
        self._reached = ReachedWeights(program, names, self._world if readers > 1 else None)
        self._mean = readers if average else 1
        self.target_totals = TargetTotals(self._world, program.mesh.layout.world // readers)
        """What the losses of a step were divided by."""
        self.state = GradientState.NONE
        self.is_last_backward = True
        """Whether the next backward is the last before the step; not so within `accumulate`."""
        self.after_sums: Callable[[], None] = lambda: None
        """Called where all ranks have summed a step's gradients; it may raise, on every rank alike."""
        self._open = False
        self._earlier_gradients: dict[Weight, torch.Tensor] = {}
        self._arriving: set[str] = set()
        self._sum_marker: tuple[Weight, tuple[int, int], bool] | None = None
        self._changes = 0
        self._norms: dict[float, tuple[torch.Tensor, list[tuple[int, int]]]] = {}
        self._order = {weight: number for number, weight in enumerate(program.weights)}
        self.split = any(weight.data_shards > 1 or not weight.shard.is_unsharded for weight in program.weights)
        """Whether this rank has only a shard of some weight."""
        for weight in program.weights:
            ArrivalHooks(self, weight.name, self._mean).attach(weight.parameter)
        for sync in program.stages[0].gradient_syncs:
            # reducers attach their hooks after those of this class
            sync.begin_microbatch(self.is_last_backward)
        self._expected_hook_counts = {weight: _hook_counts(weight.parameter) for weight in program.weights}

    def expect_gradient(self, name: str) -> None:
        """Notes that autograd computes a gradient for a weight, perhaps without the model's outputs."""
        self.open_pass()
        self._arriving.add(name)

    def note_accumulated(self, name: str) -> None:
        """Notes that the gradient was accumulated."""
        self._arriving.discard(name)

    @property
    def summed(self) -> bool:
        """True when gradients are those of the global batch."""
        return self.state is not GradientState.LOCAL

    def open_pass(self, *_: object) -> None:
        """Opens a pass; called within a backward, by each of its first hooks."""
        if self._open:
            return
        # create_graph=True: a second backward would read weights that FSDP2 has freed by then
        is_gathered = any(isinstance(weight.parameter, DTensor) for weight in self._program.weights[:1])
        if is_gathered and torch.is_grad_enabled():
            raise ConfigError(
                "a backward with create_graph=True, as of a gradient penalty, goes through weights that ZeRO gathers "
                "and frees, which a second backward would read; nearest that works: replicate in place of shard"
            )
        self._open = True
        self._guard.begin("backward")
        self._check_parameters()
        self._set_aside()
        for sync in self._program.stages[0].gradient_syncs:
            sync.begin_microbatch(self.is_last_backward)
        # Callbacks run in order, and FSDP2 may queue its own after this one: the second round comes after all.
        after_backward(lambda: after_backward(self._finish_pass))

    def discard_failed_pass(self) -> None:
        """Discards a pass whose backward ended in an error; called before a forward.

        Raises:
            ConfigError: shards can't discard it.
        """
        if not self._open or in_backward():
            return
        if isinstance(self._program.weights[0].parameter, DTensor):
            raise ConfigError(
                "a backward ended in an error and left gathered weights and sums under way: end the process, or catch "
                "such errors before backward()"
            )
        self._open = False
        self._guard.end("backward")
        self._earlier_gradients.clear()
        self._arriving.clear()
        self.target_totals.discard_pass()

    def _check_parameters(self) -> None:
        """Refuses hooks that would see this rank's gradient alone, and weights whose gradient nobody reduces."""
        for weight, expected_counts in self._expected_hook_counts.items():
            if _hook_counts(weight.parameter) != expected_counts:
                raise ConfigError(
                    f"a hook was registered on '{weight.name}': it would see this rank's gradient before it is summed "
                    "over ranks; change gradients, or step, after backward(), when they are whole"
                )
        for weight in self._program.frozen:
            if weight.parameter.requires_grad:
                raise ConfigError(
                    f"'{weight.name}' was frozen when the model was sharded, so nobody sums its gradient: shard the "
                    "model with it trained, and call requires_grad_(False) afterwards for as long as it is frozen"
                )

    def _set_aside(self) -> None:
        """Moves gradients of an earlier pass aside, so that nothing reduces them a second time."""
        had_sums = self._drop_cleared_sums()
        self._begin_target_totals(had_sums)
        for weight in self._program.weights:
            gradient = weight.parameter.grad
            if gradient is None:
                continue
            plain = _plain(gradient)
            weight.parameter.grad = plain
            # unreduced gradients of accumulate() stay: this pass adds to them
            if self.state is not GradientState.SUMMED:
                continue
            if self.is_last_backward:
                self._earlier_gradients[weight] = plain
                weight.parameter.grad = None
            elif bool(_local(plain).count_nonzero()):
                raise ConfigError(
                    "accumulate() begins a new sum, but gradients of a finished backward are there: call zero_grad() "
                    "after step(), and put all backwards of a step but its last into accumulate()"
                )

    def _begin_target_totals(self, had_sums: bool) -> None:
        """Reports whether gradients of earlier backwards are there, in FSDP2's sums or as tensors that aren't 0."""
        gradients = [grad for weight in self._program.weights if (grad := weight.parameter.grad) is not None]
        continues = self.state is GradientState.LOCAL or bool(gradients)
        # reading values waits for the device: only where losses were divided by their own targets
        had_gradients = had_sums or (
            continues
            and self.target_totals.needs_gradients
            and any(bool(_local(_plain(gradient)).count_nonzero()) for gradient in gradients)
        )
        self.target_totals.begin_pass(continues, had_gradients)

    def _drop_cleared_sums(self) -> bool:
        """Discards sums over micro-batches that zero_grad() has cleared for user code; returns whether some stay."""
        if self._sum_marker is None:
            return False
        weight, version, is_placeholder = self._sum_marker
        self._sum_marker = None
        if self._version(weight) != version:
            for sync in self._program.stages[0].gradient_syncs:
                sync.discard_accumulated()
            return False
        if is_placeholder:
            weight.parameter.grad = None
        return True

    def _mark_sums(self) -> None:
        """Places a gradient on a weight whose sum FSDP2 keeps internally, to notice that user code clears it."""
        # the smallest weight, since the placeholder costs its memory
        weight = min(self._program.weights, key=lambda item: item.local.numel() or 1 << 60)
        if not isinstance(weight.parameter, DTensor):
            return
        is_placeholder = weight.parameter.grad is None
        if is_placeholder:
            weight.parameter.grad = weight.as_dtensor(torch.zeros_like(weight.local))  # type: ignore[assignment]
        self._sum_marker = weight, self._version(weight), is_placeholder

    def _finish_pass(self) -> None:
        """Ends a pass, as the last thing that backward() does."""
        self._open = False
        try:
            self._complete_gradients()
        finally:
            self._guard.end("backward")

    def _complete_gradients(self) -> None:
        """Reduces gradients after the last backward of a step, and marks them otherwise."""
        program = self._program
        # expected, never accumulated: autograd.grad computed a gradient outside of backward()
        if self._arriving:
            name = min(self._arriving)
            self._arriving.clear()
            raise ConfigError(
                f"torch.autograd.grad gives this rank's gradient of '{name}', which nobody sums: call backward(), "
                "after which parameter.grad is that of the whole batch"
            )
        self.target_totals.end_pass(program.weights_device, self.is_last_backward)
        if not self.is_last_backward:
            self.state = GradientState.LOCAL
            self._norms.clear()
            self._mark_sums()
            self._wrap_gradients()
            return
        # before the reductions, which fill gradients in
        self._reached.note()
        for sync in program.stages[0].gradient_syncs:
            sync.finish()
        self.after_sums()
        # The next sum over copies is rounded by other random numbers.
        program.rounding_key.step += 1
        self._reached.complete()
        with torch.no_grad():
            gradients = [grad for weight in program.weights if (grad := weight.gradient) is not None]
            if self._mean > 1 and gradients:
                foreach_mul_(gradients, 1.0 / self._mean)
            for weight, earlier in self._earlier_gradients.items():
                if weight.gradient is None:
                    weight.parameter.grad = earlier  # type: ignore[assignment]
                else:
                    weight.gradient.add_(_local(earlier))
        self._earlier_gradients.clear()
        self._norms.clear()
        self.state = GradientState.SUMMED
        self._wrap_gradients()
        self._publish()

    def _wrap_gradients(self) -> None:
        """Wraps gradients so that user code can't mistake a shard, or an unreduced one, for the full gradient."""
        if not self.split and self.state is GradientState.SUMMED:
            return
        for weight in self._program.weights:
            if weight.parameter.grad is not None:
                weight.parameter.grad = wrap_gradient(weight.parameter.grad, weight, self)

    def hide_gradients(self) -> None:
        """Restores plain gradients, for an optimizer to step on."""
        for weight in self._program.weights:
            if is_sharded_gradient(weight.parameter.grad):
                weight.parameter.grad = plain_gradient(weight.parameter.grad)  # type: ignore[arg-type, assignment]

    def show_gradients(self) -> None:
        """Wraps the gradients again after `hide_gradients`."""
        self._wrap_gradients()

    def check_step(self) -> None:
        """Refuses an optimizer's step on gradients that aren't reduced."""
        if self.state is GradientState.LOCAL:
            raise ConfigError("the last backward before a step sums the gradients: leave it out of accumulate()")

    @torch.no_grad()
    def weight_norm(self, weight: Weight, order: float) -> torch.Tensor:
        """Returns the norm of a full weight's gradient, a float64 scalar; every rank calls it together.

        The norms of all weights are reduced over ranks at once, and cached until a gradient changes.
        """
        if self.state is GradientState.LOCAL:
            raise ConfigError(
                "gradients are this rank's alone inside strategy.accumulate(): clip after the last backward of a step"
            )
        weight_index = self._order[weight]
        cached = self._norms.get(order)
        # all ranks change gradients alike, so that all enter this branch together
        if cached is None or cached[1][weight_index] != self._version(weight):
            versions = [self._version(weight) for weight in self._program.weights]
            cached = self._norms[order] = (self._all_norms(order), versions)
        return cached[0][weight_index]

    def note_change(self) -> None:
        """Invalidates cached norms; called after user code changed a gradient in place."""
        self._changes += 1
        self._norms.clear()

    def _version(self, weight: Weight) -> tuple[int, int]:
        """Returns a value that differs once a gradient has been changed or cleared."""
        gradient = weight.gradient
        return (-1, 0) if gradient is None else (gradient._version, self._changes)

    def any_rank(self, flag: torch.Tensor) -> None:
        """Replaces a float flag, () or (1,), by its maximum over all ranks, in place."""
        flag_float64 = flag.to(torch.float64).reshape(1)
        self._world.all_reduce_max(flag_float64).wait()
        flag.copy_(flag_float64.reshape(flag.shape))

    @torch.no_grad()
    def shard_norm(self, shard: torch.Tensor, weight: Weight, order: float) -> torch.Tensor:
        """Returns the norm of a tensor of a weight's global shape, a float64 scalar; all ranks call it together.

        Args:
            shard: this rank's shard of the tensor, plain, of the shard's shape of the weight.
            weight: the weight.
            order: of the norm.
        """
        return self._reduce_norms([(shard, weight)], order)[0]

    def _all_norms(self, order: float) -> torch.Tensor:
        """Returns (weights,) float64: the norm of each full gradient."""
        return self._reduce_norms([(weight.gradient, weight) for weight in self._program.weights], order)

    def _reduce_norms(self, shards: Sequence[tuple[torch.Tensor | None, Weight]], order: float) -> torch.Tensor:
        """Returns (len(shards),) float64: norms of tensors that lie over the ranks as their weights do."""
        device = self._program.weights_device
        totals = torch.zeros(len(shards), dtype=torch.float64, device=device)
        with without_tensor_subclasses():
            for index, (shard, weight) in enumerate(shards):
                if shard is None or not shard.numel():
                    continue
                for box in weight.boxes:
                    norm = torch.linalg.vector_norm(view_box(shard, box.local_box), order).to(torch.float64)
                    if order == float("inf"):
                        totals[index] = torch.maximum(totals[index], norm)
                    else:
                        # a box that several ranks have a copy of counts once in the sum over ranks
                        totals[index] += norm**order / box.copies
        if order == float("inf"):
            return maximum_over_ranks(totals, self._world)
        self._world.all_reduce(totals).wait()
        return totals ** (1.0 / order)


def _hook_counts(parameter: nn.Parameter) -> tuple[int, int]:
    """Returns (hooks before accumulation, hooks after it)."""
    return (
        len(getattr(parameter, "_backward_hooks", None) or ()),
        len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ()),
    )


def _plain(gradient: torch.Tensor) -> torch.Tensor:
    """Returns a gradient without the wrapper that user code sees; DTensors stay."""
    return plain_gradient(gradient) if is_sharded_gradient(gradient) else gradient


def _local(gradient: torch.Tensor) -> torch.Tensor:
    """Returns a gradient's local tensor: this rank's shard of a DTensor, else the gradient itself."""
    return local_tensor(gradient)
