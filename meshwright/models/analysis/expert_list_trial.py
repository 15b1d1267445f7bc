"""Finds by trial whether experts in a list can be spread: a clone's are called as ranks would call them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from meshwright.errors import PlanError
from meshwright.models.analysis.clone import Clone, duplicate_module, make_clone
from meshwright.models.analysis.experts import find_experts
from meshwright.models.analysis.objective import nothing_dropped
from meshwright.models.build import BuiltModel
from meshwright.parallel.expert_list import NEAREST, spread
from meshwright.parallel.keyed_random import seed_all
from meshwright.parallel.moving_buffers import MovingBuffers

ROWS, TOKENS = 4, 12
"""Rows of a trial's batch and tokens of each."""
BOUND = 1e-9
"""Relative difference in float64 that the order of sums explains."""


def try_expert_lists(built: BuiltModel, moving: Sequence[str]) -> None:
    """Compares a clone's logits and gradients with those of a copy whose experts get their rows at once, in halves.

    Args:
        built: on meta; it stays unchanged.
        moving: names of the buffers that its forward changes.

    Raises:
        PlanError: the code that calls the experts can't do so where they are on several ranks, or gives something else.
    """
    if not any(rows.children for rows in find_experts(built.module)):
        return
    clone = make_clone(built)
    module = duplicate_module(clone.module)
    lists = [rows for rows in find_experts(module) if rows.children]
    for rows in lists:
        caller = module.get_submodule(rows.caller)
        buffers = MovingBuffers([caller], moving, rows.caller)
        spread(caller, rows, (0, rows.experts), buffers, lambda: None, clone.structure.width or 0).in_halves = True
    expected, actual = _run(clone, duplicate_module(clone.module)), _run(clone, module)
    for name, value in expected.items():
        other = actual.get(name)
        if other is None or not torch.allclose(value, other, rtol=BOUND, atol=BOUND * float(value.abs().max() + 1)):
            what = f"the gradient of '{name}' is" if name else "the logits are"
            raise PlanError(
                f"ep spreads the experts of '{lists[0].module}' over ranks, but when a small copy of the model gives "
                f"them their rows all at once, in two parts, {what} something else; {NEAREST}"
            )


def _run(clone: Clone, module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the output of a copy of a clone, by the name "", and the gradients of its weights."""
    parameters = {name: item for name, item in module.named_parameters() if item.requires_grad}
    with nothing_dropped():
        seed_all(0)
        output = clone.run(ROWS, module.train(), tokens=TOKENS)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(5), dtype=output.dtype)
    gradients = torch.autograd.grad(output, list(parameters.values()), upstream, allow_unused=True)
    found = {name: gradient for name, gradient in zip(parameters, gradients) if gradient is not None}
    return {"": output.detach(), **found}
