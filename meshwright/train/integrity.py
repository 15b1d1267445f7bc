"""Whether the machine that trains computes right: suspect steps are done again, and copies are compared.

What is found damaged is told to the supervisor, whose next ranks go on from an older state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, Self

from meshwright.checkpoint.agreement import Agreement
from meshwright.errors import RankError
from meshwright.parallel.program import Program
from meshwright.train.bounds import StateBounds
from meshwright.train.copies import Comparison, CopyCheck, Element, as_values
from meshwright.train.health import NO_LIMITS, Health, Limits
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.step import StepOutcome

LIMITS, COPIES, BOUNDS = "limits", "copies", "bounds"


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """What ranks found wrong with their state, for those that come after them."""

    kind: str
    """`LIMITS`: numbers that the run's past doesn't give; `COPIES`: ranks hold different copies; `BOUNDS`: a rank holds
    what no update can have made."""
    step: int
    """Steps done when it was seen."""
    keep: int
    """The newest step whose state may be gone back to."""
    why: str
    """A sentence."""
    ranks: tuple[int, ...] = ()
    """Ranks that most others contradict."""
    base: int = 0
    """Step of the state that the ranks which saw it had begun from."""
    rows: tuple[tuple[int, ...], ...] = ()
    """Checksums of each rank, for `COPIES`."""
    element: Element | None = None
    """Where copies differ most, for `COPIES`."""
    last: bool = False
    """Whether no older state is there: what comes again is the training's own."""

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Returns the damage of `to_json`'s values."""
        more: dict[str, Any] = {"ranks": tuple(values["ranks"]), "rows": tuple(map(tuple, values["rows"]))}
        if (element := values["element"]) is not None:
            ranks, number, index, held = (element[name] for name in ("ranks", "number", "index", "values"))
            more["element"] = Element(tuple(ranks), number, index, tuple(held))
        return cls(**dict(values) | more)


class Past(Protocol):
    """What ranks before these left (`train.memory.RankMemory`)."""

    @property
    def damage(self) -> Damage | None:
        """What they went back for; None when they didn't."""


class Integrity:
    """Watches over the numbers and copies of one rank; every method is called by all ranks alike.

    Args:
        health: judges numbers; its config says what is watched.
        program: of this rank.
        optimizer: over its weights.
        agreement: how ranks exchange small values.
        memory: knows what the ranks before these went back for; None where nobody starts others from an older state.
        event: reports what all ranks know.
    """

    def __init__(
        self,
        health: Health,
        program: Program,
        optimizer: LocalAdamW,
        agreement: Agreement,
        memory: Past | None,
        event: Callable[..., None],
    ) -> None:
        self._health, self._event, config = health, event, health.config
        self._seen, self._can_go_back = memory.damage if memory is not None else None, memory is not None
        self._base = 0
        compared = config.compare and agreement.count > 1
        self._copies = CopyCheck(program, optimizer, agreement, config.compare_every) if compared else None
        self._bounds = StateBounds(program, optimizer) if config.compare else None
        self._agreement = agreement
        self.damage: Damage | None = None
        """Why these ranks end, and others begin from an older state; None while all is well."""

    def start(self, step: int) -> None:
        """Tells from which step on these ranks train."""
        self._base = step
        if self._copies is not None:
            self._copies.start(step)
        if self._bounds is not None:
            self._bounds.start()

    def limits(self, step: int) -> Limits | None:
        """Returns the largest numbers with which the step after ``step`` updates the weights; None for any finite."""
        own, learned = self._health.limits, self._health.learned(step)
        if own is None:
            return learned if math.isfinite(learned.loss) or math.isfinite(learned.norm) else None
        return Limits(min(own.loss, learned.loss), min(own.norm, learned.norm))

    def settled(
        self, step: int, outcome: StepOutcome, scaled: bool, run: Callable[[Limits | None], StepOutcome]
    ) -> tuple[StepOutcome, dict[str, float]]:
        """Returns a step's outcome once it is trusted: a suspect one, which updated nothing, is computed again.

        Args:
            step: steps done before it.
            outcome: as it came first.
            scaled: whether a loss scale may have made the gradient infinite.
            run: computes the step again within limits.
        """
        outcome, values = self._trusted(step, outcome, scaled, run)
        loss, norm = self.limits(step) or NO_LIMITS
        if self._bounds is not None and values["finite"] and values["loss"] <= loss and values["grad_norm"] <= norm:
            self._bounds.updated(values["grad_norm"], outcome.lr)
        return outcome, values

    def _trusted(
        self, step: int, outcome: StepOutcome, scaled: bool, run: Callable[[Limits | None], StepOutcome]
    ) -> tuple[StepOutcome, dict[str, float]]:
        """Returns what `settled` does, of which nobody has taken note yet."""
        values = outcome.read()
        why = self._suspect(step, values, scaled)
        if why is None:
            self._passed(LIMITS, step)
            return outcome, values
        again = run(self.limits(step))
        repeated = again.read()
        if self._suspect(step, repeated, scaled) is None:
            told = {"first": [values["loss"], values["grad_norm"]], "loss": repeated["loss"]}
            self._event("step_repeated", step=step + 1, why=why, **told, grad_norm=repeated["grad_norm"])
            self._passed(LIMITS, step)
            return again, repeated
        before = self._doubted(LIMITS, step)
        if self._can_go_back and (before is None or not before.last):
            # Weights may have been damaged after the step before the last had used them.
            keep = step - 1 if before is None else self._base - 1
            self.damage = Damage(kind=LIMITS, step=step, keep=keep, why=why, base=self._base)
            return again, repeated
        self._event("limits_left", step=step + 1, why=why, replayed=before is not None)
        self._seen = None
        self._health.accept()
        if math.isfinite(repeated["grad_norm"]):
            again = run(self._health.limits)
            repeated = again.read()
        return again, repeated

    def _suspect(self, step: int, values: Mapping[str, float], scaled: bool) -> str | None:
        if scaled and not math.isfinite(values["grad_norm"]):
            return None
        return self._health.suspect(step, values["loss"], values["grad_norm"])

    def due(self, step: int) -> bool:
        """Whether copies are to be compared after ``step`` steps, though no state is kept there."""
        if self._copies is None:
            return False
        return self._copies.due(step) or any(self._doubted(kind, step) for kind in (COPIES, BOUNDS))

    def agrees(self, step: int, counters: Mapping[str, Any]) -> bool:
        """Compares all copies after ``step`` steps; returns whether they are equal, which a state must be to be kept.

        Args:
            step: steps done.
            counters: plain values that all ranks must have alike.

        Raises:
            RankError: when they aren't and nobody starts other ranks.
        """
        why = self._bounds.broken() if self._bounds is not None else None
        if self._copies is None:
            return self._within(step, [why], (0,) if why else ())
        found = self._copies.compare(step, [step, *as_values(counters)], alarm=why is not None)
        for small in found.rounded:
            self._event("copies_rounded", step=step, why=str(small), size=small.size)
        seen = self._doubted(COPIES, step)
        if seen is not None and found.differences and [list(row) for row in seen.rows] == found.rows:
            self._tolerate(found, step)
        if not found.differences:
            if seen is not None:
                self._named(seen, seen.ranks or self._contradicted(seen))
            return self._within(step, self._agreement.gather(why) if found.alarms else [], found.alarms)
        first = found.differences[0]
        why = f"copies of the state differ after step {step}: {first}"
        if not self._can_go_back:
            raise RankError(f"{why}; the newest checkpoint was written while they agreed")
        rows = tuple(tuple(row) for row in found.rows)
        keep = step - 1 if seen is None else self._base - 1 if self._base else 0
        more: dict[str, Any] = {"ranks": first.odd, "base": self._base, "rows": rows, "element": first.element}
        self.damage = Damage(kind=COPIES, step=step, keep=keep, why=why, **more)
        return False

    def _within(self, step: int, whys: Sequence[str | None], ranks: tuple[int, ...]) -> bool:
        """Says whether every rank holds only what its updates can have made.

        Args:
            step: steps done.
            whys: each rank's sentence, None where all is well.
            ranks: those that have one.

        Raises:
            RankError: when a rank doesn't and nobody starts other ranks.
        """
        seen = self._doubted(BOUNDS, step)
        if not ranks:
            if seen is not None:
                self._named(seen, seen.ranks)
            return True
        why = f"rank {ranks[0]}'s state is damaged after step {step}: {whys[ranks[0]]}"
        if not self._can_go_back:
            raise RankError(f"{why}; the newest checkpoint was written before")
        if seen is not None and seen.last:
            self._event("limits_left", step=step, why=why, replayed=True)
            self._seen = self._bounds = None
            return True
        keep = step - 1 if seen is None else self._base - 1
        self.damage = Damage(kind=BOUNDS, step=step, keep=keep, why=why, ranks=ranks, base=self._base)
        return False

    def _contradicted(self, seen: Damage) -> tuple[int, ...]:
        """Returns the rank that a state computed again contradicts most, where two held different copies."""
        assert self._copies is not None
        value = self._copies.right_value(seen.element) if seen.element is not None else None
        return seen.element.farthest(value) if seen.element is not None and value is not None else ()

    def sound(self, step: int, loss: float, before: float | None) -> bool:
        """Says whether the loss over held-out text bears out the last state, which no further step will.

        Args:
            step: steps done.
            loss: nats a token.
            before: the one before; None for none.
        """
        seen = self._doubted(LIMITS, step)
        bound = 3.0 * max(self._health.learned(step).loss, before if before is not None else -math.inf)
        fits = math.isfinite(loss) and loss <= bound
        if fits or not self._can_go_back or (seen is not None and seen.last):
            self._passed(LIMITS, step)
            return True
        keep = step - 1 if seen is None else self._base - 1
        why = f"the loss over held-out text is {loss:.4g} after the last step"
        self.damage = Damage(kind=LIMITS, step=step, keep=keep, why=why, base=self._base)
        return False

    def _tolerate(self, found: Comparison, step: int) -> None:
        """Leaves be what comes out differently by itself, computed twice from a state of which all copies agreed."""
        assert self._copies is not None
        for difference in found.differences:
            self._copies.tolerate(difference)
            self._event("copies_left", step=step, why=str(difference), size=difference.size)
        found.differences.clear()
        self._seen = None

    def _passed(self, kind: str, step: int) -> None:
        """Takes note that the step of which ranks before these had doubts came out right."""
        if (seen := self._doubted(kind, step)) is not None:
            self._named(seen, ())

    def _doubted(self, kind: str, step: int) -> Damage | None:
        """Returns what ranks before these went back for, if it was this."""
        return self._seen if self._seen is not None and (self._seen.kind, self._seen.step) == (kind, step) else None

    def _named(self, seen: Damage, odd: tuple[int, ...]) -> None:
        """Tells that a damage is repaired, and which ranks it was at, as the same steps computed again show."""
        self._event("damage_repaired", step=seen.step, damaged=list(odd), why=seen.why)
        self._seen = None


def is_last(damage: Damage) -> Damage:
    """Returns the damage for ranks that have no older state to go back to."""
    return replace(damage, last=True)
