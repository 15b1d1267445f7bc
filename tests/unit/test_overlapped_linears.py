"""Which linear modules compute in chunks beside tp's traffic, and what their callers get."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.parallel import tensor_hooks
from meshwright.parallel.chunked_products import Overlap
from meshwright.parallel.overlapped_linears import ColumnEntry, is_overlappable, sum_row_product
from tests.unit.test_chunked_products import Products, SlowGroup


class Group(SlowGroup):
    """Runs autograd functions as an `AxisGroup` does."""

    def apply(self, function: type[torch.autograd.Function], *args: object) -> object:
        return function.apply(*args)


def columns(*linears: nn.Linear, group: Group) -> None:
    entry = ColumnEntry(lambda x: x.view_as(x), linears, Overlap(group, 2, False))  # type: ignore[arg-type]
    for linear in linears:
        tensor_hooks.on_input(linear, entry, purpose="enters")


def products(group: Group) -> int:
    count = group.events.count("product")
    group.events.clear()
    return count


def test_readers_of_a_tensor_are_computed_where_the_first_is_called() -> None:
    torch.manual_seed(0)
    group = Group()
    first, second, narrow = nn.Linear(4, 3), nn.Linear(4, 5, bias=False), nn.Linear(2, 3)
    x, latent = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 3, 2)
    expected = [first(x), narrow(latent), second(x)]
    columns(first, second, narrow, group=group)
    with Products(group.events):
        own = [first(x)]
        assert products(group) == 2
        # Another tensor that enters the group in between takes nothing away.
        own.append(narrow(latent))
        assert products(group) == 1
        own.append(second(x))
        assert products(group) == 0
    for got, wanted in zip(own, expected, strict=True):
        torch.testing.assert_close(got, wanted)


def test_a_reader_of_another_tensor_has_its_own_product() -> None:
    """Where tokens meet between the matrices all of a module's tokens enter at once, whoever reads them then."""
    torch.manual_seed(0)
    group, linear = Group(), nn.Linear(4, 3)
    x = torch.randn(2, 3, 4)
    expected = linear(x), linear(x + 1)
    entry = ColumnEntry(lambda x: x.view_as(x), (linear,), Overlap(group, 2, False))  # type: ignore[arg-type]
    torch.testing.assert_close(linear(entry(x)), expected[0])
    torch.testing.assert_close(linear(entry(x) + 1), expected[1])


@pytest.mark.parametrize("case", ["frozen", "cast", "autocast"])
def test_what_cannot_be_shared_computes_by_itself(case: str) -> None:
    torch.manual_seed(0)
    group = Group()
    linear, other = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(case != "frozen")
    x = torch.randn(2, 3, 4, dtype=torch.float64 if case == "cast" else torch.float32)
    columns(linear, other, group=group)
    with Products(group.events), torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        if case == "cast":
            with pytest.raises(RuntimeError, match="dtype"):
                linear(x)
            assert products(group) == 0
            return
        y = linear(x)
    assert products(group) == (1 if case == "frozen" else 0)
    assert y.dtype == (torch.bfloat16 if case == "autocast" else torch.float32)


def test_a_row_under_autocast_is_summed_whole() -> None:
    group, row = Group(), nn.Linear(4, 3)
    sum_row_product(row, lambda y: 2 * y, Overlap(group, 2, False))  # type: ignore[arg-type]
    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(row(x), 2 * (x @ row.weight.t()) + row.bias)
    assert group.events.count("start 1") == 1
    group.events.clear()
    with torch.autocast("cpu", torch.bfloat16):
        assert row(x).shape == (2, 3, 3)
    assert not group.events


def test_which_modules_are_plain_products() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    computed = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    assert [is_overlappable(module) for module in (nn.Linear(2, 2), Scaled(2, 2), computed)] == [True, False, False]
