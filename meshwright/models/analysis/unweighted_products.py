"""Finds products of matrices that no weight enters, as of positions and frequencies, which TF32 must not round."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.models.analysis.clone import make_clone
from meshwright.models.build import BuiltModel
from meshwright.parallel.tf32 import exact_modules
from meshwright.torch_compat.tensors import TorchDispatchMode, tree_flatten

_PRODUCTS = tuple(
    operator.default
    for operator in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm)
)


def find_unweighted_products(built: BuiltModel) -> list[str]:
    """Returns the modules in which a small clone's forward multiplies matrices that no weight has entered, by name.

    Modules whose products stay exact (`parallel.tf32.exact_modules`) don't count.

    Args:
        built: the model, on meta; it stays unchanged.
    """
    clone = make_clone(built)
    for parameter in clone.module.parameters():
        # What a weight enters requires a gradient, also where the user trains others alone.
        parameter.requires_grad_(parameter.is_floating_point())
    watch = _Watch(clone.module)
    with torch.enable_grad(), watch:
        clone.run(1)
    return watch.found


class _Watch(TorchDispatchMode):
    """Writes down the innermost module of each such product."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.found: list[str] = []
        self._inside: list[str] = []
        self._exact_depth = 0
        exact = set(exact_modules(module))
        for name, child in module.named_modules():
            child.register_forward_pre_hook(partial(self._enter, name or type(module).__name__, child in exact))
            child.register_forward_hook(partial(self._leave, child in exact), always_call=True)

    def _enter(self, name: str, is_exact: bool, *_: object) -> None:
        self._inside.append(name)
        self._exact_depth += is_exact

    def _leave(self, is_exact: bool, *_: object) -> None:
        self._inside.pop()
        self._exact_depth -= is_exact

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator."""
        if func in _PRODUCTS and not self._exact_depth:
            operands = [item for item in tree_flatten(args)[0] if isinstance(item, torch.Tensor)]
            name = self._inside[-1] if self._inside else "the model"
            if not any(operand.requires_grad for operand in operands) and name not in self.found:
                self.found.append(name)
        return func(*args, **(kwargs or {}))
