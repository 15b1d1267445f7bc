"""Ranks for the sketches beside this file: forks them, where a real job would be started by torchrun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshwright import launch_ranks


def run(ranks: int, work: Callable[[], Any]) -> None:
    """Calls ``work()`` on some ranks, within a process group."""
    launch_ranks(lambda context: work(), ranks, kind="cpu", timeout_s=100)
