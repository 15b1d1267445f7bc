"""Collectives in a compiled graph: no break, the values and gradients of eager code, and the order of the code.

No two calls are made one, and each waits for the one before it.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from meshwright.launch.contract import RankContext
from meshwright.parallel import collectives, compiled_layers, group_operators
from meshwright.parallel.axis_group import DifferentiableCollectives
from tests import traced_graphs
from tests.ranks.group import run_contexts


class Done:
    """A transfer that is over."""

    def wait(self) -> None: ...


class EqualRanks(DifferentiableCollectives):
    """Two ranks that hold the same numbers: what each would get is known here; every call is noted."""

    axis, size, index = "tp", 2, 0

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def all_reduce(self, tensor: torch.Tensor) -> Done:
        self.calls.append(("all_reduce", tensor.numel()))
        tensor.mul_(2)
        return Done()

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Done:
        self.calls.append(("all_gather", shard.numel()))
        output.copy_(torch.cat([shard, shard]))
        return Done()

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> Done:
        self.calls.append(("reduce_scatter", tensor.numel()))
        output.copy_(2 * tensor.chunk(2)[0])
        return Done()


def block(x: torch.Tensor, side: torch.Tensor, group: Any) -> torch.Tensor:
    """Every movement, two of them of tensors that don't depend on each other."""
    first = collectives.reduce_from_group(side * 2.0, group)
    entered = collectives.copy_to_group(x, group)
    summed = collectives.reduce_from_group(entered.sin(), group)
    gathered = collectives.all_gather_tokens(summed, group, 1, True)
    scattered = collectives.reduce_scatter_tokens(gathered.cos(), group, 1, True)
    rows = collectives.all_gather_tokens(scattered, group, 0, False)
    rows = collectives.reduce_scatter_tokens(rows, group, 0, True)
    return rows * rows + first.sum()


def gradients(function: Any, group: EqualRanks) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, 4, dtype=torch.float64, generator=generator).requires_grad_()
    side = torch.randn(5, dtype=torch.float64, generator=generator).requires_grad_()
    out = function(x, side, group)
    group.calls.append(("backward", 0))
    out.sin().sum().backward()
    assert x.grad is not None and side.grad is not None
    return out.detach(), x.grad, side.grad


@pytest.mark.slow
def test_a_compiled_block_is_one_graph_with_the_collectives_of_its_code() -> None:
    eager_group, compiled_group = EqualRanks(), EqualRanks()
    group_operators.register(compiled_group)  # type: ignore[arg-type]
    eager = gradients(block, eager_group)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler warns of its own deprecated parts
        # fullgraph: Dynamo raises where it would break the graph.
        compiled = gradients(torch.compile(block, backend="aot_eager", fullgraph=True), compiled_group)
    for ours, expected in zip(compiled, eager, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    # In forward as the code has them, and in backward the same ones as often.
    forward = eager_group.calls.index(("backward", 0)) + 1
    assert compiled_group.calls[:forward] == eager_group.calls[:forward]
    assert sorted(compiled_group.calls) == sorted(eager_group.calls)


def test_a_group_without_a_name_is_never_traced_as_an_operator() -> None:
    group = EqualRanks()
    assert not group.operator_name and not group.is_traced
    group_operators.register(group)  # type: ignore[arg-type]
    name = group.operator_name
    group_operators.register(group)  # type: ignore[arg-type]
    assert group.operator_name == name and not group.is_traced
    other = EqualRanks()
    group_operators.register(other)  # type: ignore[arg-type]
    assert other.operator_name != name


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
