"""Which devices a run may use: those whose ranks fail repeatedly are left out for a back-off time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Generic, TypeVar

from meshwright.train.config import RecoveryConfig

FORGIVEN = 10.0
"""After this many back-off times without a failure, a device's earlier failures don't count."""


Slot = TypeVar("Slot", int, tuple[int, int])


class Roster(Generic[Slot]):
    """The devices of a run by slot: a device number, or (node, device number) over several nodes.

    Args:
        slots: all devices.
        config: after how many failures one is left out, and for how long.
    """

    def __init__(self, slots: Sequence[Slot], config: RecoveryConfig) -> None:
        self._slots: list[Slot] = list(slots)
        self._config = config
        self._blames: dict[Slot, list[float]] = {}
        self._readmit_at: dict[Slot, float] = {}

    @property
    def present(self) -> list[Slot]:
        """Devices that may be used."""
        return [slot for slot in self._slots if slot not in self._readmit_at]

    @property
    def absent(self) -> list[Slot]:
        """Devices that are left out."""
        return sorted(self._readmit_at)

    def blame(self, slot: Slot) -> bool:
        """Records that a device's rank failed first; returns whether the device is left out now."""
        now_s = time.monotonic()
        # Older failures are forgiven, relative to the present back-off time.
        recent: list[float] = [
            blamed_at for blamed_at in self._blames.get(slot, []) if now_s - blamed_at < FORGIVEN * self._pause(slot)
        ]
        self._blames[slot] = [*recent, now_s]
        # The first failure of a device may be the software's: it gets a second chance.
        if self._config.on_death == "restart" and len(self._blames[slot]) < 2:
            return False
        self._readmit_at[slot] = now_s + self._pause(slot)
        return True

    def _pause(self, slot: Slot) -> float:
        """Returns the seconds for which a device is left out, doubled with each repeated failure."""
        # The back-off doubles from the first failure that leaves the device out.
        tolerated = 1 if self._config.on_death == "shrink" else 2
        return self._config.back_s * 2.0 ** max(0, len(self._blames.get(slot, [])) - tolerated)

    def due(self) -> list[Slot]:
        """Returns the devices whose time out is over."""
        now_s = time.monotonic()
        return [slot for slot, readmit_at in self._readmit_at.items() if readmit_at <= now_s]

    def next_s(self) -> float:
        """Returns the seconds until the next device may be tried again; 0 when none is out."""
        return max(0.0, min(self._readmit_at.values(), default=0.0) - time.monotonic())

    def readmit(self, slots: Sequence[Slot]) -> None:
        """Makes devices usable again."""
        for slot in slots:
            self._readmit_at.pop(slot, None)
