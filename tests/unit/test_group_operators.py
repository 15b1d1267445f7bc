"""Collectives in a compiled graph: no break, the values and gradients of eager code, and the order of the code."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from meshwright.parallel import collectives, group_operators
from meshwright.parallel.axis_group import DifferentiableCollectives


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
