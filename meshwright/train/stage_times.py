"""Each rank's compute time, published to the supervisor, which asks the planner for a better layout."""

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
_RECORD = struct.Struct("<qddq")
_STEP = struct.Struct("<q")


class RankTime(NamedTuple):
    """A rank's median times over the steps of a window."""

    step: int
    """The last step of the window."""
    busy_s: float
    """Seconds that it computed, without waits for collectives and for data."""
    step_s: float
    """Seconds of the whole step."""
    last_step: int
    """Steps after which the run ends, as it looks after this window."""


class PublishedTimes:
    """Shared memory with the last `RankTime` of each rank of a node, written by the ranks.

    Args:
        ranks: number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks, self._segment = ranks, Segment()
        self._read_step = 0
        self._map = self._segment.map(_RECORD.size * ranks)

    def publish(self, rank: int, time: RankTime) -> None:
        """Publishes a rank's times."""
        # The step is stored last: a reader that sees it also sees its times.
        _RECORD.pack_into(self._map, _RECORD.size * rank, 0, time.busy_s, time.step_s, time.last_step)
        _STEP.pack_into(self._map, _RECORD.size * rank, time.step)

    def read(self) -> list[RankTime] | None:
        """Returns all ranks' times of one window, in rank order; None until every rank has published it."""
        times = [RankTime(*_RECORD.unpack_from(self._map, _RECORD.size * rank)) for rank in range(self._ranks)]
        return times if times[0].step > 0 and len({time.step for time in times}) == 1 else None

    def read_new(self) -> tuple[RankTime, ...] | None:
        """Returns all ranks' times of a window that it hasn't returned yet, in rank order; None without one."""
        times = self.read()
        if times is None or times[0].step == self._read_step:
            return None
        self._read_step = times[0].step
        return tuple(times)

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
            self._times.publish(self._rank, RankTime(info.step, busy_s, step_s, info.steps))
            self._seconds = []
        return Request.NONE


def can_replan(layout: Layout, kind: str) -> bool:
    """Returns whether the compute times of a layout's ranks say how fast they are, so that another can be chosen.

    Args:
        layout: of the ranks.
        kind: of device.
    """
    # On GPUs nothing measures how long a stage waits for another.
    return layout.world > 1 and layout.islands == 1 and (kind == "cpu" or layout.degree(Mechanics.STAGES) == 1)


def fixed_layout_reason(config: RunConfig, layout: Layout) -> str:
    """Returns why nothing of a layout may change, and what works; empty where something may (`may_change_degrees`)."""
    if may_change_degrees(config, layout):
        return ""
    why = "the user named it" if config.layout != "auto" else "no run begins or ends to round or offload on the way"
    if layout.degree(Mechanics.STAGES) > 1:
        if not names_choice(config, layout, "split"):
            return ""
        return f"{layout} stays as it is, since {why}, and so do its layers by split={layout.split}: leave split out"
    if layout.reader(0)[1] == 1:
        return f"{layout} stays as it is, since {why}, and has neither stages nor readers to move work between"
    if names_choice(config, layout, "rows"):
        return f"{layout} stays as it is, since {why}, and so do its shares by rows={layout.rows}: leave rows out"
    return ""


def may_change_degrees(config: RunConfig, layout: Layout) -> bool:
    """Returns whether the whole layout may change: the planner chose it, and the search knows all that it has.

    A layout that the user named keeps what it names; its layers and rows move, unless it names those too. So does one
    that rounds, offloads, keeps secondary copies, or overlaps ``tp`` or ``ep``, which a run neither begins nor ends on
    the way.
    """
    return _named_layout(config, layout) is None and is_plain(layout)


def is_plain(layout: Layout) -> bool:
    """Returns whether a run may begin or end on the way with all that a layout has."""
    is_exact = not layout.is_lossy and layout.islands == 1
    hides = layout.tp_overlap or layout.ep_overlap or layout.ep_halves
    searched = not (layout.secondary or hides or layout.compile)
    return is_exact and layout.offload == "none" and searched


def names_choice(config: RunConfig, layout: Layout, choice: str) -> bool:
    """Returns whether the user's layout for as many ranks names a choice, as ``split``."""
    named = _named_layout(config, layout)
    return named is not None and bool(getattr(named, choice))


def _named_layout(config: RunConfig, layout: Layout) -> Layout | None:
    """Returns the layout that the user named for as many ranks, or for the whole run; None where the planner chose."""
    fallbacks = [Layout.parse(text) for text in config.recovery.layouts.split(";") if text.strip()]
    named = next((fallback for fallback in fallbacks if fallback.world == layout.world), None)
    if named is not None or config.layout == "auto":
        return named
    return Layout.parse(config.layout)


def check_replan(config: RunConfig, layout: Layout, watched: bool, kind: str) -> None:
    """Refuses, before a rank starts, a run whose layout can't change while it runs.

    Args:
        config: of the run.
        layout: to be run.
        watched: whether a supervisor could start its ranks again.
        kind: of device.

    Raises:
        PlanError: with the rule and the nearest that works.
    """
    if not config.train.replan:
        return
    if not watched:
        reason = "nobody starts the ranks again (recovery.enabled = false, torchrun): use meshwright's own launcher"
    elif layout.islands > 1:
        reason = f"{layout} has islands, which end together at a join alone: leave it out"
    elif config.train.rebalance:
        reason = "--train.rebalance changes what a rank's time says of its layers: use one of them"
    elif layout.world == 1:
        reason = "there is one: leave it out"
    elif not can_replan(layout, kind):
        reason = f"how long a stage of {layout} waits for another isn't measured on {kind}: use a layout without pp"
    else:
        reason = fixed_layout_reason(config, layout)
    if reason:
        raise PlanError(f"train.replan = {config.train.replan} moves work between ranks by their speeds; {reason}")
