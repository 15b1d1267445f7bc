"""Weights of bf16 or fp16 that compute, beside whole float32 masters that are updated.

On a group of one rank FSDP2 casts, copies and concatenates each weight and gradient: some 36 bytes of traffic a weight
and step. Here the module's parameters are the copies; the optimizer writes them as it updates the masters
(`Weight.compute`). A gradient is the master's as autograd made it, in the type of compute, where nothing is added to
it: float32 holds the same value. Sums over micro-batches and ranks are in float32.
Source: Micikevicius et al., Mixed Precision Training (ICLR 2018), section 3.1.
"""

from __future__ import annotations

import torch
from torch import nn

from meshwright.parallel.stage_module import StageModule
from meshwright.parallel.weak_hook import WeakHook
from meshwright.parallel.weights import parameter_holders


class MasterGradients:
    """Moves the gradients of a stage's weights that compute to their masters, as backward makes them.

    Args:
        stage: has masters once `make_compute_copies` was called.
        dtype: of the weights that compute.
        is_summed: whether ranks sum the gradients.
    """

    def __init__(self, stage: StageModule, dtype: torch.dtype, is_summed: bool) -> None:
        self._stage, self._dtype, self._is_summed, self._keeps_type = stage, dtype, is_summed, False

    def make_compute_copies(self) -> None:
        """Replaces the module's floating-point parameters by copies in the type of compute; ties stay ties."""
        for _, master, holders in list(parameter_holders(self._stage.module)):
            if not master.is_floating_point():
                continue
            compute = nn.Parameter(master.detach().to(self._dtype), requires_grad=master.requires_grad)
            compute.__dict__.update(master.__dict__)
            for owner, attribute in holders:
                owner._parameters[attribute] = compute
            self._stage.masters[compute] = master
            if master.requires_grad:
                # Of any type, not of the master's alone.
                master.grad_dtype = None
                compute.register_post_accumulate_grad_hook(WeakHook(self._move_gradient))

    def begin_microbatch(self, is_last: bool, no_gradients: bool = False) -> None:
        """Announces a micro-batch; the only one of a step is the last, and finds no gradients."""
        self._keeps_type = is_last and no_gradients and not self._is_summed

    def finish(self) -> None:
        """Does nothing: the masters have their gradients."""

    def discard_accumulated(self) -> None:
        """Does nothing: the masters' gradients are the sums."""

    def _move_gradient(self, compute: torch.Tensor) -> None:
        master, grad = self._stage.masters[compute], compute.grad  # type: ignore[index]
        assert grad is not None
        compute.grad = None
        if master.grad is None:
            master.grad = grad if self._keeps_type else grad.to(master.dtype)
        else:
            # Of this micro-batch too, where a backward comes by a weight twice (a reentrant checkpoint inside of it).
            master.grad = master.grad.to(master.dtype).add_(grad)
