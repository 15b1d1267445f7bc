"""AdamW over this rank's local parts: plain tensors, whatever mesh or placement the weights have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.parallel.weights import Weight
from meshwright.train.config import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's state per weight, as they stand in checkpoints."""


class LocalAdamW:
    """torch's AdamW on local parts.

    The optimizer sees plain tensors that share storage with the weights' local parts, so fused kernels run on any mix
    of meshes; the step's factor on gradients (normalisation, unscaling, clipping) is folded into the kernel.

    Args:
        weights: all weights of this rank.
        config: hyper-parameters.
        on_host: keep moments and run the update in host memory; gradients go there, new weights come back.
    """

    def __init__(self, weights: Sequence[Weight], config: OptimizerConfig, on_host: bool = False) -> None:
        self.config, self._on_host = config, on_host
        self._before: list[Any] = []
        self._held = [weight for weight in weights if weight.local.numel()]
        self._all = list(weights)
        self._parts = [self._part(weight) for weight in self._held]
        self._host_gradients = [_host_like(weight.local) for weight in self._held] if on_host else []
        self._of = {weight.name: part for weight, part in zip(self._held, self._parts)}
        decays = [config.decay == "all" or len(weight.shape) >= 2 for weight in self._held]
        groups: list[dict[str, Any]] = []
        for wanted, decay in ((True, config.weight_decay), (False, 0.0)):
            chosen = [part for part, decayed in zip(self._parts, decays) if decayed is wanted]
            if chosen:
                groups.append({"params": chosen, "weight_decay": decay})
        self._optimizer = torch.optim.AdamW(
            groups or [{"params": [nn.Parameter(torch.zeros(1))]}],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=config.implementation == "fused",
            foreach=config.implementation == "foreach",
        )

    def _part(self, weight: Weight) -> nn.Parameter:
        local = weight.local
        if self._on_host:
            local = _host_like(local).copy_(local)
        return nn.Parameter(local, requires_grad=False)

    def wait_for(self, event: Any) -> None:
        """Lets the next update begin on the device only after a CUDA event: until then the state is being copied."""
        if event is not None:
            self._before.append(event)

    def step(self, lr: float, factor: torch.Tensor) -> None:
        """Updates the weights with ``factor`` x their gradients; a factor that isn't finite leaves them as they are.

        Args:
            lr: learning rate of this step.
            factor: scalar float64 tensor on the weights' device.
        """
        while self._before:
            self._before.pop().wait()  # on the current device's stream: the weights may lie in host memory
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if self._on_host:
            factor = self._fetch(factor)
        else:
            for part, weight in zip(self._parts, self._held):
                part.grad = weight.gradient
        self._apply(factor)
        for part in self._parts:
            part.grad = None
        if self._on_host:
            for weight, part in zip(self._held, self._parts):
                weight.local.copy_(part, non_blocking=True)

    def _fetch(self, factor: torch.Tensor) -> torch.Tensor:
        """Copies gradients to host memory, through pinned buffers, and waits for the last; returns the factor there."""
        for part, weight, place in zip(self._parts, self._held, self._host_gradients):
            assert weight.gradient is not None
            place.copy_(weight.gradient, non_blocking=True)
            part.grad = place
        if factor.is_cuda:
            torch.cuda.current_stream(factor.device).synchronize()
        return factor.to("cpu")

    def _apply(self, factor: torch.Tensor) -> None:
        """Runs the kernel; fused float32 takes factor and skip as arguments, without another pass over gradients."""
        optimizer: Any = self._optimizer
        fused = self.config.implementation == "fused"
        if fused and all(part.dtype == torch.float32 for part in self._parts):
            optimizer.grad_scale = (1.0 / factor).to(torch.float32)
            optimizer.found_inf = (~torch.isfinite(factor)).to(torch.float32)
            optimizer.step()
        elif bool(torch.isfinite(factor)):
            if float(factor) != 1.0:
                torch._foreach_mul_([part.grad for part in self._parts], float(factor))
            optimizer.step()

    @property
    def steps(self) -> int:
        """Updates done; steps that were skipped don't count."""
        for state in self._optimizer.state.values():
            return int(state["step"])
        return 0

    def state(self) -> Iterator[tuple[str, Any]]:
        """Yields (``exp_avg/<weight>``, tensor placed like the weight) for each moment of each weight."""
        for weight in self._all:
            part = self._of.get(weight.name)
            for moment in MOMENTS:
                yield f"{moment}/{weight.name}", weight.saved(self._moment(weight, part, moment))

    def moments(self) -> list[torch.Tensor]:
        """Returns the moments that there are, each of its part's shape; none before the first update."""
        return [state[moment] for state in self._optimizer.state.values() for moment in MOMENTS]

    def places(self) -> list[int]:
        """Returns the addresses of all moments that there are."""
        return [moment.data_ptr() for moment in self.moments()]

    def _moment(self, weight: Weight, part: nn.Parameter | None, moment: str) -> torch.Tensor:
        if part is None:
            return torch.empty_like(weight.local)
        state = self._optimizer.state[part]
        if not state:
            step_device = part.device if self.config.implementation == "fused" else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=step_device)
            for name in MOMENTS:
                state[name] = torch.zeros_like(part)
        return state[moment]

    def restored(self, steps: int) -> None:
        """Tells that `state`'s tensors were filled from a checkpoint taken after ``steps`` updates."""
        for weight, part in zip(self._held, self._parts):
            self._moment(weight, part, MOMENTS[0])
            self._optimizer.state[part]["step"].fill_(steps)
            if self._on_host:
                part.data.copy_(weight.local)

    def bytes(self) -> int:
        """Returns the bytes of optimizer state that this rank holds."""
        return sum(
            tensor.nbytes for state in self._optimizer.state.values() for tensor in state.values() if tensor.dim()
        )


def _host_like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an empty tensor of the same shape and type in host memory, pinned where a GPU copies to and from it."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
