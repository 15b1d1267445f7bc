"""Weights that compute, beside whole masters that are updated: in another type, or in host memory.

On a group of one rank FSDP2 casts, copies and concatenates each weight and gradient: some 36 bytes of traffic a weight
and step. Here the module's parameters are the copies; the optimizer writes them as it updates the masters
(`Weight.compute`). A gradient is the master's as autograd made it, in the type of compute, where nothing is added to
it: float32 holds the same value. Sums over micro-batches and ranks are in float32.

Masters of a rank that offloads its parameters lie in pinned host memory. A gradient leaves the device for there as
soon as the last micro-batch's backward has made it, beside the rest of that backward.
Source: Micikevicius et al., Mixed Precision Training (ICLR 2018), section 3.1.
"""

from __future__ import annotations

import torch
from torch import nn

from meshwright.parallel.side_stream import SideStream, host_like
from meshwright.parallel.stage_module import StageModule
from meshwright.parallel.weak_hook import WeakHook
from meshwright.parallel.weights import parameter_holders


class MasterGradients:
    """Moves the gradients of a stage's weights that compute to their masters, as backward makes them.

    Args:
        stage: has masters once `make_compute_copies` was called.
        dtype: of the weights that compute.
        is_summed: whether ranks sum the gradients.
        on_host: whether the masters lie in host memory.
    """

    def __init__(self, stage: StageModule, dtype: torch.dtype, is_summed: bool, on_host: bool = False) -> None:
        self._stage, self._dtype, self._is_summed, self._on_host = stage, dtype, is_summed, on_host
        self._is_last = self._keeps_type = False
        self._link: SideStream | None = None
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        """Sums over earlier micro-batches on the device, in the masters' type, by weight that computes."""
        self._host_gradients: dict[torch.Tensor, torch.Tensor] = {}

    def make_compute_copies(self, device: torch.device) -> None:
        """Replaces the module's floating-point parameters by copies in the type of compute; ties stay ties.

        Args:
            device: where they compute.
        """
        if self._on_host:
            self._link = SideStream(device)
        for _, master, holders in list(parameter_holders(self._stage.module)):
            if not (master.is_floating_point() or self._on_host):
                continue
            dtype = self._dtype if master.is_floating_point() else master.dtype
            compute = nn.Parameter(master.detach().to(device, dtype, copy=True), requires_grad=master.requires_grad)
            compute.__dict__.update(master.__dict__)
            if self._on_host:
                master.data = host_like(master.data, device).copy_(master.data)
            for owner, attribute in holders:
                owner._parameters[attribute] = compute
            self._stage.masters[compute] = master
            if master.requires_grad:
                # Of any type, not of the master's alone.
                master.grad_dtype = None
                move = self._move_to_host if self._on_host else self._move_gradient
                compute.register_post_accumulate_grad_hook(WeakHook(move))

    def begin_microbatch(self, is_last: bool, no_gradients: bool = False) -> None:
        """Announces a micro-batch; the only one of a step is the last, and finds no gradients."""
        self._is_last = is_last
        self._keeps_type = is_last and no_gradients and not self._is_summed

    def finish(self) -> None:
        """Waits until the masters have their gradients."""
        # Of weights that the last micro-batch didn't reach.
        for compute in list(self._sums):
            self._send(compute, self._sums.pop(compute))
        if self._link is not None:
            self._link.wait()

    def discard_accumulated(self) -> None:
        """Drops sums over micro-batches that no master has yet."""
        self._sums.clear()

    def _move_gradient(self, compute: torch.Tensor) -> None:
        master, grad = self._stage.masters[compute], compute.grad  # type: ignore[index]
        assert grad is not None
        compute.grad = None
        if master.grad is None:
            master.grad = grad if self._keeps_type else grad.to(master.dtype)
        else:
            # Of this micro-batch too, where a backward comes by a weight twice (a reentrant checkpoint inside of it).
            master.grad = master.grad.to(master.dtype).add_(grad)

    def _move_to_host(self, compute: torch.Tensor) -> None:
        master, grad = self._stage.masters[compute], compute.grad  # type: ignore[index]
        assert grad is not None
        compute.grad = None
        earlier = self._sums.pop(compute, None)
        if earlier is not None:
            grad = earlier.add_(grad)
        if self._is_last:
            self._send(compute, grad)
        else:
            self._sums[compute] = grad.to(master.dtype)

    def _send(self, compute: torch.Tensor, grad: torch.Tensor) -> None:
        """Has a gradient copied to its master's, beside what the device computes."""
        master, link = self._stage.masters[compute], self._link  # type: ignore[index]
        assert link is not None
        if master.grad is not None:  # a backward comes by a weight twice, as above
            link.wait()
            master.grad.add_(grad.to("cpu", master.dtype))
            return
        if compute not in self._host_gradients:
            self._host_gradients[compute] = host_like(master, grad.device)
        with link.behind():
            # In the masters' type on the device already: a copy that converts on the host would wait.
            self._host_gradients[compute].copy_(grad.to(master.dtype), non_blocking=True)
        link.keep(grad)
        master.grad = self._host_gradients[compute]
