"""The bytes of state that this rank really holds, read off the tensors at the moments where they are most."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from meshwright.runtime.weights import Weight


def _storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Returns the bytes of the distinct storages behind tensors; freed storages count nothing."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if tensor is not None:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _gathered(module: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns FSDP2's (gathered parameters, whole gradients kept for later) of a module; empty without FSDP2."""
    parameters: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    for part in module.modules():
        state: Any = getattr(part, "_get_fsdp_state", lambda: None)()
        if state is None:
            continue
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for item in (item for group in groups if group is not None for item in group.fsdp_params):
            parameters.extend(getattr(item, "all_gather_outputs", []))
            whole = getattr(item, "_unsharded_param", None)
            if whole is not None:
                kept = getattr(item, "unsharded_accumulated_grad", None)
                gradients.extend(grad for grad in (whole.grad, kept) if grad is not None)
    return parameters, gradients


class StateMeter:
    """Keeps the largest number of bytes seen for parameters and gradients, master weights apart.

    Args:
        module: the wrapped model.
        weights: its weights.
    """

    def __init__(self, module: nn.Module, weights: list[Weight]) -> None:
        self._module, self._weights = module, weights
        self.parameters = self.gradients = 0

    def sample(self) -> None:
        """Looks at the tensors now: called between forward and backward, and before the optimizer."""
        gathered, whole = _gathered(self._module)
        self.parameters = max(self.parameters, _storage_bytes(gathered))
        parts = [weight.gradient for weight in self._weights]
        self.gradients = max(self.gradients, _storage_bytes([*parts, *whole]))

    @property
    def master(self) -> int:
        """Bytes of this rank's parts of the master weights."""
        return sum(weight.local.nbytes for weight in self._weights)

    def read(self, optimizer_bytes: int) -> dict[str, int]:
        """Returns bytes by kind, divided as in the ZeRO paper.

        Where compute runs on gathered copies, the master weights belong to the optimizer's state; where it runs on the
        master weights themselves they are the parameters.
        """
        if self.parameters:
            return {
                "parameters": self.parameters,
                "gradients": self.gradients,
                "optimizer": optimizer_bytes + self.master,
            }
        return {"parameters": self.master, "gradients": self.gradients, "optimizer": optimizer_bytes}
