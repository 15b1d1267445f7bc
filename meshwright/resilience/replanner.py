"""Moves layers between the stages of a running pipeline, where that wins more than a new start of the ranks costs.

The ranks publish what each computed (`train.stage_times`); a child process asks the planner for the best split at these
speeds. Where its gain over the steps that are left exceeds the cost by a margin, the ranks end after a step that they
agree on, as when devices come back, and others go on from their snapshots under the new split.
"""

from __future__ import annotations

import contextlib
import pickle
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshwright.errors import LaunchError, MeshwrightError
from meshwright.monitor.progress import RankStamp
from meshwright.resilience.helper import Helper
from meshwright.resilience.planning import Replan, Replanning
from meshwright.spec.axis import Mechanics
from meshwright.spec.groups import coordinates
from meshwright.spec.layout import Layout
from meshwright.train.stage_times import PublishedTimes, RankTime

LEAST_GAIN = 0.1
"""Layers move where a step is expected to take this share less: times aren't known better."""
MARGIN = 2.0
"""Times its cost that a move must win over the steps that are left; twice as much after each move that disappointed."""
KEPT_PROMISE = 0.5
"""Share of the promised gain below which a move has disappointed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Promise:
    """What the last move was expected to bring."""

    before_s: float
    expected_s: float


class Replanner:
    """Decides when the layers of a run move; one object for all its generations.

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
        self._moved_at: float | None = None
        self._helper: Helper | None = None
        self._times: list[RankTime] = []
        self._accepted: Replan | None = None
        self._layout, self._is_timed = Layout(), False

    def begin_generation(self, layout: Layout) -> None:
        """Starts to watch new ranks under a layout."""
        self.close()
        # The cost of a move counts from the request on; that of a start, before the first move, stands for it.
        self._started_at = self._moved_at if self._moved_at is not None else self._clock()
        if self._moved_at is None:
            self._promise = None  # these ranks follow a failure: nothing can be said of the move before
        self._moved_at, self._accepted, self._times = None, None, []
        self._layout, self._is_timed = layout, False

    def poll(self, stamps: Sequence[RankStamp], published: PublishedTimes | None) -> bool:
        """Takes the ranks' stamps and times; returns whether they should end so that layers move."""
        if published is None or self._accepted is not None:
            return self._accepted is not None
        if not self._is_timed and stamps and all(stamp.step >= 1 for stamp in stamps):
            self._cost_s, self._is_timed = self._clock() - self._started_at, True
        times = published.read()
        if times is not None and (not self._times or times[0].step > self._times[0].step):
            self._times = times
            self._judge_promise(times)
            self._ask(times)
        if self._helper is not None and self._helper.has_ended:
            answer, self._helper = self._helper.answer, None
            self._decide(read_answer(answer))
        return self._accepted is not None

    def take(self) -> Replan | None:
        """Returns the accepted move, once its ranks have ended; None where they ended for another reason."""
        accepted = self._accepted
        if accepted is not None:
            step_s = self._times[0].step_s
            self._promise = _Promise(before_s=step_s, expected_s=step_s * accepted.step_ratio)
        return accepted

    def close(self) -> None:
        """Ends the child, if it still works."""
        if self._helper is not None:
            self._helper.close()
            self._helper = None

    def _judge_promise(self, times: Sequence[RankTime]) -> None:
        """Reports the first times after a move, and asks more of the next one where they disappoint."""
        promise, self._promise = self._promise, None
        if promise is None:
            return
        gain = (promise.before_s - times[0].step_s) / (promise.before_s - promise.expected_s)
        if gain < KEPT_PROMISE:
            self._margin *= 2.0
        self._event(
            "replan_measured", step=times[0].step, layout=str(self._layout), before_s=promise.before_s,
            expected_s=promise.expected_s, measured_s=times[0].step_s, cost_s=self._cost_s,
        )  # fmt: skip

    def _ask(self, times: Sequence[RankTime]) -> None:
        if self._helper is not None or times[0].step >= self._steps:
            return
        layout, busy_s = self._layout, stage_seconds(self._layout, times)

        def work() -> bytes:
            warnings.simplefilter("ignore")
            # A layout that can't be priced or run is no better one.
            with contextlib.suppress(MeshwrightError):
                return pickle.dumps(self._planner(layout, busy_s, times[0].step_s))
            return b""

        with contextlib.suppress(LaunchError):
            self._helper = Helper(work, nice=10)

    def _decide(self, replan: Replan | None) -> None:
        if replan is None or self._cost_s is None or replan.step_ratio > 1.0 - LEAST_GAIN:
            return
        step, _, step_s = self._times[0]
        gain_s = (1.0 - replan.step_ratio) * step_s * (self._steps - step)
        if gain_s <= self._margin * self._cost_s:
            return
        self._accepted, self._moved_at = replan, self._clock()
        self._event(
            "replanned", step=step, before=str(self._layout), layout=str(replan.plan.layout), speeds=replan.speeds,
            gain_s=gain_s, cost_s=self._cost_s, step_s=step_s, expected_s=step_s * replan.step_ratio,
        )  # fmt: skip


def read_answer(answer: bytes) -> Replan | None:
    """Returns the answer of the child; None of one that was killed, or had nothing to say."""
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Bytes of this process's own child, through a pipe that nobody else writes.
        replan = pickle.loads(answer)
        return replan if isinstance(replan, Replan) else None
    return None


def stage_seconds(layout: Layout, times: Sequence[RankTime]) -> list[float]:
    """Returns the seconds that each stage of a pipeline computed, its slowest rank's."""
    axis = layout.axis(Mechanics.STAGES)
    seconds = [0.0] * layout.degree(Mechanics.STAGES)
    for rank, rank_time in enumerate(times):
        stage = coordinates(rank, layout.degrees)[axis]
        seconds[stage] = max(seconds[stage], rank_time.busy_s)
    return seconds
