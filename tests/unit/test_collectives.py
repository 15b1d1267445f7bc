"""Movements of activations over an axis leave alone what autograd shares between branches."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.parallel import collectives


class Done:
    """A transfer that is over."""

    def wait(self) -> None: ...


class DoublingWire:
    """Two ranks that hold the same: a sum is twice the tensor, in place."""

    size, index, is_traced = 2, 0, False

    def apply(self, function: Any, *args: Any) -> Any:
        return function.apply(*args)

    def all_reduce(self, tensor: torch.Tensor) -> Done:
        tensor.mul_(2)
        return Done()


def test_a_gradient_that_two_branches_share_is_summed_for_one_alone() -> None:
    x, other = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    axis_group: Any = DoublingWire()
    side = other * 1.0  # made first, so that backward comes to it last
    (collectives.copy_to_group(x, axis_group) + side).backward(torch.full((3,), 5.0))
    assert x.grad is not None and x.grad.tolist() == [10.0] * 3
    assert other.grad is not None and other.grad.tolist() == [5.0] * 3
