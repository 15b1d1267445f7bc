"""How the ranks of one generation ended, as rank 0 returns it; the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from meshwright.train.damage import Damage


@dataclass(frozen=True, kw_only=True)
class TrainOutcome:
    """The end of a run, or the reason why other ranks continue it."""

    step: int
    """Optimizer steps done."""
    loss: float | None = None
    """Training loss of the last step; None without a step."""
    finished: bool = False
    """Whether the run reached its last step."""
    continues: bool = False
    """Whether other ranks continue the run from here, or from an older state."""
    anomalous_step: int = 0
    """Step up to whose batches the next ranks skip the data, after a rewind; 0 for none."""
    damage: Damage | None = None
    """The damage of the state for which these ranks ended; None without one."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the held-out text at the end: ``validation_loss``, ``accuracy``, ``bits_per_byte``; and ``scaled_steps``, the
    steps of `optimizer.lr_batch` rows that all were worth; what there was none of is left out."""

    def to_json(self) -> dict[str, Any]:
        """Returns a finished or interrupted run's plain values."""
        return {"finished": self.finished, "step": self.step, "loss": self.loss} | dict(self.metrics)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Returns the outcome of `to_json`'s values."""
        own = ("finished", "step", "loss")
        return cls(
            finished=bool(values["finished"]),
            step=int(values["step"]),
            loss=values["loss"],
            metrics={name: value for name, value in values.items() if name not in own},
        )
