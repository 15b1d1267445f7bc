"""The polite way to end a run: a flag on every rank that a signal raises and the loop looks at between steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNAL = signal.SIGUSR1
"""What the launcher sends to a rank on the first Ctrl-C; SIGTERM keeps its meaning of ending a process at once."""


@contextmanager
def interrupts_to(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Hands SIGINT and SIGTERM to a handler for a while; does nothing off the main thread, which has no say in them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
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
