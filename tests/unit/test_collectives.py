"""Movements of activations over an axis leave alone what autograd shares between branches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


class TwoRanks:
    """Rank 0 of two, of which the other holds ``other``: collectives by plain operations on the whole of both."""

    size, index, is_traced = 2, 0, False

    def __init__(self, other: torch.Tensor) -> None:
        self.other = other

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Done:
        output.copy_(torch.cat([shard, self.other.reshape(-1)]))
        return Done()

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> Done:
        output.copy_(tensor.view(2, -1)[0] + self.other.reshape(-1))
        return Done()


class Copies(TorchDispatchMode):
    """Counts the operations that put tensors together."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.overloadpacket in (torch.ops.aten.cat, torch.ops.aten.stack)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("shape", "dim"), [((1, 3, 4), 1), ((2, 3, 4), 1), ((3, 4), 0), ((1, 1, 3, 4), -2), ((2, 3), -1)]
)
def test_split_dims_are_put_together_in_rank_order_and_copied_only_where_rows_lie_between(
    shape: tuple[int, ...], dim: int
) -> None:
    ours, theirs = torch.arange(120.0)[: torch.Size(shape).numel()].view(shape), torch.rand(shape)
    group: Any = TwoRanks(theirs)
    copies = int(torch.Size(shape[: dim % len(shape)]).numel() > 1)
    with Copies() as counted:
        gathered = collectives.all_gather_dim(ours, group, dim)
    assert gathered.equal(torch.cat([ours, theirs], dim)) and not gathered._is_view()
    assert counted.count == copies + 1  # one is the other rank's
    with Copies() as counted:
        part = collectives.reduce_scatter_dim(torch.cat([ours, theirs], dim), group, dim)
    assert part.equal(ours + theirs)
    assert counted.count == copies + 1  # one is the test's own
