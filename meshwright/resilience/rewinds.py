"""The state from which a run continues after anomalous steps or a damaged state.

A step is **sick** in this room when its loss or gradient is anomalous (`train.health`); a state is **damaged** when
copies differ or values are out of bounds (`train.integrity`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from meshwright.checkpoint.store import CheckpointStore
from meshwright.errors import RankError
from meshwright.train.integrity import Damage, is_last
from meshwright.train.run_config import RunConfig


class Rewinds:
    """Decides how far a run is rewound, and when rewinding is hopeless.

    Args:
        config: of the run.
        store: its checkpoints.
        event: records an event: its kind, and its fields by keyword.
    """

    def __init__(self, config: RunConfig, store: CheckpointStore, event: Callable[..., None]) -> None:
        self._config, self._store, self._event = config, store, event
        self.sick_step = 0
        """Step up to whose batches the data is skipped; 0 for none."""
        self.damage: Damage | None = None
        """The damage that caused the last rewind."""
        self._rewinds, self._last_base = 0, -1
        self._repeated_damages, self._furthest_damage = 0, -1

    def order(self) -> dict[str, Any]:
        """Returns the fields of an order that carry this state to other nodes (`adopt`)."""
        return {"sick": self.sick_step, "damage": self.damage.to_json() if self.damage is not None else None}

    def adopt(self, order: Mapping[str, Any] | None) -> None:
        """Adopts the state in another leader's last order, if any."""
        if order is not None:
            self.sick_step = order["sick"]
            self.damage = Damage.from_json(order["damage"]) if order["damage"] is not None else None

    def turn_back(self, result: Mapping[str, Any]) -> None:
        """Rewinds the next ranks to the last checkpoint, with the batches after the anomalous ones.

        Raises:
            RankError: when the same checkpoint was rewound to too often.
        """
        self.sick_step = result["sick"]
        latest = self._store.latest()
        base = latest.step if latest is not None else 0
        # Rewinds count per checkpoint: a newer one means progress.
        self._rewinds = self._rewinds + 1 if base == self._last_base else 1
        self._last_base = base
        self._event("rewinding", sick=result["step"], step=base)
        if self._rewinds > self._config.recovery.attempts:
            raise RankError(
                f"steps after the checkpoint of step {base} were sick {self._rewinds} times with other rows each time; "
                f"lower optimizer.lr = {self._config.optimizer.lr}, or look at recovery.spike and largest_norm"
            )

    def go_back(self, damage: Damage, has_older_state: bool) -> int:
        """Rewinds the next ranks to the newest state older than a damage, and withdraws later checkpoints.

        Args:
            damage: of the state.
            has_older_state: whether a state in memory is old enough.

        Returns:
            The newest step whose state may be restored.

        Raises:
            RankError: when damages recurred too often without a step beyond the furthest one.
        """
        disk = any(entry.step <= damage.keep for entry in self._store.entries())
        withdrawn = []
        if has_older_state or disk or damage.keep >= damage.base:
            keep = max(0, damage.keep)
            # Later checkpoints may contain the damage: renamed, so that nobody resumes from them.
            withdrawn = [path.name for path in self._store.withdraw(keep)]
        else:
            # No state is older than the one that these ranks restored: if the numbers recur, they are correct.
            damage, keep = is_last(damage), damage.base
        self._repeated_damages = self._repeated_damages + 1 if damage.step <= self._furthest_damage else 1
        self._furthest_damage = max(self._furthest_damage, damage.step)
        if self._repeated_damages > 1:
            # The second rewind for one damage: ranks that reproduce it accept it as the training's own numbers.
            damage = is_last(damage)
        self.damage = damage
        event_fields = {"suspects": list(damage.ranks), "why": damage.why, "withdrawn": withdrawn}
        self._event("damaged", step=damage.step, back_to=keep, **event_fields)
        if self._repeated_damages > self._config.recovery.attempts:
            raise RankError(
                f"{damage.why}, for the {self._repeated_damages}th time in a row; look at the devices and memory"
            )
        return keep
