"""A group's collectives as operators that torch.compile keeps in its graphs, so that a split layer is one graph.

Dynamo can't trace what a collective does besides moving numbers: events, messages' sizes, shared memory, the log of its
bytes. Each operator is opaque to it: it has a shape, and at run time it calls the group's own collective, which books
itself as in eager code. The operators are ordered by an effect: ranks whose graphs differ in a sliced index or a bias
run their collectives in the order in which the model's code has them, whatever the compiler moves between.
"""

from __future__ import annotations

import itertools
from weakref import WeakValueDictionary

import torch

from meshwright.parallel.axis_group import AxisGroup
from meshwright.torch_compat.compiler import keep_in_order

_GROUPS: WeakValueDictionary[str, AxisGroup] = WeakValueDictionary()
"""Groups by the names that graphs call them by: an operator takes tensors, numbers and text, and no object of ours."""


def register(axis_group: AxisGroup) -> None:
    """Gives a group the name by which the operators of a compiled graph find it, as long as it lives."""
    if not axis_group.operator_name:
        # Counted within a process, so that ranks which are started again call their groups the same: the compiler's
        # cache on disk knows a graph by its text.
        names = (f"{axis_group.axis}.{number}" for number in itertools.count())
        axis_group.operator_name = next(name for name in names if name not in _GROUPS)
        _GROUPS[axis_group.operator_name] = axis_group


def find_group(name: str) -> AxisGroup:
    """Returns the group that `register` gave a name."""
    return _GROUPS[name]


@torch.library.custom_op("meshwright::all_reduce", mutates_args=())
def all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    """Returns the sum of ``x``, of any shape, over a group that is known by a name."""
    out = x.clone(memory_format=torch.contiguous_format)
    _GROUPS[group].all_reduce(out).wait()
    return out


@torch.library.custom_op("meshwright::all_gather", mutates_args=())
def all_gather(shard: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """Returns the shards of ``size`` ranks in rank order, (size, *shape); ``shard``: contiguous."""
    out = shard.new_empty(size, *shard.shape)
    _GROUPS[group].all_gather(out.view(-1), shard.contiguous().view(-1)).wait()
    return out


@torch.library.custom_op("meshwright::reduce_scatter", mutates_args=())
def reduce_scatter(shards: torch.Tensor, group: str) -> torch.Tensor:
    """Returns this rank's part, (...), of the sum of ``shards: (size, ...)`` over a group."""
    out = shards.new_empty(shards.shape[1:])
    _GROUPS[group].reduce_scatter(out.view(-1), shards.contiguous().view(-1)).wait()
    return out


@all_reduce.register_fake
def _(x: torch.Tensor, group: str) -> torch.Tensor:
    return x.new_empty(x.shape)


@all_gather.register_fake
def _(shard: torch.Tensor, group: str, size: int) -> torch.Tensor:
    return shard.new_empty(size, *shard.shape)


@reduce_scatter.register_fake
def _(shards: torch.Tensor, group: str) -> torch.Tensor:
    return shards.new_empty(shards.shape[1:])


for _operator in (all_reduce, all_gather, reduce_scatter):
    keep_in_order(_operator)
