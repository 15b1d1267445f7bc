"""Which devices of a node a run may use: those whose ranks fail again and again are left out, for a while."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Generic, TypeVar

from meshwright.train.config import RecoveryConfig

FORGIVEN = 10.0
"""A device that works for this many back-off times is no longer blamed for what was before."""


Slot = TypeVar("Slot", int, tuple[int, int])


class Roster(Generic[Slot]):
    """The devices of a run: numbers, or numbers of node and device.

    Args:
        slots: which devices there are.
        config: when one is left out, and for how long.
    """

    def __init__(self, slots: Sequence[Slot], config: RecoveryConfig) -> None:
        self._slots: list[Slot] = list(slots)
        self._config = config
        self._blames: dict[Slot, list[float]] = {}
        self._back_at: dict[Slot, float] = {}

    @property
    def present(self) -> list[Slot]:
        """Devices that may be used."""
        return [slot for slot in self._slots if slot not in self._back_at]

    @property
    def absent(self) -> list[Slot]:
        """Devices that are left out."""
        return sorted(self._back_at)

    def blame(self, slot: Slot) -> bool:
        """Takes note that a device's rank failed first; returns whether the device is left out now."""
        now = time.monotonic()
        recent: list[float] = [at for at in self._blames.get(slot, []) if now - at < FORGIVEN * self._pause(slot)]
        self._blames[slot] = [*recent, now]
        if self._config.on_death == "restart" and len(self._blames[slot]) < 2:
            return False
        self._back_at[slot] = now + self._pause(slot)
        return True

    def _pause(self, slot: Slot) -> float:
        """Seconds that a device is left out: doubled each time that it fails again."""
        least = 1 if self._config.on_death == "shrink" else 2
        return self._config.back_s * 2.0 ** max(0, len(self._blames.get(slot, [])) - least)

    def due(self) -> list[Slot]:
        """Returns the devices whose time out is over."""
        now = time.monotonic()
        return [slot for slot, at in self._back_at.items() if at <= now]

    def next_s(self) -> float:
        """Returns the seconds until the next device may be tried again; 0 when none is out."""
        return max(0.0, min(self._back_at.values(), default=0.0) - time.monotonic())

    def readmit(self, slots: Sequence[Slot]) -> None:
        """Uses devices again."""
        for slot in slots:
            self._back_at.pop(slot, None)
