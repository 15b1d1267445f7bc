"""The dynamic loss scale of fp16 training: halved after an overflow, doubled after `GROWTH_STEPS` without one.

Source: Micikevicius et al., Mixed Precision Training (ICLR 2018), section 3.2. All ranks of an island see
the same norm, so they take the same decision; islands have scales of their own.
"""

from __future__ import annotations

GROWTH_STEPS = 1000
"""Steps without overflow after which the scale doubles."""
LARGEST = 2.0**24
"""Scales beyond this gain nothing in fp16."""


class LossScaler:
    """Dynamic loss scale; inert (scale 1) unless compute runs in fp16.

    Args:
        active: whether to scale.
    """

    def __init__(self, active: bool) -> None:
        self.active = active
        self.scale = 2.0**16 if active else 1.0
        self._quiet = 0

    def update(self, finite: bool) -> None:
        """Adapts the scale after a step whose global gradient was finite or not."""
        if not self.active:
            return
        if not finite:
            self.scale, self._quiet = max(1.0, self.scale / 2), 0
            return
        self._quiet += 1
        if self._quiet >= GROWTH_STEPS:
            self.scale, self._quiet = min(LARGEST, self.scale * 2), 0

    def state(self) -> dict[str, float]:
        """Returns plain values for a checkpoint."""
        return {"scale": self.scale, "quiet": self._quiet, "active": self.active}

    def restore(self, state: dict[str, float]) -> None:
        """Restores `state`'s values if that run scaled too: the constant 1 of an unscaled run would never be left."""
        if self.active and state.get("active", True):
            self.scale, self._quiet = float(state["scale"]), int(state["quiet"])
