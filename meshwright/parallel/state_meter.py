"""The bytes of state that this rank really holds, read off the tensors at the moments where they are most."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.parallel.live_bytes import LiveBytes
from meshwright.parallel.weights import Weight
from meshwright.torch_compat.fsdp2 import gathered_tensors


def _storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Returns the bytes of the distinct storages behind tensors; freed storages count nothing."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if tensor is not None:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _gathered_tensors(units: Iterable[nn.Module]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns FSDP2's (gathered parameters, full gradients kept for later) of its units, under way or arrived."""
    parameters: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    for unit in units:
        unit_parameters, unit_gradients = gathered_tensors(unit)
        parameters += unit_parameters
        gradients += unit_gradients
    return parameters, gradients


class StateMeter:
    """Keeps the largest number of bytes seen for parameters and gradients, master weights apart.

    Args:
        modules: the wrapped stages.
        weights: its weights; a pipeline takes those out of this list later on that the rank holds once more.
        in_backward: look before each unit's backward too, where parameters may be more than in forward.
        buffers: of rounded numbers; None where values travel exactly.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        weights: list[Weight],
        in_backward: bool = False,
        buffers: LiveBytes | None = None,
    ) -> None:
        self._buffers = buffers
        self._weights, self._all_weights = weights, tuple(weights)
        self._units = [
            submodule for module in modules for submodule in module.modules() if isinstance(submodule, FSDPModule)
        ]
        # After FSDP2's own: the unit at work is gathered then, and the next one is on its way.
        self._hooks = [unit.register_forward_pre_hook(lambda *_: self.sample()) for unit in self._units]
        if in_backward:
            self._hooks += [unit.register_forward_hook(self._watch_backward) for unit in self._units]
        self.parameters = self.gradients = 0

    def close(self) -> None:
        """Looks no more."""
        for hook in self._hooks:
            hook.remove()

    def _watch_backward(self, _module: nn.Module, _args: object, output: object) -> None:
        """Looks at the parameters once backward reaches a unit's output, when FSDP2 has gathered the unit."""
        outputs = output if isinstance(output, tuple) else (output,)
        for tensor in outputs:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _gradient: self._sample_parameters())

    def _sample_parameters(self) -> None:
        self.parameters = max(self.parameters, _storage_bytes(_gathered_tensors(self._units)[0]))

    def sample(self) -> None:
        """Looks at the tensors now: called before each unit's forward, after forward, and before the optimizer."""
        gathered, unsharded_gradients = _gathered_tensors(self._units)
        # A copy that computes, beside the weight that is updated, counts as one that was gathered.
        gathered += [weight.compute for weight in self._all_weights if weight.compute is not None]
        self.parameters = max(self.parameters, _storage_bytes(gathered))
        local_gradients = [weight.gradient for weight in self._all_weights]
        self.gradients = max(self.gradients, _storage_bytes([*local_gradients, *unsharded_gradients]))

    @property
    def master(self) -> int:
        """Bytes of this rank's parts of the master weights, one that it holds twice counted once."""
        return sum(weight.local.nbytes for weight in self._weights)

    def read(self, optimizer_bytes: int) -> dict[str, int]:
        """Returns bytes by kind, divided as in the ZeRO paper.

        Where compute runs on gathered copies, the master weights belong to the optimizer's state; where it runs on the
        master weights themselves they are the parameters.
        """
        weight_bytes = sum(weight.local.nbytes for weight in self._all_weights)
        buffers = {"buffers": self._buffers.total_peak} if self._buffers is not None else {}
        if self.parameters:
            return {
                "parameters": self.parameters,
                "gradients": self.gradients,
                "optimizer": optimizer_bytes + weight_bytes,
                **buffers,
            }
        return {"parameters": weight_bytes, "gradients": self.gradients, "optimizer": optimizer_bytes, **buffers}
