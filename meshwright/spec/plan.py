"""What the planner hands to the runtime: a layout, its prediction, and why the others lost; frozen, JSON both ways."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from meshwright.errors import ConfigError, nearest
from meshwright.json_types import JsonObject
from meshwright.spec.layout import Layout

ALLOWED = ("lossy", "islands")
"""What a plan may do to the numbers of training where the user allows it: send rounded values, join once a round."""


def check_allowed(names: Sequence[str]) -> None:
    """Refuses what no plan can be allowed.

    Raises:
        ConfigError: for a name that isn't in `ALLOWED`.
    """
    for name in names:
        if name not in ALLOWED:
            raise ConfigError(f"allow: {name} is unknown{nearest(name, ALLOWED)}")


def check_fits(chance: float) -> None:
    """Refuses a chance with which no plan can fit.

    Raises:
        ConfigError: for one that isn't between 0.5 and 1.
    """
    if not 0.5 <= chance < 1:
        raise ConfigError(
            f"fits = {chance}: the chance with which the plan fits is at least 0.5 and under 1, as 0.99; nothing is "
            "certain to fit before it ran"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What a layout is expected to take; a part that wasn't priced is absent, never zero."""

    memory: Mapping[str, int]
    """Bytes of the fullest rank by part: parameters, gradients, optimizer, and activations, logits where priced."""
    formula: Mapping[str, str] = field(default_factory=dict)
    """For each part of memory, the formula that gave it."""
    step_s: float | None = None
    """Seconds per step."""
    step_range_s: tuple[float, float] | None = None
    """Seconds between which a step takes with a chance of 80 %."""
    fits: float | None = None
    """Chance that the fullest rank fits its device."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Parts of step_s in seconds."""
    traffic: Mapping[str, int] = field(default_factory=dict)
    """Bytes that rank 0, whose records a run keeps, sends per step, by axis as the runtime books them."""
    host: int = 0
    """Bytes of the host's memory that the rank takes which has most there, where the layout offloads."""
    learned: float = 1.0
    """Seconds of a step, corrected by what earlier runs on these machines took, over what was priced."""
    waits_s: float = 0.0
    """Seconds of a step for which a rank waits for traffic, as priced before that correction."""
    flops: float = 0.0
    """Model FLOPs of a step on all ranks, by which later plans know a run of like size; 0 where time wasn't priced."""
    join_s: float = 0.0
    """Seconds of a step beside these for joins of islands, and first steps as one: the mean over the run."""
    joules_per_token: float | None = None
    """Energy of all devices at their power under load over the step's tokens; None where no power is known."""

    def rescaled(self, step_s: float) -> Self:
        """Returns the prediction with another time of a step, and what follows from it: its range and its energy.

        Args:
            step_s: seconds of a step that are expected instead.
        """
        if not self.step_s:
            return dataclasses.replace(self, step_s=step_s)
        ratio = step_s / self.step_s
        limits = self.step_range_s
        return dataclasses.replace(
            self,
            step_s=step_s,
            step_range_s=None if limits is None else (limits[0] * ratio, limits[1] * ratio),
            joules_per_token=None if self.joules_per_token is None else self.joules_per_token * ratio,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A layout, its prediction, and why the others lost."""

    layout: Layout
    prediction: Prediction
    ranks: int
    """Number of ranks the plan is for."""
    reason: str
    """Why this layout, in a sentence."""
    rejected: Mapping[str, str] = field(default_factory=dict)
    """Other layouts by text form, and why each lost."""
    outer: Mapping[str, int | str] = field(default_factory=dict)
    """How its islands join, as settings ``outer.*``, of which those count that the user didn't give; empty for a run
    that never had islands."""

    def describe(self) -> str:
        """Returns the layout, how its islands join, and why it was chosen."""
        joins = ", ".join(f"{name} {value}" for name, value in self.outer.items() if self.layout.islands > 1)
        return f"{self.layout} ({'; '.join(filter(None, (self.reason, joins)))})"

    def joining_as(self, planned: Mapping[str, int | str]) -> Self:
        """Returns the plan with a run's settings for islands where it has none, for when its islands come back."""
        return self if self.outer else dataclasses.replace(self, outer=planned)

    def to_json(self) -> dict[str, object]:
        """Returns plain values that `from_json` takes back."""
        return dataclasses.asdict(self) | {"layout": self.layout.to_json()}

    @classmethod
    def from_json(cls, values: JsonObject) -> Self:
        """Builds the plan from `to_json`'s values."""
        fields = dict(values)
        fields["layout"] = Layout.from_json(fields["layout"])
        prediction = dict(fields["prediction"])
        if prediction.get("step_range_s") is not None:
            prediction["step_range_s"] = tuple(prediction["step_range_s"])
        fields["prediction"] = Prediction(**prediction)
        return cls(**fields)

    def dumps(self) -> str:
        """Returns the plan as JSON text."""
        return json.dumps(self.to_json(), indent=2)
