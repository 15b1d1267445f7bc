"""Each rank's compute time, published to the supervisor, which asks the planner for a better split of the layers."""

from __future__ import annotations

import struct
from statistics import median
from typing import NamedTuple

from meshwright.checkpoint.snapshot import Segment
from meshwright.errors import PlanError
from meshwright.parallel.axis_group import TrafficLog
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout
from meshwright.train.hooks import Request, StepInfo
from meshwright.train.run_config import RunConfig
from meshwright.train.share_balance import WARM_UP_STEPS, busy_seconds

MIN_BUSY_S = 1e-6
"""Least compute time of a step, since speeds divide by it."""
_RECORD = struct.Struct("<qdd")
_STEP = struct.Struct("<q")


class RankTime(NamedTuple):
    """A rank's median times over the steps of a window."""

    step: int
    """The last step of the window."""
    busy_s: float
    """Seconds that it computed, without waits for collectives and for data."""
    step_s: float
    """Seconds of the whole step."""


class PublishedTimes:
    """Shared memory with the last `RankTime` of each rank of a node, written by the ranks.

    Args:
        ranks: number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks, self._segment = ranks, Segment()
        self._map = self._segment.map(_RECORD.size * ranks)

    def publish(self, rank: int, time: RankTime) -> None:
        """Publishes a rank's times."""
        # The step is stored last: a reader that sees it also sees its times.
        _RECORD.pack_into(self._map, _RECORD.size * rank, 0, time.busy_s, time.step_s)
        _STEP.pack_into(self._map, _RECORD.size * rank, time.step)

    def read(self) -> list[RankTime] | None:
        """Returns all ranks' times of one window, in rank order; None until every rank has published it."""
        times = [RankTime(*_RECORD.unpack_from(self._map, _RECORD.size * rank)) for rank in range(self._ranks)]
        return times if times[0].step > 0 and len({time.step for time in times}) == 1 else None

    def close(self) -> None:
        """Lets go of the memory."""
        self._map.close()
        self._segment.close()


class TimePublisher:
    """A hook of the loop that publishes this rank's times every few steps.

    Args:
        times: shared with the supervisor.
        rank: this rank.
        every: steps of a window.
        log: books the waits of its stage.
    """

    def __init__(self, times: PublishedTimes, rank: int, every: int, log: TrafficLog) -> None:
        self._times, self._rank, self._every, self._log = times, rank, every, log
        self._stage_wait_s = 0.0
        self._ignored_steps = WARM_UP_STEPS
        self._seconds: list[tuple[float, float]] = []

    def __call__(self, info: StepInfo) -> Request:
        """Takes a step's times, and publishes their medians where a window is full."""
        stage_wait_s = self._log.stage_wait_s - self._stage_wait_s
        self._stage_wait_s = self._log.stage_wait_s
        if self._ignored_steps:
            self._ignored_steps -= 1
            return Request.NONE
        busy_s = max(MIN_BUSY_S, busy_seconds(info.record) - stage_wait_s)
        self._seconds.append((busy_s, info.record.step_s))
        if len(self._seconds) == self._every:
            busy_s, step_s = (median(values) for values in zip(*self._seconds, strict=True))
            self._times.publish(self._rank, RankTime(info.step, busy_s, step_s))
            self._seconds = []
        return Request.NONE


def can_resplit(layout: Layout) -> bool:
    """Returns whether a layout has layers that can move between ranks: a pipeline with one stage a rank."""
    return layout.degree(Mechanics.STAGES) > 1 and layout.stages_per_rank == 1 and layout.islands == 1


def check_replan(config: RunConfig, layout: Layout, supervisors: int, kind: str) -> None:
    """Refuses, before a rank starts, a run whose layers can't move while it runs.

    Args:
        config: of the run.
        layout: to be run.
        supervisors: that watch its ranks: 0 where nobody could start them again, else one a node.
        kind: of device.

    Raises:
        PlanError: with the rule and the nearest that works.
    """
    reason, stages = "", layout.degree(Mechanics.STAGES)
    if not config.train.replan:
        return
    if stages == 1:
        reason = f"{layout} has no stages: --train.rebalance moves rows between its readers, without a restart"
    elif layout.stages_per_rank > 1:
        reason = f"{layout} has {layout.stages_per_rank} stages a rank; use a schedule with one, as 1f1b"
    elif layout.islands > 1:
        reason = f"{layout} has islands, which end together at a join alone: leave it out"
    elif config.train.rebalance:
        reason = "--train.rebalance changes what a rank's time says of its layers: use one of them"
    elif supervisors == 0:
        reason = "nobody starts the ranks again (recovery.enabled = false, torchrun): use meshwright's own launcher"
    elif supervisors > 1:
        reason = f"it is built for ranks of one node, and these are on {supervisors}: leave it out"
    elif kind != "cpu":
        reason = f"it measures what stages compute on processor cores alone, and these ranks have {kind}: leave it out"
    if reason:
        raise PlanError(f"train.replan = {config.train.replan} moves layers between the stages of a pipeline; {reason}")
