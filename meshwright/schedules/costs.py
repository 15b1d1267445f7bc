"""Costs of a schedule's actions in seconds, per stage and link."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.errors import PlanError
from meshwright.schedules.action import Action, ActionKind, Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionCosts:
    """Seconds of each action of each stage, and of a send between ranks."""

    forward_s: tuple[float, ...]
    """Forward of each stage."""
    backward_s: tuple[float, ...]
    """Full backward of each stage."""
    input_s: tuple[float, ...]
    """Input-gradient half of each stage's backward."""
    weight_s: tuple[float, ...]
    """Weight-gradient half of each stage's backward."""
    send_s: float = 0.0
    """From the end of an action to its result on another rank; the sender computes in the meantime."""
    links_s: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """The same for single (sender, receiver) pairs; these override `send_s`."""
    overlap_share: float = 0.0
    """Share of a pair's shorter action that the longer one hides; 0 where the runtime runs them in sequence."""

    @classmethod
    def uniform(
        cls, stages: int, *, forward_s: float = 1.0, input_s: float = 1.0, weight_s: float = 1.0, send_s: float = 0.0
    ) -> ActionCosts:
        """Returns the costs of equal stages; a full backward costs the sum of its halves.

        Args:
            stages: stages of the pipeline.
            forward_s: forward of one stage.
            input_s: input-gradient half of a backward.
            weight_s: weight-gradient half of a backward.
            send_s: a send between two ranks.
        """
        return cls(
            forward_s=(forward_s,) * stages,
            backward_s=(input_s + weight_s,) * stages,
            input_s=(input_s,) * stages,
            weight_s=(weight_s,) * stages,
            send_s=send_s,
        )

    def check(self, schedule: Schedule) -> None:
        """Checks that the costs fit a schedule's stages.

        Raises:
            PlanError: too few or many stages, a negative time, or a share outside 0 to 1.
        """
        for name in ("forward_s", "backward_s", "input_s", "weight_s"):
            times = getattr(self, name)
            if len(times) != schedule.stages:
                raise PlanError(
                    f"{name} has {len(times)} stages, schedule {schedule.name} has {schedule.stages}; give one time "
                    "each"
                )
            if min(times) < 0:
                raise PlanError(f"{name} has the time {min(times)}; take 0 or more")
        if min((self.send_s, *self.links_s.values())) < 0:
            raise PlanError("a send takes a negative time; take 0 or more")
        if not 0.0 <= self.overlap_share <= 1.0:
            raise PlanError(f"overlap_share = {self.overlap_share}: it is a share, from 0 to 1")

    def of(self, action: Action) -> float:
        """Returns the seconds of an action."""
        if action.pair is not None:
            first, second = (self.of(single) for single in action.pair)
            return first + second - self.overlap_share * min(first, second)
        kind, stage = action.kind, action.stage
        if kind is ActionKind.FORWARD:
            return self.forward_s[stage]
        if kind is ActionKind.BACKWARD:
            return self.backward_s[stage]
        return self.input_s[stage] if kind is ActionKind.INPUT else self.weight_s[stage]

    def between(self, sender: int, receiver: int) -> float:
        """Returns the seconds of a send; 0 between stages of one rank."""
        return 0.0 if sender == receiver else self.links_s.get((sender, receiver), self.send_s)
