"""Two functions take turns: one computes while what the other has sent is under way, forward and backward."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch.overrides import TorchFunctionMode

from meshwright.errors import PlanError
from meshwright.forking import fork_obstacle
from meshwright.parallel.axis_group import AxisGroup
from meshwright.parallel.halves import RowCut
from meshwright.parallel.row_exchange import Leg, RowExchange
from meshwright.parallel.schedule_run import TensorKind
from meshwright.parallel.turns import Held, Turns, give_way
from tests.unit.test_row_exchange import EVENTS, OneRank, _Compute, position

LAYERS = 3


def half(name: str, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Layers of a half: each computes, and sends what it has out and home."""

    def run() -> torch.Tensor:
        x = rows
        for layer in range(LAYERS):
            x = _Compute.apply(x, f"{name}{layer}")
            for way in ("out", "home"):
                group = cast("AxisGroup", OneRank(f"{way} {name}{layer}"))
                x = RowExchange(x, Leg(group, [len(x)], [len(x)])).wait()
                x = _Compute.apply(x, f"{way} {name}{layer}")
        return x

    return run


def test_what_one_half_sends_travels_under_what_the_other_computes() -> None:
    turns = Turns(torch.device("cpu"))
    for _ in range(2):  # the helper's thread counts on, and numbers of the second pair lie elsewhere
        EVENTS.clear()
        x = torch.rand(8, 2, dtype=torch.float64, requires_grad=True)
        parts = turns.run(*(half(name, rows) for name, rows in zip("ab", x.chunk(2))))
        found = torch.cat(parts)
        found.square().sum().backward()
        factor = 3.0 ** (3 * LAYERS)
        torch.testing.assert_close(found, factor * x)
        torch.testing.assert_close(x.grad, 2 * factor**2 * x)
        assert len(EVENTS) == len(set(EVENTS)) == 2 * LAYERS * 2 * (3 + 2 + 2)
        # Between the begin and the end of each journey the other half computes, forward and backward.
        journeys = [event.removeprefix("begin ") for event in EVENTS if event.startswith("begin")]
        bare = []
        for journey in journeys:
            other = "b" if "a" in journey.split()[1] else "a"
            between = EVENTS[position(f"begin {journey}") : position(f"end {journey}")]
            if not any(
                event.startswith("compute") and other in event.split()[-1 - ("back" in event)] for event in between
            ):
                bare.append(journey)
        assert not bare


def test_numbers_are_of_the_order_in_which_both_were_recorded() -> None:
    order: list[str] = []

    def watched(name: str, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            y = x
            for turn in range(3):
                y = 2 * y
                y.register_hook(lambda _, turn=turn: order.append(f"{name}{turn}"))  # type: ignore[misc]
                give_way()
            return y.sum()

        return run

    x = torch.ones(2, requires_grad=True)
    one, other = Turns(torch.device("cpu")).run(watched("a", x), watched("b", x))
    (one + other).backward()
    assert order == ["b2", "a2", "b1", "a1", "b0", "a0"]


class Shared:
    value = "none"


def test_each_half_finds_what_it_left_on_shared_objects() -> None:
    shared = Shared()
    seen = []

    def run(name: str) -> None:
        assert shared.value == "none"
        for _ in range(2):
            shared.value = name
            give_way()
            seen.append((name, shared.value))

    Turns(torch.device("cpu"), [Held(shared, ("value",))]).run(lambda: run("a"), lambda: run("b"))
    assert seen == [("a", "a"), ("b", "b")] * 2
    assert shared.value == "none"


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("turns_before", [0, 1])
def test_a_half_that_fails_ends_the_other(failing: int, turns_before: int) -> None:
    turns, went_on = Turns(torch.device("cpu")), []

    def fails() -> None:
        for _ in range(turns_before):
            give_way()
        raise KeyError("mine")

    def goes_on() -> None:
        for turn in range(5):
            give_way()
            went_on.append(turn)

    pair = [goes_on, goes_on]
    pair[failing] = fails
    with pytest.raises(KeyError, match="mine"):
        turns.run(*pair)
    assert len(went_on) <= turns_before
    # the next pair runs, on the same thread
    names = turns.run(*[lambda: threading.current_thread().name] * 2)
    assert names[1].startswith("second half") and names[0] == threading.current_thread().name


def test_modes_and_gradients_are_those_of_the_caller() -> None:
    turns = Turns(torch.device("cpu"))
    with torch.no_grad(), torch.device("meta"):
        devices = turns.run(*[lambda: (torch.ones(1).device.type, torch.is_grad_enabled())] * 2)
    assert devices == (("meta", False),) * 2


def kinds(*shapes: tuple[int, ...]) -> list[TensorKind]:
    return [TensorKind(shape=shape, dtype=torch.float32) for shape in shapes]


def test_rows_are_halved_in_whatever_dim_they_are() -> None:
    # rows first, rows second, rows of all tokens, and a table that doesn't depend on them
    whole, first, second = (
        (kinds((rows, 7), (3, rows, 2), (1, rows * 7, 2), (7, 2)), kinds((3, rows))) for rows in (5, 2, 3)
    )
    cut = RowCut(whole, first, second)
    tensors = tuple(torch.rand(kind.shape) for kind in whole[0])
    one, other = cut.split(tensors)
    assert [part.shape for part in one] == [kind.shape for kind in first[0]]
    assert [part.shape for part in other] == [kind.shape for kind in second[0]]
    assert torch.equal(torch.cat((one[1], other[1]), 1), tensors[1]) and torch.equal(other[0], tensors[0][2:])
    assert one[3] is other[3] is tensors[3]
    (joined,) = cut.join((torch.zeros(3, 2),), (torch.ones(3, 3),))
    assert joined.tolist() == [[0, 0, 1, 1, 1]] * 3


@pytest.mark.parametrize("shapes", [((4, 4), (2, 2), (2, 2)), ((4, 2), (3, 2), (2, 2)), ((4, 2), (2,), (2,))])
def test_rows_that_shapes_dont_tell_are_refused(shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(PlanError, match=r"ep_halves=true.*drop ep_halves"):
        RowCut(*((kinds(shape), kinds()) for shape in shapes))


class _OfOneThread(TorchFunctionMode):
    """A mode that no second thread may enter."""

    def __enter__(self) -> Any:
        if threading.current_thread().name == "second half":
            raise ValueError("entered twice")
        return super().__enter__()


def test_a_second_half_that_cannot_begin_ends_the_first() -> None:
    turns, failures = Turns(torch.device("cpu")), []

    def run() -> None:
        with _OfOneThread(), pytest.raises(ValueError, match="entered twice") as caught:
            turns.run(give_way, give_way)
        failures.append(caught.value)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert failures and not thread.is_alive()


def test_a_process_with_an_idle_pair_can_fork_and_its_thread_ends_with_it() -> None:
    turns = Turns(torch.device("cpu"))
    turns.run(give_way, give_way)
    assert fork_obstacle() is None
    thread = turns._thread
    del turns
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()
