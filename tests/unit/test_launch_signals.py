"""How a command is asked to end: by any of three signals, of which several at once are one."""

from __future__ import annotations

import os
import signal

from meshwright.launch import signals
from meshwright.launch.signals import handle_interrupts


def test_hangup_is_terminate_and_two_at_once_are_one(monkeypatch) -> None:
    seen: list[int] = []
    now = [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may be run under nohup
    with handle_interrupts(lambda number, frame: seen.append(number)):
        os.kill(os.getpid(), signal.SIGHUP)
        now[0] += 0.5
        with handle_interrupts(lambda number, frame: seen.append(-number)):
            os.kill(os.getpid(), signal.SIGTERM)
            assert seen == [signal.SIGTERM], "the second of two, though another handler has come between"
            now[0] += 1.5
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    signal.signal(signal.SIGHUP, before)
    assert seen == [signal.SIGTERM, -signal.SIGTERM, -signal.SIGINT, -signal.SIGINT]


def test_under_nohup_a_hangup_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handle_interrupts(lambda number, frame: None):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
