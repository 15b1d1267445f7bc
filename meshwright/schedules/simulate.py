"""Simulates a schedule with given costs: makespan, bubble, live micro-batches; or the actions of a deadlock.

A rank runs its actions in order. An action starts when the rank is free and its input has arrived: a forward needs
the forward of the previous stage, a backward the backward of the next stage. Sends take time between ranks, not on
them, and don't delay one another. A pair starts when both of its actions can, and sends both results at its end, as
torch does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.errors import PlanError
from meshwright.schedules.action import Action, ActionKind, Schedule
from meshwright.schedules.complete import check_complete
from meshwright.schedules.costs import ActionCosts

MAX_LISTED = 4
"""Most deadlocked ranks in a message."""

_ResultKey = tuple[bool, int, int]
"""(is forward, stage, micro-batch): a result that another stage can wait for."""


@dataclass(frozen=True, slots=True)
class ActionSpan:
    """An action of a rank with its start and end."""

    rank: int
    start_s: float
    end_s: float
    action: Action


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """The result of simulating a schedule."""

    schedule: Schedule
    """The simulated schedule."""
    makespan_s: float
    """From the first start to the last end."""
    busy_s: tuple[float, ...]
    """Computing time of each rank."""
    peak_live_rank: tuple[int, ...]
    """Most live (stage, micro-batch) pairs of each rank: forward started, backward (INPUT and WEIGHT) not ended."""
    peak_live_stage: tuple[int, ...]
    """Most live micro-batches of each stage."""
    timeline: tuple[ActionSpan, ...]
    """Every action, earliest start first."""

    @property
    def bubble(self) -> float:
        """Idle time as a share of all time of all ranks."""
        total_s = self.makespan_s * len(self.busy_s)
        return 1.0 - sum(self.busy_s) / total_s if total_s else 0.0


class _SimulationState:
    """Progress of each rank in a simulation, and the end time of each result."""

    def __init__(self, schedule: Schedule, costs: ActionCosts) -> None:
        self.schedule, self.costs = schedule, costs
        self.next_action = [0] * schedule.ranks
        self.free_s = [0.0] * schedule.ranks
        self.busy_s = [0.0] * schedule.ranks
        self.result_end_s: dict[_ResultKey, float] = {}
        self.waiting_rank: dict[_ResultKey, int] = {}
        self.spans: list[ActionSpan] = []

    def advance(self, rank: int) -> Iterator[int]:
        """Runs a rank until it must wait; yields the ranks that waited for what it computed."""
        row, placement, result_end_s = self.schedule.actions[rank], self.schedule.placement, self.result_end_s
        for action in row[self.next_action[rank] :]:
            results = _results_of(action)
            start_s = self.free_s[rank]
            for needed_result in _inputs_of(results, self.schedule.stages):
                ready_s = result_end_s.get(needed_result)
                if ready_s is None:
                    self.waiting_rank[needed_result] = rank
                    return
                start_s = max(start_s, ready_s + self.costs.between(placement[needed_result[1]], rank))
            action_s = self.costs.of(action)
            end_s = start_s + action_s
            self.spans.append(ActionSpan(rank, start_s, end_s, action))
            self.free_s[rank] = end_s
            self.busy_s[rank] += action_s
            self.next_action[rank] += 1
            for result in results:
                result_end_s[result] = end_s
                if result in self.waiting_rank:
                    yield self.waiting_rank.pop(result)


def _results_of(action: Action) -> list[_ResultKey]:
    """Returns the results of an action that other stages can wait for."""
    return [
        (single.kind is ActionKind.FORWARD, single.stage, single.microbatch)
        for single in action.parts
        if single.kind is not ActionKind.WEIGHT
    ]


def _inputs_of(results: list[_ResultKey], stages: int) -> list[_ResultKey]:
    """Returns the inputs from other stages of an action with these results; `check_complete` checks its own rank's."""
    inputs = [
        (is_forward, stage - 1 if is_forward else stage + 1, microbatch) for is_forward, stage, microbatch in results
    ]
    return [result for result in inputs if 0 <= result[1] < stages and result not in results]


def simulate(schedule: Schedule, costs: ActionCosts) -> Simulation:
    """Simulates a schedule.

    Args:
        schedule: any schedule, also a user's own.
        costs: seconds of its actions and sends.

    Returns:
        Makespan, bubble, live micro-batches, and the span of each action.

    Raises:
        PlanError: an action is missing or out of order, or the schedule deadlocks; the message names the actions and
            their missing inputs.
    """
    check_complete(schedule)
    costs.check(schedule)
    state = _SimulationState(schedule, costs)
    runnable_ranks = deque(range(schedule.ranks))
    while runnable_ranks:
        runnable_ranks.extend(state.advance(runnable_ranks.popleft()))
    if state.waiting_rank:
        raise PlanError(_deadlock(state))
    rank_peaks, stage_peaks = _peak_live(schedule)
    return Simulation(
        schedule=schedule,
        makespan_s=max(state.free_s),
        busy_s=tuple(state.busy_s),
        peak_live_rank=rank_peaks,
        peak_live_stage=stage_peaks,
        timeline=tuple(sorted(state.spans, key=lambda span: (span.start_s, span.rank))),
    )


def _deadlock(state: _SimulationState) -> str:
    lines = []
    for (is_forward, stage, microbatch), rank in sorted(state.waiting_rank.items(), key=lambda item: item[1]):
        action = state.schedule.actions[rank][state.next_action[rank]]
        needed = Action(stage, ActionKind.FORWARD if is_forward else ActionKind.BACKWARD, microbatch)
        lines.append(
            f"rank {rank} stops at {action}, which waits for {needed} of rank {state.schedule.placement[stage]}"
        )
    remainder = f", and {len(lines) - MAX_LISTED} ranks more" if len(lines) > MAX_LISTED else ""
    return (
        f"schedule {state.schedule.name} deadlocks: {'; '.join(lines[:MAX_LISTED])}{remainder}; move what is waited "
        "for in front of what its rank stops at"
    )


def _peak_live(schedule: Schedule) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the most live (stage, micro-batch) pairs of each rank, and of each stage.

    A rank runs one action at a time, so both follow from the order of its actions alone.
    """
    rank_peaks, stage_peaks = [0] * schedule.ranks, [0] * schedule.stages
    stage_live = [0] * schedule.stages
    for rank, row in enumerate(schedule.actions):
        rank_live = 0
        for single in (single for action in row for single in action.parts):
            change = 1 if single.kind is ActionKind.FORWARD else 0 if single.kind is ActionKind.INPUT else -1
            rank_live, stage_live[single.stage] = rank_live + change, stage_live[single.stage] + change
            rank_peaks[rank] = max(rank_peaks[rank], rank_live)
            stage_peaks[single.stage] = max(stage_peaks[single.stage], stage_live[single.stage])
    return tuple(rank_peaks), tuple(stage_peaks)
