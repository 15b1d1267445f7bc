"""Collectives in compiled graphs: no two calls are made one, and each waits for the one before it."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.launch.contract import RankContext
from meshwright.parallel import compiled_layers, group_operators
from tests import traced_graphs
from tests.ranks.group import run_contexts


class Group:
    """Of one rank; notes what it is asked for."""

    axis, operator_name, size = "alone", "", 1

    def __init__(self) -> None:
        self.asked: list[tuple[str, float]] = []

    def all_reduce(self, x: torch.Tensor) -> Done:
        self.asked.append(("all_reduce", float(x.flatten()[0])))
        return Done()

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> Done:
        self.asked.append(("all_gather", float(x.flatten()[0])))
        out.copy_(x)
        return Done()


class Done:
    def wait(self) -> None:
        return None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
        return group_operators.all_reduce(x, name)

    @staticmethod
    def backward(_ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        return upstream[0], None


def asked_in_a_step(is_compiled: bool) -> list[tuple[str, float]]:
    """Returns what one forward and backward asks a group for, with two equal sums and one that nothing waits for."""

    def work(_context: RankContext) -> list[tuple[str, float]]:
        traced_graphs.install(whole=True)
        group: Any = Group()
        group_operators.register(group)

        def layer(x: torch.Tensor) -> torch.Tensor:
            first, second = Sum.apply(x, group.operator_name), Sum.apply(x, group.operator_name)
            return (torch.sin(first) * torch.cos(second)).sum() + Sum.apply(3.0 * x, group.operator_name).exp().sum()

        x = torch.ones(4, requires_grad=True)
        (compiled_layers.compiled("none", 4, layer) if is_compiled else layer)(x).backward()
        return group.asked

    (asked,) = run_contexts(1, work)
    return list(asked)


def test_equal_calls_stay_two() -> None:
    assert asked_in_a_step(True) == asked_in_a_step(False) == [("all_reduce", 1.0)] * 2 + [("all_reduce", 3.0)]


def test_each_call_waits_for_the_one_before_it() -> None:
    group: Any = Group()
    group_operators.register(group)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2)
    calls = []
    for operator in (group_operators.all_reduce, group_operators.all_gather, group_operators.all_reduce):
        more = (1,) if operator is group_operators.all_gather else ()
        calls.append(graph.call_function(operator, (x, group.operator_name, *more)))
        calls[-1].meta["val"] = operator(torch.ones(2), group.operator_name, *more)
    graph.output(tuple(calls))
    group_operators.number_calls(graph)
    group_operators.keep_in_order(graph)
    graph.lint()
    ordered = [node for node in graph.nodes if str(node.target).endswith("_in_order.default")]
    assert [node.kwargs["call"] for node in ordered] == [1, 2, 3]
    assert ordered[0].args[0] is None
    # The first result of each call is what the next one is given.
    assert [node.args[0].args for node in ordered[1:]] == [(ordered[0], 0), (ordered[1], 0)]
    group.asked.clear()
    outputs = torch.fx.GraphModule({}, graph)(torch.full((2,), 5.0))
    assert [tuple(value.shape) for value in outputs] == [(2,), (1, 2), (2,)]
    assert group.asked == [("all_reduce", 5.0), ("all_gather", 5.0), ("all_reduce", 5.0)]
