"""From where a run goes on whose steps were sick or whose state turned out damaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from meshwright.checkpoint.store import CheckpointStore
from meshwright.errors import RankError
from meshwright.train.integrity import Damage, is_last
from meshwright.train.run_config import RunConfig


class Rewinds:
    """Decides how far a run goes back, and when doing so is hopeless.

    Args:
        config: of the run.
        store: its checkpoints.
        event: takes kind and data of what happened.
    """

    def __init__(self, config: RunConfig, store: CheckpointStore, event: Callable[..., None]) -> None:
        self._config, self._store, self._event = config, store, event
        self.sick_step = 0
        """Place in the text, in steps, up to which it is passed over; 0 for none."""
        self.damage: Damage | None = None
        """What ranks went back for last."""
        self._turns, self._turned_to = 0, -1
        self._damages, self._damaged = 0, -1

    def order(self) -> dict[str, Any]:
        """Returns what other nodes need to know of it; `adopt` takes it back."""
        return {"sick": self.sick_step, "damage": self.damage.to_json() if self.damage is not None else None}

    def adopt(self, order: Mapping[str, Any] | None) -> None:
        """Takes over what another leader's last order says; None for none."""
        if order is not None:
            self.sick_step = order["sick"]
            self.damage = Damage.from_json(order["damage"]) if order["damage"] is not None else None

    def turn_back(self, result: Mapping[str, Any]) -> None:
        """Makes the next ranks go on from the last checkpoint, with the rows after the sick ones.

        Raises:
            RankError: when that has been done too often from the same checkpoint.
        """
        self.sick_step = result["sick"]
        latest = self._store.latest()
        base = latest.step if latest is not None else 0
        self._turns = self._turns + 1 if base == self._turned_to else 1
        self._turned_to = base
        self._event("rewinding", sick=result["step"], step=base)
        if self._turns > self._config.recovery.attempts:
            raise RankError(
                f"steps after the checkpoint of step {base} were sick {self._turns} times with other rows each time; "
                f"lower optimizer.lr = {self._config.optimizer.lr}, or look at recovery.spike and largest_norm"
            )

    def go_back(self, damage: Damage, older: bool) -> int:
        """Makes the next ranks go on from the newest state that is older than a damage; takes back later checkpoints.

        Args:
            damage: of the state.
            older: whether a state in memory is old enough.

        Returns:
            The newest step that may be gone back to.

        Raises:
            RankError: when that has been done too often without a step beyond it.
        """
        disk = any(entry.step <= damage.keep for entry in self._store.entries())
        withdrawn = []
        if older or disk or damage.keep >= damage.base:
            keep = max(0, damage.keep)
            withdrawn = [path.name for path in self._store.withdraw(keep)]
        else:
            # Nothing is older than what these ranks began from: what comes again after it is the training's own.
            damage, keep = is_last(damage), damage.base
        self._damages = self._damages + 1 if damage.step <= self._damaged else 1
        self._damaged = max(self._damaged, damage.step)
        if self._damages > 1:
            # From an older state once more; ranks that then come to the same leave it be.
            damage = is_last(damage)
        self.damage = damage
        told = {"suspects": list(damage.ranks), "why": damage.why, "withdrawn": withdrawn}
        self._event("damaged", step=damage.step, back_to=keep, **told)
        if self._damages > self._config.recovery.attempts:
            raise RankError(f"{damage.why}, for the {self._damages}th time in a row; look at the devices and memory")
        return keep
