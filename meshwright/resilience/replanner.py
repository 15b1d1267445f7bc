"""Changes the layout of a running job, where that wins more than a new start of the ranks costs.

The ranks publish what each computed (`train.stage_times`), on several nodes through messages to the leader; a child
process asks the planner for the best layout at these speeds. Where two answers in a row promise a gain over the steps
that are left that exceeds the cost by a margin, the ranks end after a step that they agree on, as when devices come
back, and others go on from their snapshots under the new layout. It is kept for these devices alone, and goes where its
ranks fail before they were measured.
"""

from __future__ import annotations

import contextlib
import pickle
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshwright.errors import LaunchError, MeshwrightError
from meshwright.resilience.helper import Helper
from meshwright.resilience.messages import Device
from meshwright.resilience.planning import Replan, Replanning, ReplanRequest
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.train.model_analysis import ModelAnalysis
from meshwright.train.stage_times import RankTime

LEAST_GAIN = 0.1
"""The layout changes where a step is expected to take this share less: times aren't known better."""
MARGIN = 2.0
"""Times its cost that a change must win over the steps that are left; twice as much after each that disappointed."""
KEPT_PROMISE = 0.5
"""Share of the promised gain below which a change has disappointed."""
SPEED_NOISE = 0.1
"""Difference between a rank's speeds in two windows that says nothing."""
SAME_TIME = 0.05
"""Relative difference of all compute times below which the planner's last answer holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """A layout that was chosen for measured speeds."""

    devices: tuple[Device, ...]
    """Whose speeds they are, in rank order."""
    plan: Plan
    analysis: ModelAnalysis | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Promise:
    """What the last change was expected to bring."""

    previous: Plan
    """The plan before it."""
    previous_choice: _Choice | None
    """Where that was chosen for measured speeds too."""
    before_s: float
    """Seconds of a step under that."""
    expected_s: float


class Replanner:
    """Decides when the layout of a run changes; one object for all its generations.

    Args:
        planner: asked in a child process.
        event: records an event: its kind, and its fields by keyword.
        clock: returns seconds; another one in tests.
    """

    def __init__(
        self,
        planner: Replanning,
        event: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._planner, self._event, self._clock = planner, event, clock
        self._margin = MARGIN
        self._choice: _Choice | None = None
        self._promise: _Promise | None = None
        self._changed_step: int | None = None
        self._cost_s: float | None = None
        self._started_at = 0.0
        self._accepted_at = 0.0
        self._is_change = False
        self._helper: Helper | None = None
        self._times: Sequence[RankTime] = ()
        self._asked_busy_s: tuple[float, ...] = ()
        self._answered_busy_s: tuple[float, ...] = ()
        self._wanted: Replan | None = None
        self._accepted: Replan | None = None
        self._disappointing: set[str] = set()
        self._plan: Plan | None = None
        self._is_timed = False

    def begin_generation(self, plan: Plan) -> None:
        """Starts to watch new ranks under a plan."""
        self.close()
        # The cost of a change counts from the request on; that of a start, before the first change, stands for it.
        self._started_at = self._accepted_at if self._is_change else self._clock()
        if self._choice is None or plan is not self._choice.plan:
            self._promise = None  # other devices than those of the change: nothing can be said of it
        self._is_change, self._accepted, self._wanted = False, None, None
        self._times, self._answered_busy_s = (), ()
        self._plan, self._is_timed = plan, False

    def poll(self, steps: Sequence[int], times: Sequence[RankTime] | None) -> bool:
        """Processes the ranks' progress and times; returns whether they should end so that the layout changes.

        Args:
            steps: step of each rank of this node; empty while they start.
            times: the newest of every rank of all nodes, in rank order; None while some are missing.
        """
        if self._accepted is not None or self._plan is None:
            return self._accepted is not None
        if not self._is_timed and steps and min(steps) >= 1:
            self._cost_s, self._is_timed = self._clock() - self._started_at, True
        newest = min(rank_time.step for rank_time in times) if times else 0
        if times and newest > min((rank_time.step for rank_time in self._times), default=0):
            self._times = times
            self._judge_promise(self._plan)
            if self._accepted is None:
                self._ask(self._plan.layout)
        if self._accepted is None and self._helper is not None and self._helper.has_ended:
            answer, self._helper = self._helper.answer, None
            self._confirm(read_answer(answer))
        return self._accepted is not None

    def take(self, devices: Sequence[Device]) -> bool:
        """Makes an accepted change the choice for its devices, whose ranks have ended; returns whether there is one.

        Args:
            devices: of the ranks that ended, in rank order.
        """
        accepted = self._accepted
        if accepted is None or self._plan is None:
            return False
        self._promise = _Promise(
            previous=self._plan, previous_choice=self._choice, before_s=self._step_s,
            expected_s=self._step_s * accepted.step_ratio,
        )  # fmt: skip
        self._choice = _Choice(devices=tuple(devices), plan=accepted.plan, analysis=accepted.analysis)
        self._changed_step, self._is_change = self._step, True
        return True

    def choice_for(self, devices: Sequence[Device]) -> tuple[Plan, ModelAnalysis | None] | None:
        """Returns the plan chosen for the speeds of these devices in rank order; None without one."""
        choice = self._choice
        return (choice.plan, choice.analysis) if choice is not None and choice.devices == tuple(devices) else None

    def withdraw(self) -> bool:
        """Goes back to the layout before a change whose ranks failed before they were measured.

        Returns:
            Whether there was such a change; its layout isn't tried again.
        """
        promise, self._promise = self._promise, None
        if promise is None or self._plan is None:
            return False
        self._choice = promise.previous_choice
        self._disappointing.add(str(self._plan.layout))
        self._event("replan_withdrawn", layout=str(self._plan.layout), before=str(promise.previous.layout))
        return True

    def close(self) -> None:
        """Ends the child, if it still works."""
        if self._helper is not None:
            self._helper.close()
            self._helper = None

    @property
    def _step(self) -> int:
        return min(rank_time.step for rank_time in self._times)

    @property
    def _steps_left(self) -> int:
        return min(rank_time.last_step for rank_time in self._times) - self._step

    @property
    def _step_s(self) -> float:
        """Seconds of a step, which all ranks end together."""
        return max(rank_time.step_s for rank_time in self._times)

    def _judge_promise(self, plan: Plan) -> None:
        """Reports the first times after a change; where they disappoint, asks more of the next, or changes back."""
        promise, self._promise = self._promise, None
        if promise is None:
            return
        self._event(
            "replan_measured", step=self._step, layout=str(plan.layout), before_s=promise.before_s,
            expected_s=promise.expected_s, measured_s=self._step_s, cost_s=self._cost_s,
        )  # fmt: skip
        gain = (promise.before_s - self._step_s) / (promise.before_s - promise.expected_s)
        if gain < KEPT_PROMISE:
            self._margin *= 2.0
            self._disappointing.add(str(plan.layout))
            # Slower than before, as measured: what was there before needs no promise.
            back = Replan(plan=promise.previous, step_ratio=promise.before_s / self._step_s)
            self._decide(back, self._steps_left)

    def _ask(self, layout: Layout) -> None:
        busy_s = tuple(rank_time.busy_s for rank_time in self._times)
        if self._helper is not None or self._steps_left <= 0 or _are_alike(busy_s, self._answered_busy_s):
            return
        request = ReplanRequest(
            layout=layout, busy_s=busy_s, step_s=self._step_s, disappointing=frozenset(self._disappointing)
        )
        self._asked_busy_s = busy_s

        def work() -> bytes:
            warnings.simplefilter("ignore")
            # A layout that can't be priced or run is no better one.
            with contextlib.suppress(MeshwrightError):
                return pickle.dumps(self._planner(request))
            return b""

        with contextlib.suppress(LaunchError):
            self._helper = Helper(work, nice=10)

    def _confirm(self, replan: Replan | None) -> None:
        """Decides on an answer of the planner where the one before agrees: a passing load asks for a change once."""
        earlier, self._wanted = self._wanted, None
        if replan is None or replan.step_ratio > 1.0 - LEAST_GAIN:
            # The planner computes on the ranks' cores: at the same times it isn't asked again.
            self._answered_busy_s = self._asked_busy_s
            return
        self._wanted = replan
        if earlier is None or not _is_same_rank_slow(earlier.speeds, replan.speeds):
            return
        steps = self._steps_left
        if self._changed_step is not None:
            # Speeds that changed once may change again: they are expected to last as long as they have lasted.
            steps = min(steps, self._step - self._changed_step)
        self._decide(replan, steps)

    def _decide(self, replan: Replan, steps: int) -> None:
        """Accepts a change that pays over a number of steps."""
        if self._cost_s is None or self._plan is None or replan.step_ratio > 1.0 - LEAST_GAIN:
            return
        step_s = self._step_s
        gain_s = (1.0 - replan.step_ratio) * step_s * steps
        if gain_s <= self._margin * self._cost_s:
            return
        self._accepted, self._accepted_at = replan, self._clock()
        priced = {} if replan.priced_s is None else {"priced_s": list(replan.priced_s)}
        self._event(
            "replanned", step=self._step, before=str(self._plan.layout), layout=str(replan.plan.layout),
            speeds=replan.speeds, gain_s=gain_s, cost_s=self._cost_s, step_s=step_s,
            expected_s=step_s * replan.step_ratio, **priced,
        )  # fmt: skip


def _are_alike(busy_s: Sequence[float], others_s: Sequence[float]) -> bool:
    """Returns whether two windows' compute times of the same ranks differ by the clock's noise alone."""
    return len(busy_s) == len(others_s) and all(
        abs(seconds - other) <= SAME_TIME * other for seconds, other in zip(busy_s, others_s)
    )


def _is_same_rank_slow(earlier: Sequence[float], later: Sequence[float]) -> bool:
    """Returns whether the slowest rank of a window was among the slowest of the one before."""
    slowest = min(range(len(later)), key=later.__getitem__, default=0)
    return not later or earlier[slowest] <= min(earlier) + SPEED_NOISE


def read_answer(answer: bytes) -> Replan | None:
    """Returns the answer of the child; None of one that was killed, or had nothing to say."""
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Bytes of this process's own child, through a pipe that nobody else writes.
        replan = pickle.loads(answer)
        return replan if isinstance(replan, Replan) else None
    return None
