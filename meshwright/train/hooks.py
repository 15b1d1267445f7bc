"""Hooks: functions that see each step and may request an evaluation, a checkpoint or the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Flag, auto

from meshwright.events import StepRecord, check_scalar


class Request(Flag):
    """A hook's request; several combine with ``|``. Executed before the next step, on all ranks at once.

    Under islands it is executed after the next join, on all islands, if the hooks of any made it.
    """

    NONE = 0
    EVALUATE = auto()
    """Measure the validation loss."""
    CHECKPOINT = auto()
    """Write a checkpoint."""
    STOP = auto()
    """Write a checkpoint and end the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInfo:
    """A hook's argument after a step; the same on every rank of an island, so that its ranks request the same.

    Islands have losses, norms and tokens of their own.
    """

    step: int
    """Steps done."""
    steps: int
    """Steps of the whole run; as it looks now where rates follow the noise of gradients (`optimizer.lr_rule`)."""
    record: StepRecord
    """The step's line of metrics; its memory, times and traffic differ between ranks."""
    validation_loss: float | None
    """Last validation loss, nats per token, if there was one; the same on all ranks."""
    scalars: dict[str, float] = field(default_factory=dict)
    """The hooks' own scalars of this step, by name."""

    def scalar(self, name: str, value: float) -> None:
        """Adds a number to the step's line of metrics, its curves and trackers; of rank 0 alone it is recorded.

        Raises:
            ConfigError: for a name that can't be one.
        """
        self.scalars[check_scalar(name)] = float(value)


Hook = Callable[[StepInfo], Request]
"""A hook decides by values that all ranks of an island share (step, loss, norm, tokens), never by memory or time."""
