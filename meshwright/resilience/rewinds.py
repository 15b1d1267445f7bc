"""The state from which a run continues after anomalous steps or a damaged state.

A step is **anomalous** when its loss or gradient is (`train.health`); a state is **damaged** when copies differ or
values are out of bounds (`train.integrity`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from meshwright.checkpoint.store import CheckpointStore
from meshwright.errors import RankError
from meshwright.resilience.messages import RewindState
from meshwright.train.damage import Damage
from meshwright.train.integrity import is_last
from meshwright.train.outcome import TrainOutcome
from meshwright.train.run_config import RunConfig


class RewindPolicy:
    """Decides how far a run is rewound, and when rewinding is hopeless.

    Args:
        config: of the run.
        store: its checkpoints.
        event: records an event: its kind, and its fields by keyword.
        state: what the last rewind under another leader left.
    """

    def __init__(
        self, config: RunConfig, store: CheckpointStore, event: Callable[..., None], state: RewindState
    ) -> None:
        self._config, self._store, self._event = config, store, event
        self.state = state
        """What the last rewind leaves to the next ranks."""
        self._rewinds, self._last_base = 0, -1
        self._repeated_damages, self._furthest_damage = 0, -1

    def rewind_to_checkpoint(self, outcome: TrainOutcome, generation: int) -> None:
        """RewindPolicy the next ranks to the last checkpoint, with the batches after the anomalous ones.

        Args:
            outcome: of the ranks that met them.
            generation: of these ranks, none of whose states counts any more.

        Raises:
            RankError: when the same checkpoint was rewound to too often.
        """
        self.state = dataclasses.replace(self.state, anomalous_step=outcome.anomalous_step, floor=generation)
        latest = self._store.latest()
        base = latest.step if latest is not None else 0
        # RewindPolicy count per checkpoint: a newer one means progress.
        self._rewinds = self._rewinds + 1 if base == self._last_base else 1
        self._last_base = base
        self._event("rewinding", sick=outcome.step, step=base)
        if self._rewinds > self._config.recovery.attempts:
            raise RankError(
                f"steps after the checkpoint of step {base} were sick {self._rewinds} times with other rows each time; "
                f"lower optimizer.lr = {self._config.optimizer.lr}, or look at recovery.spike and largest_norm"
            )

    def rewind_before(self, damage: Damage, has_older_state: bool) -> int:
        """RewindPolicy the next ranks to the newest state older than a damage, and withdraws later checkpoints.

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
        self.state = dataclasses.replace(self.state, damage=damage)
        event_fields = {"suspects": list(damage.ranks), "why": damage.why, "withdrawn": withdrawn}
        self._event("damaged", step=damage.step, back_to=keep, **event_fields)
        if self._repeated_damages > self._config.recovery.attempts:
            raise RankError(
                f"{damage.why}, for the {self._repeated_damages}th time in a row; look at the devices and memory"
            )
        return keep
