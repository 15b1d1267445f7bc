"""Orderly ends of a run: a flag on every rank that a signal sets and the loop checks between steps."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ONCE_S = 1.0
"""Termination signals within this time count as one."""
Handler = Callable[[int, FrameType | None], None] | signal.Handlers
"""What a signal runs, or ``SIG_IGN`` and ``SIG_DFL``."""
STOP_SIGNAL = signal.SIGUSR1
"""The launcher's signal to a rank on the first Ctrl-C; SIGTERM keeps its meaning of ending a process at once."""


class _CoalescedSignals:
    """A signal handler that treats SIGHUP as SIGTERM, and several of both within `ONCE_S` as one.

    make, timeout and a scheduler may each send one when they end the same command.

    Args:
        handler: called once for each signal that counts.
        previous_handler: the handler until now, whose last signal still counts for `ONCE_S`.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], None], previous_handler: object) -> None:
        self._handler = handler
        # A list shared between nested handlers, so that a repeat is recognised across blocks.
        self._last_at: list[float] = (
            previous_handler._last_at if isinstance(previous_handler, _CoalescedSignals) else []
        )

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Calls the handler, unless the signal repeats one within `ONCE_S`."""
        if number != signal.SIGINT:
            number, now_s = signal.SIGTERM, time.monotonic()
            is_repeat = bool(self._last_at) and now_s - self._last_at[-1] < ONCE_S
            self._last_at[:] = [now_s]
            if is_repeat:
                return
        self._handler(number, frame)


@contextmanager
def handle_interrupts(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Passes SIGINT, SIGTERM and SIGHUP (as SIGTERM) to a handler within a block; does nothing off the main thread.

    A SIGHUP that is ignored, as under nohup, stays ignored.
    """
    # Python delivers signals to the main thread only, and lets only it install handlers.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    coalesced = _CoalescedSignals(handler, signal.getsignal(signal.SIGTERM))
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    previous_handlers = {number: signal.signal(number, coalesced) for number in numbers}
    try:
        yield
    finally:
        for number, previous_handler in previous_handlers.items():
            signal.signal(number, previous_handler)


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into a KeyboardInterrupt within a block, so that what it made is cleared away."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    with handle_interrupts(interrupt):
        yield


class InterruptCounter:
    """Counts how often a user or a scheduler asked the run to end, over all generations of its ranks."""

    def __init__(self) -> None:
        self.count = 0
        """Signals so far: the first ends the run with a checkpoint, the second at once."""
        self.terminated = False
        """Whether SIGTERM was among them."""
        self.first_at: float | None = None
        """time.monotonic() of the first; None before."""
        self.leaves_at_sigterm = False
        """Whether the first SIGTERM asks this node alone to leave the run."""
        self.leaving_since: float | None = None
        """time.monotonic() of that SIGTERM, which isn't counted; None before."""

    def record(self, number: int, frame: FrameType | None = None) -> None:
        """Counts a signal; a signal handler."""
        self.terminated |= number == signal.SIGTERM
        if number == signal.SIGTERM and self.leaves_at_sigterm and not self.count and self.leaving_since is None:
            self.leaving_since = time.monotonic()
        else:
            self._add_one()

    def end_run_instead(self) -> None:
        """Counts the SIGTERM that asked this node to leave, which it can't."""
        self.leaving_since, self.leaves_at_sigterm = None, False
        self._add_one()

    def _add_one(self) -> None:
        self.count += 1
        if self.first_at is None:
            self.first_at = time.monotonic()


class StopFlag:
    """Whether this rank was asked to end in order.

    Ranks may see it at different steps: they agree on it by the step's all-reduce before they act.
    """

    def __init__(self) -> None:
        self._requested = False
        self._handlers: dict[signal.Signals, Handler] = {}

    @property
    def requested(self) -> bool:
        """True once the first such signal has arrived."""
        return self._requested

    def request(self) -> None:
        """Sets the flag."""
        self._requested = True

    def install(self, *signals: signal.Signals) -> StopFlag:
        """Installs handlers by which signals set this flag.

        Args:
            signals: which ones; `STOP_SIGNAL` when none is given.

        Returns:
            The flag itself.

        Raises:
            ValueError: when called from a thread other than the main one.
        """
        for number in signals or (STOP_SIGNAL,):
            self.hold(number, self._set_requested)
        return self

    def hold(self, number: signal.Signals, handler: Handler) -> None:
        """Installs a handler that `restore` installs again."""
        signal.signal(number, handler)
        self._handlers[number] = handler

    def restore(self) -> None:
        """Installs handlers again that a library replaced behind Python's back; does nothing off the main thread.

        LLVM does so for SIGUSR1, SIGTERM and others when Triton first compiles a kernel in a process.
        Source: LLVM, lib/Support/Unix/Signals.inc, `RegisterHandlers`.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == handler:
                signal.signal(number, handler)

    def _set_requested(self, number: int, frame: FrameType | None) -> None:
        self._requested = True
