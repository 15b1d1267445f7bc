"""Plans for other numbers of ranks: how a run gets them, and how they are made before a failure needs them."""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.errors import LaunchError, MeshwrightError
from meshwright.resilience.helper import Helper
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.train.model_analysis import ModelAnalysis
from meshwright.train.session import TrainJob

Planner = Callable[[int], Any]
"""Returns the plan and model analysis for a number of ranks; raises `MeshwrightError` without a layout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replan:
    """Another layout of the same ranks, ready to run."""

    plan: Plan
    """Of the layout."""
    analysis: ModelAnalysis | None = None
    """Of its model; None where it has to be made again."""
    step_ratio: float
    """Expected seconds of a step under it over the present ones."""
    speeds: tuple[float, ...] = ()
    """Of each rank, as a share of the fastest's; empty for a layout whose step was measured."""
    priced_s: tuple[float, float] | None = None
    """Priced seconds of a step under the present layout and under this one; None where it was measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplanRequest:
    """What the planner is asked for while a run goes on."""

    layout: Layout
    """The present one."""
    busy_s: tuple[float, ...]
    """Seconds of a step that each rank computed."""
    step_s: float
    """Seconds of a step."""
    disappointing: frozenset[str] = frozenset()
    """Layouts that brought less than they promised, which aren't tried again."""


LeanerPlan = Callable[[Plan, str], "tuple[Plan, ModelAnalysis] | None"]
"""Returns the next plan of the list that needs less memory than one that ran out, of which the text says how; None
without one."""


def no_leaner_plan(plan: Plan, reason: str) -> None:
    """Returns no other plan."""


Replanning = Callable[[ReplanRequest], Replan | None]
"""Returns a faster layout for measured speeds; None where there is none."""


def no_replan(request: ReplanRequest) -> None:
    """Returns no other layout."""


@dataclass(frozen=True, kw_only=True)
class Planning:
    """How a run gets plans and jobs for other numbers of ranks than it began with."""

    plan_for_ranks: Callable[[int], tuple[Plan, ModelAnalysis]]
    """Returns the plan for a number of ranks, with its model analysis; raises for a number without a layout."""
    make_job: Callable[[Plan, ModelAnalysis | None], TrainJob]
    """Returns the job of a plan; the analysis is that of the plan, where it is known."""
    announce_plan: Callable[[Plan], None]
    """Called with each later plan before its ranks start."""
    leaner_plan: LeanerPlan = no_leaner_plan
    """Returns the plan that follows one whose ranks ran out of memory in their first steps."""
    replan: Replanning = no_replan
    """Returns a faster layout at measured speeds."""


class PlanPrefetcher:
    """Caches a planner's answers, computed in advance where possible.

    Args:
        plan: the planner; its answers are picklable.
    """

    def __init__(self, plan: Planner) -> None:
        self._plan = plan
        self._answers: dict[int, Any] = {}
        self._requested: set[int] = set()
        self._helper: Helper | None = None

    def start(self, counts: Sequence[int]) -> None:
        """Starts planning for numbers of ranks in the child; does nothing while it works, or when all are requested."""
        self._collect()
        new_counts = [count for count in counts if count not in self._requested]
        if self._helper is not None or not new_counts:
            return
        # Requested once, answered or not: a child that died isn't retried in the background.
        self._requested.update(new_counts)
        # Planning for a failure that may never come must neither slow down training nor end it.
        with contextlib.suppress(LaunchError):
            self._helper = Helper(lambda: self._plan_all(new_counts), nice=10)

    def _plan_all(self, counts: Sequence[int]) -> bytes:
        """Returns the pickled answers for numbers of ranks; runs in the forked process."""
        warnings.simplefilter("ignore")
        answers: dict[int, Any] = {}
        for count in counts:
            try:
                answers[count] = self._plan(count)
            except MeshwrightError as error:
                answers[count] = error
        return pickle.dumps(answers)

    def answer(self, count: int) -> tuple[Any, bool]:
        """Returns the planner's answer, and whether it was cached.

        Raises:
            MeshwrightError: as the planner does.
        """
        self._collect()
        was_cached = count in self._answers
        if not was_cached:
            try:
                # Not prefetched, or its child is still working or died: plan here and now.
                self._answers[count] = self._plan(count)
            except MeshwrightError as error:
                # Refusals are cached too: planning again would refuse again.
                self._answers[count] = error
        answer = self._answers[count]
        if isinstance(answer, MeshwrightError):
            raise answer
        return answer, was_cached

    def pending(self, count: int) -> bool:
        """Returns whether the child may still be computing an answer, so that `answer` would repeat its work."""
        self._collect()
        return count not in self._answers and self._helper is not None

    def learn(self, count: int, answer: Any) -> None:
        """Adds an answer that was computed elsewhere."""
        self._answers[count] = answer
        self._requested.add(count)

    def _collect(self) -> None:
        """Reads the child's answers; requests of a child that died are left to `answer`."""
        if self._helper is None or not self._helper.has_ended:
            return
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # A partial pickle of a killed child raises, and is ignored.
            self._answers.update(pickle.loads(self._helper.answer))
        self._helper = None

    def close(self) -> None:
        """Kills the child, if it is still working."""
        if self._helper is not None:
            self._helper.close()
            self._helper = None
