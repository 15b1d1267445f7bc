"""What ranks report of a damaged state; without torch, since a run's nodes read it before any rank is there."""

from __future__ import annotations

import math
from dataclasses import dataclass

LIMITS, COPIES, BOUNDS = "limits", "copies", "bounds"


@dataclass(frozen=True, slots=True)
class Element:
    """One element of a box, with its value on each holder."""

    ranks: tuple[int, ...]
    """The holders."""
    number: int
    """Number of its box in the holder set."""
    index: int
    """Its index in the flattened box."""
    values: tuple[str, ...]
    """``repr`` of each holder's value: JSON has no infinity."""

    def farthest(self, value: float) -> tuple[int, ...]:
        """Returns the rank whose value is farthest from a correct one, as a tuple; empty when several are."""
        distances = [abs(float(entry) - value) for entry in self.values]
        # max() with a NaN depends on the order of its arguments.
        distances = [math.inf if math.isnan(entry) else entry for entry in distances]
        largest = max(distances)
        return (self.ranks[distances.index(largest)],) if distances.count(largest) == 1 else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """A damage of the state, as the ranks that detected it report it to their successors."""

    kind: str
    """`LIMITS`: loss or norm out of the learned range; `COPIES`: copies differ; `BOUNDS`: a value that no update can
    have produced."""
    step: int
    """Steps done at its detection."""
    keep: int
    """The newest step whose state may be restored."""
    why: str
    """A sentence for events and errors."""
    ranks: tuple[int, ...] = ()
    """Ranks that the majority contradicts."""
    base: int = 0
    """Step of the state that the detecting ranks had restored."""
    rows: tuple[tuple[int, ...], ...] = ()
    """Checksums of each rank, for `COPIES`."""
    element: Element | None = None
    """The element whose copies differ most, for `COPIES`."""
    last: bool = False
    """Whether no older state exists: recurring numbers are the training's own."""
