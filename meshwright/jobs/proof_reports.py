"""Typed results of the proofs: a verdict for each layout, and their overall outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.proof.compare import Verdict
from meshwright.proof.job import JobVerdict
from meshwright.strategy.loop_proof import LoopVerdict

Outcome = Literal["passed", "failed", "refused"]
"""Every layout equals one device; one doesn't; one couldn't run, and none failed."""


def outcome_of(verdicts: Sequence[Verdict | JobVerdict | LoopVerdict], named: bool) -> Outcome:
    """Returns what verdicts come to.

    Args:
        verdicts: at least one.
        named: whether the layouts were named: one that was may not be refused, one that nobody asked for may.
    """
    refused = sum(bool(verdict.refused) for verdict in verdicts)
    if any(not verdict.passed and not verdict.refused for verdict in verdicts):
        return "failed"
    return "refused" if refused and (named or refused == len(verdicts)) else "passed"


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """The result of proving layouts of a model against one device."""

    verdicts: tuple[Verdict, ...]
    """One a layout, in their order; errors are relative."""
    named: bool
    """Whether the layouts were named: one that was may not be refused, one that nobody asked for may."""

    @property
    def refused(self) -> int:
        """Number of layouts that couldn't run."""
        return sum(bool(verdict.refused) for verdict in self.verdicts)

    @property
    def passed(self) -> bool:
        """Whether every layout equals one device."""
        return self.outcome == "passed"

    @property
    def outcome(self) -> Outcome:
        """What the verdicts come to."""
        return outcome_of(self.verdicts, self.named)

    def to_json(self) -> dict[str, object]:
        """Returns plain values: ``passed``, and ``layouts`` with a verdict each."""
        return {"passed": self.passed, "layouts": [verdict.to_json() for verdict in self.verdicts]}


@dataclass(frozen=True, kw_only=True, slots=True)
class JobReport:
    """The result of proving a whole run against a plain loop on one device."""

    subject: str
    """What was proven, and what of the run was left out."""
    verdicts: tuple[JobVerdict, ...]
    """One a pair of layouts, of which the second resumes the first; errors are relative."""

    @property
    def passed(self) -> bool:
        """Whether every pair trains as the plain loop does."""
        return self.outcome == "passed"

    @property
    def outcome(self) -> Outcome:
        """What the verdicts come to."""
        return outcome_of(self.verdicts, named=True)

    def to_json(self) -> dict[str, object]:
        """Returns plain values: ``passed``, ``proven``, and ``jobs`` with a verdict each."""
        jobs = [verdict.to_json() for verdict in self.verdicts]
        return {"passed": self.passed, "proven": self.subject, "jobs": jobs}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopReport:
    """The result of proving a custom training loop against one device."""

    verdicts: tuple[LoopVerdict, ...]
    """One a layout, in their order; errors are relative."""
    named: bool
    """Whether the layouts were named: one that was may not be refused."""

    @property
    def refused(self) -> int:
        """Number of layouts that couldn't run."""
        return sum(bool(verdict.refused) for verdict in self.verdicts)

    @property
    def passed(self) -> bool:
        """Whether every layout gives what one device gives."""
        return self.outcome == "passed"

    @property
    def outcome(self) -> Outcome:
        """What the verdicts come to."""
        return outcome_of(self.verdicts, self.named)

    def to_json(self) -> dict[str, object]:
        """Returns plain values: ``passed``, and ``layouts`` with a verdict each."""
        return {"passed": self.passed, "layouts": [verdict.to_json() for verdict in self.verdicts]}
