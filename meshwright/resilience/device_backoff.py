"""Which devices a run leaves out: those whose ranks fail repeatedly, each for a back-off time that doubles."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

from meshwright.resilience.messages import Device
from meshwright.train.config import RecoveryConfig

FORGIVEN = 10.0
"""After this many back-off times without a failure, a device's earlier failures don't count."""


class DeviceBackoff:
    """Leaves out devices for a time after failures of their ranks.

    Args:
        config: after how many failures a device is left out, and for how long.
    """

    def __init__(self, config: RecoveryConfig) -> None:
        self._config = config
        self._failures_at: dict[Device, list[float]] = {}
        self._readmit_at: dict[Device, float] = {}

    @property
    def left_out(self) -> list[Device]:
        """Devices that are left out, also those of nodes that are gone."""
        return sorted(self._readmit_at)

    def record_failure(self, device: Device) -> float | None:
        """Records that a device's rank failed first.

        Returns:
            Seconds for which the device is left out from now on; None when it stays in use.
        """
        now_s = time.monotonic()
        # Older failures are forgiven, relative to the present back-off time.
        recent = [
            failed_at
            for failed_at in self._failures_at.get(device, [])
            if now_s - failed_at < FORGIVEN * self._back_off_s(device)
        ]
        self._failures_at[device] = [*recent, now_s]
        # The first failure of a device may be the software's: it gets a second chance.
        if self._config.on_death == "restart" and len(self._failures_at[device]) < 2:
            return None
        back_off_s = self._back_off_s(device)
        self._readmit_at[device] = now_s + back_off_s
        return back_off_s

    def _back_off_s(self, device: Device) -> float:
        # The back-off doubles from the first failure that leaves the device out.
        tolerated = 1 if self._config.on_death == "shrink" else 2
        return self._config.back_s * 2.0 ** max(0, len(self._failures_at.get(device, [])) - tolerated)

    def expired(self, devices: Collection[Device]) -> list[Device]:
        """Returns those of some devices that are left out and whose back-off time is over."""
        now_s = time.monotonic()
        return [device for device, readmit_at in self._readmit_at.items() if device in devices and readmit_at <= now_s]

    def remaining_s(self, devices: Collection[Device]) -> float:
        """Returns the seconds until the first of some devices may be tried again; 0 when none of them is left out."""
        readmit_times = [readmit_at for device, readmit_at in self._readmit_at.items() if device in devices]
        return max(0.0, min(readmit_times) - time.monotonic()) if readmit_times else 0.0

    def readmit(self, devices: Iterable[Device]) -> None:
        """Makes devices usable again."""
        for device in devices:
            self._readmit_at.pop(device, None)
