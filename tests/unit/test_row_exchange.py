"""Journeys of rows take turns: what one exchanges goes on under what another computes, forward and backward."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch.autograd.function import FunctionCtx

from meshwright.parallel.axis_group import AxisGroup
from meshwright.parallel.row_exchange import Journey, Leg, RowExchange, travel_in_turns

EVENTS: list[str] = []


class _Pending:
    def __init__(self, name: str, out: torch.Tensor, rows: torch.Tensor) -> None:
        self._name, self._out, self._rows = name, out, rows

    def wait(self) -> None:
        EVENTS.append(f"end {self._name}")
        self._out.copy_(self._rows)


class OneRank:
    """A group of one rank, whose rows arrive when they are waited for, and not before."""

    def __init__(self, name: str) -> None:
        self._name, self._begun = name, 0

    def all_to_all_rows(self, out: torch.Tensor, rows: torch.Tensor, received: Any, sent: Any) -> _Pending:
        self._begun += 1
        name = f"{self._name}{'' if self._begun == 1 else ' back'}"
        EVENTS.append(f"begin {name}")
        out.fill_(torch.nan)
        return _Pending(name, out, rows)


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        EVENTS.append(f"compute {name}")
        return 3 * x

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        EVENTS.append(f"compute {ctx.name} back")
        return 3 * upstream[0], None


def journey(rows: torch.Tensor, name: int) -> Journey:
    groups = [cast("AxisGroup", OneRank(f"{way} {name}")) for way in ("out", "home")]
    outward = RowExchange(rows, Leg(groups[0], [len(rows)], [len(rows)]))
    yield
    homeward = RowExchange(_Compute.apply(outward.wait(), str(name)), Leg(groups[1], [len(rows)], [len(rows)]))
    yield
    return homeward.wait()


def position(event: str) -> int:
    return EVENTS.index(event)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_an_exchange_goes_on_under_the_others_computing(count: int) -> None:
    EVENTS.clear()
    x = torch.rand(8, 2, dtype=torch.float64, requires_grad=True)
    found = torch.cat(travel_in_turns([journey(rows, number) for number, rows in enumerate(x.chunk(count))]))
    found.square().sum().backward()
    assert torch.equal(found, 3 * x) and x.grad is not None
    torch.testing.assert_close(x.grad, 18 * x)
    assert len(EVENTS) == len(set(EVENTS)) == 10 * count
    for number in range(count - 1):
        after = number + 1
        # Forward: the next has set out before this one computes, and this one comes home after the next computed.
        assert position(f"begin out {after}") < position(f"compute {number}")
        assert position(f"begin home {number}") < position(f"compute {after}") < position(f"end home {number}")
        # Backward begins with the last.
        assert position(f"begin home {number} back") < position(f"compute {after} back")
        assert (
            position(f"begin out {after} back") < position(f"compute {number} back") < position(f"end out {after} back")
        )
