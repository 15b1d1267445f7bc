"""Two functions that run in turns: one goes on while what the other has begun to send is under way, backward too.

A model's forward can't be stopped half way, so that the second function runs on a thread of its own. One of both runs
at a time, and gives way where it would wait (`give_way`). Autograd runs first what was recorded last, by numbers that
each thread counts for itself: `Turns.run` renumbers both graphs by the order in which they were recorded, so that
backward takes the turns in the opposite order. Or a forward runs beside a backward of other layers, which gives way
itself, where it computes again too (`Turns.run_beside_backward`).
"""

from __future__ import annotations

import contextlib
import contextvars
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from meshwright.torch_compat.graph_order import Span, renumber, sequence_number
from meshwright.torch_compat.tensors import function_modes, tree_leaves

T = TypeVar("T")


class OtherTurnFailed(RuntimeError):
    """Ends one function where the other one has failed."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a function keeps on an object that both use: it is put aside while the other one runs."""

    owner: object
    names: tuple[str, ...]
    """Attributes."""

    def values(self) -> list[Any]:
        """Returns the attributes' values."""
        return [getattr(self.owner, name) for name in self.names]

    def put(self, values: Iterable[Any]) -> None:
        """Sets the attributes."""
        for name, value in zip(self.names, values):
            setattr(self.owner, name, value)


@dataclass(slots=True)
class _Side:
    """One of the two functions as it runs."""

    began: int = 0
    """Number of the first node that its present turn records, as its thread counts."""
    has_ended: bool = False
    spans: list[Span] = field(default_factory=list)
    """What each turn recorded."""


class _Session:
    """One pair of functions, which take turns until both have ended."""

    def __init__(self, held: Sequence[Held]) -> None:
        self._held, self._before = held, [item.values() for item in held]
        self._sides = (_Side(), _Side())
        self._turn, self._next_number = 0, sequence_number()
        self._condition = threading.Condition()
        self.first_failed: int | None = None
        """The side that failed first; the other one ends for that."""

    def begin(self, side: int) -> None:
        """Waits for the first turn of a side; called on its thread."""
        self._await_turn(side)
        self.put_before()
        self._sides[side].began = sequence_number()
        self._check()

    def put_before(self) -> None:
        """Puts back what was held before the first turn."""
        for item, values in zip(self._held, self._before):
            item.put(values)

    def give_way(self, side: int) -> None:
        """Lets the other side run until it gives way or ends."""
        if self._sides[1 - side].has_ended:
            # Unless a signal has ended the other one, which wasn't its turn: this one would go on without it.
            self._check()
            return
        values = [item.values() for item in self._held]
        self._end_turn(side)
        self._await_turn(side)
        for item, kept in zip(self._held, values):
            item.put(kept)
        self._sides[side].began = sequence_number()
        self._check()

    def end(self, side: int, has_failed: bool) -> None:
        """Ends a side, behind its last turn."""
        self._sides[side].has_ended = True
        if has_failed and self.first_failed is None:
            self.first_failed = side
        self._end_turn(side)

    def spans(self, side: int) -> list[Span]:
        """Returns the turns of a side."""
        return self._sides[side].spans

    def _check(self) -> None:
        if self.first_failed is not None:
            raise OtherTurnFailed("the other half of the micro-batch, or pass of a pair, has failed")

    def _end_turn(self, side: int) -> None:
        current, end = self._sides[side], sequence_number()
        current.spans.append((current.began, end, self._next_number - current.began))
        self._next_number += end - current.began
        with self._condition:
            self._turn = 1 - side
            self._condition.notify_all()

    def _await_turn(self, side: int) -> None:
        with self._condition:
            # The other side's collectives have limits, and it ends its turn in any case.
            self._condition.wait_for(lambda: self._turn == side)


_Seat = tuple[_Session, int]
"""A pair, and one side of it."""
_SEAT: contextvars.ContextVar[_Seat | None] = contextvars.ContextVar("seat", default=None)
_BACKWARD_SEATS: list[_Seat] = []
"""The backward's of a pair under way: on GPUs autograd runs it on a thread of its own, which has no context."""


def give_way() -> None:
    """Lets the other of two functions run, where there are two; called between begin and wait of a transfer."""
    seat = _SEAT.get() or (_BACKWARD_SEATS[-1] if _BACKWARD_SEATS else None)
    if seat is not None:
        session, side = seat
        session.give_way(side)


_Call = tuple[Future[Any], Callable[[], Any]]
"""A function, and where its result goes."""


def _serve(calls: queue.SimpleQueue[_Call | None]) -> None:
    """Runs functions, until None comes."""
    while (call := calls.get()) is not None:
        result, function = call
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)
        # What it computed doesn't outlive the step.
        del call, result, function


class Turns:
    """Runs pairs of functions.

    Args:
        device: that they compute on.
        held: what each keeps on objects that both use.
    """

    def __init__(self, device: torch.device, held: Sequence[Held] = ()) -> None:
        self._device, self._held, self._has_device = device, tuple(held), False
        # One thread for all pairs: each new one would start processor threads of its own for its operators.
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._calls,), name="second half", daemon=True)
        weakref.finalize(self, self._calls.put, None)

    def hold(self, item: Held) -> None:
        """Has each function keep something more of its own, from the next pair on."""
        self._held = (*self._held, item)

    def run(self, first: Callable[[], T], second: Callable[[], T]) -> tuple[T, T]:
        """Returns what both functions return; their tensors' backward takes the turns in the opposite order.

        The first begins. On every rank both must give way in the same places, or collectives would meet others.
        """
        session = _Session(self._held)
        results = self._run(session, first, second)
        for side, result in enumerate(results):
            tensors = [item for item in tree_leaves(result) if isinstance(item, torch.Tensor)]
            renumber(tensors, session.spans(side))
        return results

    def run_beside_backward(self, forward: Callable[[], object], backward: Callable[[], object]) -> None:
        """Runs a forward, and the backward of another micro-batch through other layers, in turns."""
        session = _Session(self._held)
        _BACKWARD_SEATS.append((session, 1))
        try:
            self._run(session, forward, backward)
        finally:
            _BACKWARD_SEATS.pop()

    def _run(self, session: _Session, first: Callable[[], T], second: Callable[[], T]) -> tuple[T, T]:
        modes, has_grad = function_modes(), torch.is_grad_enabled()
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

        def second_as_here() -> T:
            self._choose_device()
            with contextlib.ExitStack() as stack:
                for context in (*modes, torch.set_grad_enabled(has_grad), torch.cuda.stream(stream)):
                    stack.enter_context(context)
                return second()

        other: Future[T] = Future()
        if not self._thread.is_alive():
            self._thread.start()
        # All that the thread does is within its turns: a failure anywhere ends the first function's wait.
        context = contextvars.copy_context()
        self._calls.put((other, lambda: context.run(self._take_turns, session, 1, second_as_here)))
        try:
            mine = contextvars.copy_context().run(self._take_turns, session, 0, first)
        except BaseException:
            # torch's pipelining raises another error than `OtherTurnFailed`.
            if session.first_failed == 1:
                other.result()
            raise
        finally:
            other.exception()
            session.put_before()
        return mine, other.result()

    def _choose_device(self) -> None:
        """Makes the rank's GPU the second thread's: a new one's is the first, on which it would take up memory."""
        if self._device.type == "cuda" and not self._has_device:
            torch.cuda.set_device(self._device)
            self._has_device = True

    @staticmethod
    def _take_turns(session: _Session, side: int, function: Callable[[], T]) -> T:
        try:
            session.begin(side)
            _SEAT.set((session, side))
            result = function()
        except BaseException:
            session.end(side, has_failed=True)
            raise
        session.end(side, has_failed=False)
        return result
