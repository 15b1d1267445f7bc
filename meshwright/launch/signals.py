"""The polite way to end a run: a flag on every rank that a signal raises and the loop looks at between steps."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ONCE_S = 1.0
"""Signals to end within so many seconds are one."""
STOP_SIGNAL = signal.SIGUSR1
"""What the launcher sends to a rank on the first Ctrl-C; SIGTERM keeps its meaning of ending a process at once."""


class _Politely:
    """A signal handler that takes SIGHUP for SIGTERM, and several of these within `ONCE_S` for one.

    make, timeout and a scheduler each send one when they end the same command.

    Args:
        handler: called for what counts.
        before: what handled the signals until now, which may have counted one a moment ago.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], None], before: object) -> None:
        self._handler = handler
        self._last: list[float] = before._last if isinstance(before, _Politely) else []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Hands a signal on, unless it says again what another has just said."""
        if number != signal.SIGINT:
            number, now = signal.SIGTERM, time.monotonic()
            again = bool(self._last) and now - self._last[-1] < ONCE_S
            self._last[:] = [now]
            if again:
                return
        self._handler(number, frame)


@contextmanager
def interrupts_to(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Hands SIGINT, SIGTERM and SIGHUP (as SIGTERM) to a handler for a while; does nothing off the main thread.

    A SIGHUP that is ignored, as under nohup, stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    politely = _Politely(handler, signal.getsignal(signal.SIGTERM))
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    before = {number: signal.signal(number, politely) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class StopFlag:
    """Says whether somebody asked this rank to end cleanly.

    Ranks may see it at different steps: they agree on it before they act.
    """

    def __init__(self) -> None:
        self._requested = False

    @property
    def requested(self) -> bool:
        """True from the moment the first polite signal has arrived."""
        return self._requested

    def request(self) -> None:
        """Raises the flag by hand."""
        self._requested = True

    def install(self, *signals: signal.Signals) -> StopFlag:
        """Lets signals raise this flag from now on.

        Args:
            signals: which ones; `STOP_SIGNAL` when none is given.

        Returns:
            The flag itself.

        Raises:
            ValueError: when called from a thread other than the main one.
        """
        for number in signals or (STOP_SIGNAL,):
            signal.signal(number, self._raise)
        return self

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self._requested = True
