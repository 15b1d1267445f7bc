"""Changes the layout of a running job, where that wins more than a new start of the ranks costs.

The ranks publish what each computed (`train.stage_times`), on several nodes through messages to the leader; a child
process asks the planner for the best layout at these speeds. Where its gain over the steps that are left exceeds the
cost by a margin, the ranks end after a step that they agree on, as when devices come back, and others go on from their
snapshots under the new layout.
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
from meshwright.resilience.planning import Replan, Replanning, ReplanRequest
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.train.stage_times import RankTime

LEAST_GAIN = 0.1
"""The layout changes where a step is expected to take this share less: times aren't known better."""
MARGIN = 2.0
"""Times its cost that a change must win over the steps that are left; twice as much after each that disappointed."""
KEPT_PROMISE = 0.5
"""Share of the promised gain below which a change has disappointed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Promise:
    """What the last change was expected to bring."""

    previous: Plan
    """The plan before it."""
    before_s: float
    """Seconds of a step under that."""
    expected_s: float


class Replanner:
    """Decides when the layout of a run changes; one object for all its generations.

    Args:
        planner: asked in a child process.
        event: records an event: its kind, and its fields by keyword.
        steps: of the whole run.
        clock: returns seconds; another one in tests.
    """

    def __init__(
        self,
        planner: Replanning,
        event: Callable[..., None],
        steps: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._planner, self._event, self._steps, self._clock = planner, event, steps, clock
        self._margin = MARGIN
        self._promise: _Promise | None = None
        self._cost_s: float | None = None
        self._started_at = 0.0
        self._changed_at: float | None = None
        self._helper: Helper | None = None
        self._times: Sequence[RankTime] = ()
        self._accepted: Replan | None = None
        self._disappointing: set[str] = set()
        self._plan: Plan | None = None
        self._is_timed = False

    def begin_generation(self, plan: Plan) -> None:
        """Starts to watch new ranks under a plan."""
        self.close()
        # The cost of a change counts from the request on; that of a start, before the first change, stands for it.
        self._started_at = self._changed_at if self._changed_at is not None else self._clock()
        if self._changed_at is None:
            self._promise = None  # these ranks follow a failure: nothing can be said of the change before
        self._changed_at, self._accepted, self._times = None, None, ()
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
            self._decide(read_answer(answer))
        return self._accepted is not None

    def take(self) -> Replan | None:
        """Returns the accepted change, once its ranks have ended; None where they ended for another reason."""
        accepted = self._accepted
        if accepted is not None and self._plan is not None:
            expected_s = self._step_s * accepted.step_ratio
            self._promise = _Promise(previous=self._plan, before_s=self._step_s, expected_s=expected_s)
        return accepted

    def close(self) -> None:
        """Ends the child, if it still works."""
        if self._helper is not None:
            self._helper.close()
            self._helper = None

    @property
    def _step(self) -> int:
        return min(rank_time.step for rank_time in self._times)

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
            self._decide(Replan(plan=promise.previous, step_ratio=promise.before_s / self._step_s))

    def _ask(self, layout: Layout) -> None:
        if self._helper is not None or self._step >= self._steps:
            return
        request = ReplanRequest(
            layout=layout,
            busy_s=tuple(rank_time.busy_s for rank_time in self._times),
            step_s=self._step_s,
            disappointing=frozenset(self._disappointing),
        )

        def work() -> bytes:
            warnings.simplefilter("ignore")
            # A layout that can't be priced or run is no better one.
            with contextlib.suppress(MeshwrightError):
                return pickle.dumps(self._planner(request))
            return b""

        with contextlib.suppress(LaunchError):
            self._helper = Helper(work, nice=10)

    def _decide(self, replan: Replan | None) -> None:
        if replan is None or self._cost_s is None or self._plan is None or replan.step_ratio > 1.0 - LEAST_GAIN:
            return
        step_s = self._step_s
        gain_s = (1.0 - replan.step_ratio) * step_s * (self._steps - self._step)
        if gain_s <= self._margin * self._cost_s:
            return
        self._accepted, self._changed_at = replan, self._clock()
        priced = {} if replan.priced_s is None else {"priced_s": list(replan.priced_s)}
        self._event(
            "replanned", step=self._step, before=str(self._plan.layout), layout=str(replan.plan.layout),
            speeds=replan.speeds, gain_s=gain_s, cost_s=self._cost_s, step_s=step_s,
            expected_s=step_s * replan.step_ratio, **priced,
        )  # fmt: skip


def read_answer(answer: bytes) -> Replan | None:
    """Returns the answer of the child; None of one that was killed, or had nothing to say."""
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Bytes of this process's own child, through a pipe that nobody else writes.
        replan = pickle.loads(answer)
        return replan if isinstance(replan, Replan) else None
    return None
