"""The parts of a custom loop's step, told apart by hooks on the model's forward and on optimizers' steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshwright.parallel.step_timer import StepTimer

_MEASURED_UPDATES = 2
"""First updates after which the bytes of the state are measured; they don't change later."""


class LoopTimer:
    """Times data, forward, backward and optimizer of a loop, and sees the optimizer's rate and bytes.

    Args:
        stack: removes the hooks.
    """

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._timer: StepTimer | None = None
        self._after_forward = False
        self._updates = 0
        self.rate = 0.0
        """Learning rate of the first group of the optimizer that stepped last."""
        self.state_bytes: dict[str, int] = {}
        """Bytes of this rank's parameters, gradients and optimizer state, as `StepRecord.memory` names them."""
        stack.callback(register_optimizer_step_pre_hook(self._before_update).remove)
        stack.callback(register_optimizer_step_post_hook(self._after_update).remove)

    def watch(self, module: nn.Module) -> None:
        """Times the forwards of a module from now on, and what lies between them."""
        device = next((parameter.device.type for parameter in module.parameters()), "cpu")
        self._timer = StepTimer("cuda" if device == "cuda" else "cpu")
        for handle in (
            module.register_forward_pre_hook(self._before_forward),
            module.register_forward_hook(self._after_forward_pass),
        ):
            self._stack.callback(handle.remove)

    def wait(self) -> None:
        """Waits until the device has done what was timed."""
        if self._timer is not None:
            self._timer.wait()

    def drain(self) -> dict[str, float]:
        """Returns seconds by part since the last call; none while no module is watched."""
        self._after_forward = False
        return self._timer.drain() if self._timer is not None else {}

    def _lap(self, phase: str) -> None:
        if self._timer is not None:
            self._timer.lap(phase)

    def _before_forward(self, *_: object) -> None:
        # Between two forwards of a step lies the backward of the first micro-batch.
        self._lap("backward" if self._after_forward else "data")

    def _after_forward_pass(self, module: nn.Module, *_: object) -> None:
        self._lap("forward" if module.training else "evaluate")
        self._after_forward = module.training

    def _before_update(self, *_: object) -> None:
        self._lap("backward" if self._after_forward else "other")
        self._after_forward = False

    def _after_update(self, optimizer: Optimizer, *_: object) -> None:
        self._lap("optimizer")
        self.rate = float(optimizer.param_groups[0].get("lr", 0.0)) if optimizer.param_groups else 0.0
        if self._updates < _MEASURED_UPDATES:
            self._updates += 1
            self.state_bytes = _state_bytes(optimizer)


def _state_bytes(optimizer: Optimizer) -> dict[str, int]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "parameters": _local_bytes(parameters),
        "gradients": _local_bytes(parameter.grad for parameter in parameters),
        "optimizer": _local_bytes(value for value in states if isinstance(value, torch.Tensor)),
    }


def _local_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Returns the bytes of this rank's shards of tensors of any shape."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors if tensor is not None)
    return sum(tensor.nbytes for tensor in local)
