"""A group's collectives as operators that torch.compile keeps in its graphs, so that a split layer is one graph.

Dynamo can't trace what a collective does besides moving numbers: events, messages' sizes, shared memory, the log of its
bytes. Each operator is opaque to it: it has a shape, and at run time it calls the group's own collective, which books
itself as in eager code.

Ranks whose graphs differ in a sliced index or a bias must run their collectives alike. So each call is told apart from
all others (`number_calls`), or the compiler might make one of two that are equal on some ranks; and once forward and
backward are graphs of their own, each call gets an empty tensor that the one before it made (`keep_in_order`), so that
they stay in the order in which the model's code has them, whatever the compiler moves between. torch's own effects keep
an order too, but what has one is never computed again: recompute gathers tokens a second time.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch

from meshwright.parallel.axis_group import AxisGroup

_GROUPS: WeakValueDictionary[str, AxisGroup] = WeakValueDictionary()
"""Groups by the names that graphs call them by: an operator takes tensors, numbers and text, and no object of ours."""
_IN_ORDER: dict[Any, Any] = {}
"""Of each operator, the one that does the same after another call."""
KEPT: set[Any] = set()
"""Operators whose results selective recompute keeps: sums over ranks, and products."""


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


def define(name: str, fake: Callable[..., Any], is_kept: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Returns what makes an operator of a function of tensors, numbers and text that calls a group's collectives.

    Args:
        name: of the operator in ``torch.ops.meshwright``.
        fake: returns tensors of the shapes that the function returns.
        is_kept: whether selective recompute keeps what it returns.
    """

    def make(run: Callable[..., Any]) -> Any:
        arguments, _, returned = torch.library.infer_schema(run, mutates_args=()).rpartition(" -> ")
        count = run.__code__.co_argcount

        def after(_before: torch.Tensor | None, *given: Any) -> list[torch.Tensor]:
            results = _listed(run(*given[:count]))
            return [results[0].new_empty(0), *results]

        def after_fake(_before: torch.Tensor | None, *given: Any) -> list[torch.Tensor]:
            results = _listed(fake(*given[:count]))
            return [results[0].new_empty(0), *results]

        taken = f"{arguments[1:-1]}, SymInt call=0"
        _define(
            name, lambda *given: run(*given[:count]), lambda *given: fake(*given[:count]), f"({taken}) -> {returned}"
        )
        _define(f"{name}_in_order", after, after_fake, f"(Tensor? before, {taken}) -> Tensor[]")
        plain: Any = getattr(torch.ops.meshwright, name).default
        _IN_ORDER[plain] = getattr(torch.ops.meshwright, f"{name}_in_order").default
        if is_kept:
            KEPT.add(plain)
        return plain

    return make


def _define(name: str, run: Callable[..., Any], fake: Callable[..., Any], schema: str) -> None:
    torch.library.custom_op(f"meshwright::{name}", run, mutates_args=(), schema=schema).register_fake(fake)


def _listed(returned: Any) -> list[torch.Tensor]:
    return [returned] if isinstance(returned, torch.Tensor) else list(returned)


def number_calls(graph: torch.fx.Graph) -> None:
    """Gives each call of an operator in a graph a number of its own, so that no two are made one."""
    calls = [node for node in graph.nodes if node.target in _IN_ORDER]
    for number, node in enumerate(calls, start=1):
        node.kwargs = {"call": number}


def keep_in_order(graph: torch.fx.Graph) -> None:
    """Has each call of an operator in a graph wait for the one before it."""
    before: Any = None
    for node in [node for node in graph.nodes if node.target in _IN_ORDER]:
        made = _listed(node.meta["val"])
        values = [made[0].new_empty(0), *made]
        with graph.inserting_before(node):
            call = graph.call_function(_IN_ORDER[node.target], (before, *node.args), node.kwargs)
            before, *results = [graph.call_function(operator.getitem, (call, place)) for place in range(len(values))]
        for item, value in zip((call, before, *results), (values, *values), strict=True):
            item.meta["val"] = value
        if isinstance(node.meta["val"], torch.Tensor):
            node.replace_all_uses_with(results[0])
        for item in list(node.users):
            item.replace_all_uses_with(results[item.args[1]])
            graph.erase_node(item)
        graph.erase_node(node)


def _all_reduce_shape(x: torch.Tensor, group: str) -> torch.Tensor:
    return x.new_empty(x.shape)


@define("all_reduce", _all_reduce_shape, is_kept=True)
def all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    """Returns the sum of ``x``, of any shape, over a group that is known by a name."""
    out = x.clone(memory_format=torch.contiguous_format)
    _GROUPS[group].all_reduce(out).wait()
    return out


def _all_gather_shape(shard: torch.Tensor, group: str, size: int) -> torch.Tensor:
    return shard.new_empty(size, *shard.shape)


@define("all_gather", _all_gather_shape)
def all_gather(shard: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """Returns the shards of ``size`` ranks in rank order, (size, *shape); ``shard``: contiguous."""
    out = shard.new_empty(size, *shard.shape)
    _GROUPS[group].all_gather(out.view(-1), shard.contiguous().view(-1)).wait()
    return out


def _reduce_scatter_shape(shards: torch.Tensor, group: str) -> torch.Tensor:
    return shards.new_empty(shards.shape[1:])


@define("reduce_scatter", _reduce_scatter_shape, is_kept=True)
def reduce_scatter(shards: torch.Tensor, group: str) -> torch.Tensor:
    """Returns this rank's part, (...), of the sum of ``shards: (size, ...)`` over a group."""
    out = shards.new_empty(shards.shape[1:])
    _GROUPS[group].reduce_scatter(out.view(-1), shards.contiguous().view(-1)).wait()
    return out
