"""A user's communication hook in the place of the sum over copies: the form of torch's DistributedDataParallel.

Source: torch 2.13, `DistributedDataParallel.register_comm_hook` and `torch._C._distributed_c10d.GradBucket`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.errors import ConfigError

_WANTED = "return a torch.futures.Future of the bucket's mean over copies, as long as bucket.buffer()"


class GradientBucket:
    """Gradients that travel together, with the methods of torch's `GradBucket`.

    Args:
        buffer: (n,) of the gradients' dtype, this rank's gradients one after the other.
        parameters: whose gradients they are, in that order.
        index: of the bucket; the same on all ranks, and in all steps.
        is_last: whether it is the last one of a step.
    """

    def __init__(self, buffer: torch.Tensor, parameters: Sequence[nn.Parameter], index: int, is_last: bool) -> None:
        self._buffer, self._parameters, self._index, self._is_last = buffer, list(parameters), index, is_last

    def buffer(self) -> torch.Tensor:
        """Returns the gradients, (n,), which the hook may change in place."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replaces the gradients by others, (n,)."""
        self._buffer = buffer

    def index(self) -> int:
        """Returns the bucket's number."""
        return self._index

    def is_last(self) -> bool:
        """Returns whether no bucket follows in this step."""
        return self._is_last

    def gradients(self) -> list[torch.Tensor]:
        """Returns views of the buffer in the shapes of the parameters."""
        sizes = [parameter.numel() for parameter in self._parameters]
        parts = self._buffer.split(sizes)
        return [part.view(parameter.shape) for part, parameter in zip(parts, self._parameters)]

    def parameters(self) -> list[nn.Parameter]:
        """Returns the parameters."""
        return list(self._parameters)


GradientHook = Callable[[object, GradientBucket], torch.futures.Future[torch.Tensor]]
"""(state, bucket) to a future of the bucket's gradients, (n,): their mean over copies, however it is made."""


@dataclass(frozen=True, slots=True)
class CommHook:
    """A hook and its state, of a model with ``copies`` copies."""

    state: object
    hook: GradientHook
    copies: int

    def start(self, bucket: GradientBucket) -> HookTransfer:
        """Calls the hook, whose collectives are under way when it returns."""
        return HookTransfer(self.hook(self.state, bucket), bucket, self.copies)


class HookTransfer:
    """A bucket that a hook communicates."""

    def __init__(self, future: torch.futures.Future[torch.Tensor], bucket: GradientBucket, copies: int) -> None:
        # A collective's own future is no torch.futures.Future, but its base class.
        if not callable(getattr(future, "wait", None)):
            raise ConfigError(f"register_comm_hook: the hook returned a {type(future).__name__}; {_WANTED}")
        self._future, self._bucket, self._copies = future, bucket, copies

    def wait(self) -> bool:
        """Waits for the hook's future, and puts its gradients in the bucket, as the sum over copies."""
        result = self._future.wait()
        # PowerSGD and the hooks of `default_hooks` give a tensor; torch's own wrapper takes a list of one, too.
        mean = result[0] if isinstance(result, (list, tuple)) and result else result
        buffer = self._bucket.buffer()
        if not isinstance(mean, torch.Tensor) or mean.numel() != buffer.numel():
            kind = f"{mean.numel()} values" if isinstance(mean, torch.Tensor) else f"a {type(mean).__name__}"
            raise ConfigError(f"register_comm_hook: the hook's future holds {kind} for {buffer.numel()}; {_WANTED}")
        # Into new memory: the hook may keep what it returned, as a moving average.
        self._bucket.set_buffer(mean.reshape(-1).to(buffer.dtype) * self._copies)
        return True
