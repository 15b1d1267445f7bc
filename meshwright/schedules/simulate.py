"""Runs a schedule against given costs: how long, how idle, how much is held; or what it is stuck on.

A rank runs its actions in order. An action starts when the rank is free and what it needs has come: a forward needs
the forward of the stage before, a backward the backward of the stage after. Sends cost time between ranks, not on
them, and don't wait for one another. A pair starts when both parts can and hands on both results at its end, as torch
sends them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.errors import PlanError
from meshwright.schedules.action import Action, ActionKind, Schedule
from meshwright.schedules.complete import check_complete
from meshwright.schedules.costs import ActionCosts

MOST_STUCK = 4
"""Stuck ranks that a message lists."""

_Result = tuple[bool, int, int]
"""(whether of a forward, stage, micro-batch): what another stage can wait for."""


@dataclass(frozen=True, slots=True)
class ActionSpan:
    """When a rank ran an action."""

    rank: int
    start_s: float
    end_s: float
    action: Action


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """What came of running a schedule once."""

    schedule: Schedule
    """What was run."""
    makespan_s: float
    """From the first start to the last end."""
    busy_s: tuple[float, ...]
    """Computing time of each rank."""
    peak_live_rank: tuple[int, ...]
    """Most (stage, micro-batch) pairs a rank held: forward begun, backward (INPUT and WEIGHT) not ended."""
    peak_live_stage: tuple[int, ...]
    """Most micro-batches a stage held."""
    timeline: tuple[ActionSpan, ...]
    """Every action, earliest start first."""

    @property
    def bubble(self) -> float:
        """Idle time as a share of all time of all ranks."""
        total_s = self.makespan_s * len(self.busy_s)
        return 1.0 - sum(self.busy_s) / total_s if total_s else 0.0


class _SimulationState:
    """The state of a simulation: how far each rank is, and which results are there since when."""

    def __init__(self, schedule: Schedule, costs: ActionCosts) -> None:
        self.schedule, self.costs = schedule, costs
        self.place = [0] * schedule.ranks
        self.free_s = [0.0] * schedule.ranks
        self.busy_s = [0.0] * schedule.ranks
        self.there_s: dict[_Result, float] = {}
        self.waiting: dict[_Result, int] = {}
        self.spans: list[ActionSpan] = []

    def advance(self, rank: int) -> Iterator[int]:
        """Runs a rank until it must wait; yields the ranks that waited for what it computed."""
        row, placement, there_s = self.schedule.actions[rank], self.schedule.placement, self.there_s
        for action in row[self.place[rank] :]:
            results = _results(action)
            start_s = self.free_s[rank]
            for need in _needs(results, self.schedule.stages):
                came_s = there_s.get(need)
                if came_s is None:
                    self.waiting[need] = rank
                    return
                start_s = max(start_s, came_s + self.costs.between(placement[need[1]], rank))
            took_s = self.costs.of(action)
            end_s = start_s + took_s
            self.spans.append(ActionSpan(rank, start_s, end_s, action))
            self.free_s[rank] = end_s
            self.busy_s[rank] += took_s
            self.place[rank] += 1
            for result in results:
                there_s[result] = end_s
                if result in self.waiting:
                    yield self.waiting.pop(result)


def _results(action: Action) -> list[_Result]:
    """What other stages can wait for of an action."""
    return [
        (part.kind is ActionKind.FORWARD, part.stage, part.microbatch)
        for part in action.parts
        if part.kind is not ActionKind.WEIGHT
    ]


def _needs(results: list[_Result], stages: int) -> list[_Result]:
    """What an action with such results waits for from other stages; its own rank's order is checked before."""
    needs = [(ahead, stage - 1 if ahead else stage + 1, microbatch) for ahead, stage, microbatch in results]
    return [need for need in needs if 0 <= need[1] < stages and need not in results]


def simulate(schedule: Schedule, costs: ActionCosts) -> Simulation:
    """Runs a schedule once.

    Args:
        schedule: any schedule, also a user's own.
        costs: seconds of its actions and sends.

    Returns:
        Times, idle share, what is held, and when each action ran.

    Raises:
        PlanError: an action is missing or out of order, or ranks wait for each other for ever; the message names
            the actions and what they wait for.
    """
    check_complete(schedule)
    costs.check(schedule)
    run = _SimulationState(schedule, costs)
    turns = deque(range(schedule.ranks))
    while turns:
        turns.extend(run.advance(turns.popleft()))
    if run.waiting:
        raise PlanError(_deadlock(run))
    ranks, stages = _peaks(schedule)
    return Simulation(
        schedule=schedule,
        makespan_s=max(run.free_s),
        busy_s=tuple(run.busy_s),
        peak_live_rank=ranks,
        peak_live_stage=stages,
        timeline=tuple(sorted(run.spans, key=lambda span: (span.start_s, span.rank))),
    )


def _deadlock(run: _SimulationState) -> str:
    lines = []
    for (ahead, stage, microbatch), rank in sorted(run.waiting.items(), key=lambda item: item[1]):
        action = run.schedule.actions[rank][run.place[rank]]
        need = Action(stage, ActionKind.FORWARD if ahead else ActionKind.BACKWARD, microbatch)
        lines.append(f"rank {rank} stops at {action}, which waits for {need} of rank {run.schedule.placement[stage]}")
    more = f", and {len(lines) - MOST_STUCK} ranks more" if len(lines) > MOST_STUCK else ""
    return (
        f"schedule {run.schedule.name} deadlocks: {'; '.join(lines[:MOST_STUCK])}{more}; move what is waited for in "
        "front of what its rank stops at"
    )


def _peaks(schedule: Schedule) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A rank runs one action at a time, so what it holds follows from the order alone."""
    ranks, stages = [0] * schedule.ranks, [0] * schedule.stages
    live = [0] * schedule.stages
    for rank, row in enumerate(schedule.actions):
        held = 0
        for part in (part for action in row for part in action.parts):
            change = 1 if part.kind is ActionKind.FORWARD else 0 if part.kind is ActionKind.INPUT else -1
            held, live[part.stage] = held + change, live[part.stage] + change
            ranks[rank] = max(ranks[rank], held)
            stages[part.stage] = max(stages[part.stage], live[part.stage])
    return tuple(ranks), tuple(stages)
