"""Detection of hardware errors: suspect steps are recomputed, copies of the state compared, its values bounded.

A detected damage ends these ranks; their supervisor starts others from an older state, which recompute the same steps.
If the suspect numbers recur there, they are the training's own and are accepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from meshwright.checkpoint.agreement import Agreement
from meshwright.errors import RankError
from meshwright.json_types import JsonObject
from meshwright.parallel.program import Program
from meshwright.train.bounds import StateBounds
from meshwright.train.copies import Comparison, CopyCheck, as_values
from meshwright.train.damage import BOUNDS, COPIES, LIMITS, Damage
from meshwright.train.health import NO_LIMITS, Health, Limits
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.step import StepOutcome


class DamageHistory(Protocol):
    """The previous ranks' legacy (`train.memory.RankMemory`)."""

    @property
    def damage(self) -> Damage | None:
        """The damage that ended them; None without one."""


class Integrity:
    """Checks a rank's numbers, copies and bounds; all ranks call every method together.

    Args:
        health: judges losses and norms; its config selects the checks.
        program: this rank's program.
        optimizer: over its weights.
        agreement: exchanges small values between all ranks.
        memory: holds the damage that ended the previous ranks; None where no supervisor can restart from older state.
        event: records an event that all ranks know.
        step_event: records an event of a step, which the ranks of an island alone know.
        rewinds_steps: whether a step's suspect numbers may send the ranks back to an older state; islands can't, since
            the others know nothing of the step.
        copies_in_islands: whether an island has several ranks, which may hold copies of the same state.
    """

    def __init__(
        self,
        health: Health,
        program: Program,
        optimizer: LocalAdamW,
        agreement: Agreement,
        memory: DamageHistory | None,
        event: Callable[..., None],
        step_event: Callable[..., None],
        rewinds_steps: bool = True,
        copies_in_islands: bool = False,
    ) -> None:
        self._health, self._event, self._step_event, config = health, event, step_event, health.config
        # Without a supervisor nobody restarts from an older state: damages then raise.
        self._earlier_damage, self._can_rewind = memory.damage if memory is not None else None, memory is not None
        self._can_rewind_steps = self._can_rewind and rewinds_steps
        self._restored_step = 0
        compares = config.compare and agreement.count > 1
        self._copy_check = CopyCheck(program, optimizer, agreement, config.compare_every) if compares else None
        self._bounds = StateBounds(program, optimizer) if config.compare else None
        self._agreement, self._compares_joins = agreement, compares and copies_in_islands
        self._noted_reason: str | None = None
        """Why this rank's state was out of bounds when an exchange of islands started; not known to other ranks yet."""
        self.damage: Damage | None = None
        """The damage for which these ranks end; None while none was detected."""

    def start(self, step: int) -> None:
        """Sets the step from which these ranks train."""
        self._restored_step = step
        if self._copy_check is not None:
            self._copy_check.start(step)
        if self._bounds is not None:
            self._bounds.start()

    def note_state(self) -> None:
        """Looks at this rank's own bounds before its movement is sent, without waiting for any other rank.

        The ranks learn of it in `may_join`, before they take what was sent.
        """
        self._noted_reason = self._noted_reason or (self._bounds.broken() if self._bounds is not None else None)

    def may_join(self, step: int, counters: JsonObject) -> bool:
        """Returns, the same on all ranks, whether every rank's state is sound before the islands join.

        Every state must be within its bounds, and where an island has several ranks their copies must agree: a join
        would mix what one of them holds into all islands.

        Args:
            step: steps done.
            counters: plain values that must be equal on all ranks.

        Raises:
            RankError: when one is damaged and no supervisor can restart from older state.
        """
        if self._compares_joins:
            return self.agrees(step, counters)
        if self._bounds is None:
            return True
        reasons = self._agreement.gather(self._own_reason())
        return self._within_bounds(step, reasons, tuple(rank for rank, reason in enumerate(reasons) if reason))

    def _own_reason(self) -> str | None:
        """Returns why this rank's state is out of bounds; None for within."""
        return self._noted_reason or (self._bounds.broken() if self._bounds is not None else None)

    def joined(self) -> None:
        """Takes the weights that the islands joined to as correct: they moved further than by an update."""
        if self._bounds is not None:
            self._bounds.weights_moved()

    def limits(self, step: int) -> Limits | None:
        """Returns the largest loss and norm with which step ``step + 1`` may update weights; None for any finite."""
        configured, learned = self._health.limits, self._health.learned(step)
        if configured is None:
            return learned if math.isfinite(learned.loss) or math.isfinite(learned.norm) else None
        return Limits(min(configured.loss, learned.loss), min(configured.norm, learned.norm))

    def updates(self, step: int, values: Mapping[str, float]) -> bool:
        """Returns whether a step with these values (`StepOutcome.read`) updates the weights, and isn't suspect."""
        loss, norm = self.limits(step) or NO_LIMITS
        is_finite = math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])
        return is_finite and values["loss"] <= loss and values["grad_norm"] <= norm

    def settled(
        self, step: int, outcome: StepOutcome, scaled: bool, run: Callable[[Limits | None], StepOutcome]
    ) -> tuple[StepOutcome, dict[str, float]]:
        """Returns a trusted outcome of a step; a suspect step, which updated no weight, is recomputed.

        Args:
            step: steps done before it.
            outcome: of the first computation.
            scaled: whether a loss scale may have made the gradient infinite.
            run: computes the step again within limits.
        """
        outcome, values = self._trusted_outcome(step, outcome, scaled, run)
        loss, norm = self.limits(step) or NO_LIMITS
        # Only a step that updated the weights widens their bounds.
        if self._bounds is not None and values["finite"] and values["loss"] <= loss and values["grad_norm"] <= norm:
            self._bounds.updated(values["grad_norm"], outcome.lr)
        return outcome, values

    def _trusted_outcome(
        self, step: int, outcome: StepOutcome, scaled: bool, run: Callable[[Limits | None], StepOutcome]
    ) -> tuple[StepOutcome, dict[str, float]]:
        """Returns the outcome for `settled`, before `StateBounds` learns of the update."""
        values = outcome.read()
        # Deterministic steps: a recomputation gives the same numbers unless the machine erred once.
        reason = self._suspect(step, values, scaled)
        if reason is None:
            self._mark_passed(LIMITS, step)
            return outcome, values
        second = run(self.limits(step))
        second_values = second.read()
        if self._suspect(step, second_values, scaled) is None:
            event_fields = {"first": [values["loss"], values["grad_norm"]], "loss": second_values["loss"]}
            self._step_event(
                "step_repeated", step=step + 1, why=reason, **event_fields, grad_norm=second_values["grad_norm"]
            )
            self._mark_passed(LIMITS, step)
            return second, second_values
        earlier = self._earlier_damage_at(LIMITS, step)
        # The numbers recur on this state, so the state is the suspect, unless older ones gave the same.
        if self._can_rewind_steps and (earlier is None or not earlier.last):
            # First rewind before the last step, after whose forward weights may have been damaged.
            keep = step - 1 if earlier is None else self._restored_step - 1
            self.damage = Damage(kind=LIMITS, step=step, keep=keep, why=reason, base=self._restored_step)
            return second, second_values
        # They recurred from older states too: the training's own numbers, so learn new limits.
        self._step_event("limits_left", step=step + 1, why=reason, replayed=earlier is not None)
        if earlier is not None:
            # A damage of another kind stays: all islands compare at its step, and one alone comes here.
            self._earlier_damage = None
        self._health.accept()
        if math.isfinite(second_values["grad_norm"]):
            second = run(self._health.limits)
            second_values = second.read()
        return second, second_values

    def _suspect(self, step: int, values: Mapping[str, float], scaled: bool) -> str | None:
        # An overflow under a loss scale is normal: the scaler halves the scale.
        if scaled and not math.isfinite(values["grad_norm"]):
            return None
        return self._health.suspect(step, values["loss"], values["grad_norm"])

    def due(self, step: int) -> bool:
        """Whether to compare copies after ``step`` steps, even if no state is saved there."""
        if self._copy_check is None:
            return False
        return self._copy_check.due(step) or any(self._earlier_damage_at(kind, step) for kind in (COPIES, BOUNDS))

    def agrees(self, step: int, counters: JsonObject, across_islands: bool = False) -> bool:
        """Compares all copies after ``step`` steps; returns whether the state may be saved.

        Args:
            step: steps done.
            counters: plain values that must be equal on all ranks.
            across_islands: whether islands took all steps as one, so that their own states are copies too.

        Raises:
            RankError: when copies differ and no supervisor can restart from older state.
        """
        # Checked on each rank alone; the comparison below tells all ranks who raised an alarm.
        reason = self._own_reason()
        if self._copy_check is None:
            return self._within_bounds(step, [reason], (0,) if reason else ())
        comparison = self._copy_check.compare(step, [step, *as_values(counters)], reason is not None, across_islands)
        for mismatch_by_rounding in comparison.rounded:
            self._event("copies_rounded", step=step, why=str(mismatch_by_rounding), size=mismatch_by_rounding.size)
        earlier = self._earlier_damage_at(COPIES, step)
        # The same checksums from an intact older state: nondeterminism or a software difference, no damage.
        if earlier is not None and comparison.differences and [list(row) for row in earlier.rows] == comparison.rows:
            self._tolerate(comparison, step)
        if not comparison.differences:
            if earlier is not None:
                self._report_repaired(earlier, earlier.ranks or self._contradicted_rank(earlier))
            return self._within_bounds(
                step, self._agreement.gather(reason) if comparison.alarms else [], comparison.alarms
            )
        mismatch = comparison.differences[0]
        reason = f"copies of the state differ after step {step}: {mismatch}"
        if not self._can_rewind:
            raise RankError(f"{reason}; the newest checkpoint was written while they agreed")
        rows = tuple(tuple(row) for row in comparison.rows)
        # First rewind before this step; if copies differ again after that, before the restored state.
        keep = step - 1 if earlier is None else self._restored_step - 1 if self._restored_step else 0
        fields: dict[str, Any] = {
            "ranks": mismatch.odd,
            "base": self._restored_step,
            "rows": rows,
            "element": mismatch.element,
        }
        self.damage = Damage(kind=COPIES, step=step, keep=keep, why=reason, **fields)
        return False

    def _within_bounds(self, step: int, reasons: Sequence[str | None], ranks: tuple[int, ...]) -> bool:
        """Returns whether every rank's state is within the bounds of its updates (`train.bounds`).

        Args:
            step: steps done.
            reasons: each rank's sentence; None for a rank within bounds.
            ranks: those with a sentence.

        Raises:
            RankError: when one is out of bounds and no supervisor can restart from older state.
        """
        earlier = self._earlier_damage_at(BOUNDS, step)
        if not ranks:
            if earlier is not None:
                self._report_repaired(earlier, earlier.ranks)
            return True
        reason = f"rank {ranks[0]}'s state is damaged after step {step}: {reasons[ranks[0]]}"
        if not self._can_rewind:
            raise RankError(f"{reason}; the newest checkpoint was written before")
        if earlier is not None and earlier.last:
            self._event("limits_left", step=step, why=reason, replayed=True)
            self._earlier_damage = self._bounds = self._noted_reason = None
            return True
        keep = step - 1 if earlier is None else self._restored_step - 1
        self.damage = Damage(kind=BOUNDS, step=step, keep=keep, why=reason, ranks=ranks, base=self._restored_step)
        return False

    def _contradicted_rank(self, earlier: Damage) -> tuple[int, ...]:
        """Returns the rank whose earlier value the recomputed state contradicts most, as a tuple; empty if unknown."""
        assert self._copy_check is not None
        value = self._copy_check.right_value(earlier.element) if earlier.element is not None else None
        return earlier.element.farthest(value) if earlier.element is not None and value is not None else ()

    def sound(self, step: int, loss: float, previous_loss: float | None) -> bool:
        """Returns whether the final validation loss is plausible: no further step will check the last state.

        Args:
            step: steps done.
            loss: validation loss in nats per token.
            previous_loss: the previous validation loss, if any.
        """
        earlier = self._earlier_damage_at(LIMITS, step)
        # A factor of 3 over what training or the previous evaluation showed: far beyond noise.
        bound = 3.0 * max(self._health.learned(step).loss, previous_loss if previous_loss is not None else -math.inf)
        fits = math.isfinite(loss) and loss <= bound
        if fits or not self._can_rewind_steps or (earlier is not None and earlier.last):
            self._mark_passed(LIMITS, step)
            return True
        keep = step - 1 if earlier is None else self._restored_step - 1
        reason = f"the loss over held-out text is {loss:.4g} after the last step"
        self.damage = Damage(kind=LIMITS, step=step, keep=keep, why=reason, base=self._restored_step)
        return False

    def _tolerate(self, comparison: Comparison, step: int) -> None:
        """Accepts differences that recurred when recomputed from a state whose copies agreed."""
        assert self._copy_check is not None
        for difference in comparison.differences:
            self._copy_check.tolerate(difference)
            self._event("copies_left", step=step, why=str(difference), size=difference.size)
        comparison.differences.clear()
        self._earlier_damage = None

    def _mark_passed(self, kind: str, step: int) -> None:
        """Reports as repaired a damage that the previous ranks had at this step, and that didn't recur."""
        if (earlier := self._earlier_damage_at(kind, step)) is not None:
            self._report_repaired(earlier, ())

    def _earlier_damage_at(self, kind: str, step: int) -> Damage | None:
        """Returns the previous ranks' damage if it was of this kind and at this step."""
        return (
            self._earlier_damage
            if self._earlier_damage is not None
            and (self._earlier_damage.kind, self._earlier_damage.step) == (kind, step)
            else None
        )

    def _report_repaired(self, earlier: Damage, damaged_ranks: tuple[int, ...]) -> None:
        """Reports that recomputing the same steps repaired a damage, and which ranks had it."""
        self._event("damage_repaired", step=earlier.step, damaged=list(damaged_ranks), why=earlier.why)
        self._earlier_damage = None


def is_last(damage: Damage) -> Damage:
    """Returns the damage, marked for ranks without an older state to restore."""
    return replace(damage, last=True)
