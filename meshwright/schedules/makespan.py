"""The time of a schedule alone: as `simulate` finds it, several times faster, for schedules that are known to be whole.

Results are numbered: stage s and micro-batch m of M have s M + m for the forward, and as many as there are forwards
more for the backward.
"""

from __future__ import annotations

from collections import deque

from meshwright.schedules.action import Action, ActionKind, Schedule
from meshwright.schedules.costs import ActionCosts
from meshwright.schedules.simulate import simulate

PARTS = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT, ActionKind.WEIGHT)
"""What a stage computes."""
NEVER = -1.0
"""Stands for the end of what hasn't run."""


def makespan_s(schedule: Schedule, costs: ActionCosts) -> float:
    """Returns seconds from the first start to the last end: `Simulation.makespan_s`.

    Args:
        schedule: of which every action is there once, as those that are built by name.
        costs: seconds of its actions and sends.

    Raises:
        PlanError: ranks wait for each other for ever.
    """
    costs.check(schedule)
    run = _MakespanState(schedule, costs)
    turns = deque(range(schedule.ranks))
    while turns:
        turns.extend(run.advance(turns.popleft()))
    if any(place < len(row) for place, row in zip(run.place, schedule.actions)):
        return simulate(schedule, costs).makespan_s
    return max(run.free_s)


class _MakespanState:
    """How far each rank is, and when each result was there."""

    def __init__(self, schedule: Schedule, costs: ActionCosts) -> None:
        self.schedule, self.costs = schedule, costs
        self.place = [0] * schedule.ranks
        self.free_s = [0.0] * schedule.ranks
        half = schedule.stages * schedule.microbatches
        self.there_s = [NEVER] * (2 * half)
        self.waiting = [-1] * (2 * half)
        self.known = {
            (kind, stage): self._known(kind, stage, half) for kind in PARTS for stage in range(schedule.stages)
        }

    def _known(self, kind: ActionKind, stage: int, half: int) -> tuple[float, int, int, float]:
        """Seconds of an action, its result, the result that it waits for, and seconds of its send; -1 for no result.

        Results are those of micro-batch 0.
        """
        schedule, costs, ahead = self.schedule, self.costs, kind is ActionKind.FORWARD
        took_s = costs.of(Action(stage, kind, 0))
        own = stage * schedule.microbatches + (0 if ahead else half)
        before = stage - 1 if ahead else stage + 1
        if kind is ActionKind.WEIGHT:
            return took_s, -1, -1, 0.0
        if not 0 <= before < schedule.stages:
            return took_s, own, -1, 0.0
        need = own - schedule.microbatches if ahead else own + schedule.microbatches
        return took_s, own, need, costs.between(schedule.placement[before], schedule.placement[stage])

    def advance(self, rank: int) -> list[int]:
        """Runs a rank until it must wait; returns the ranks that waited for what it computed."""
        row, there_s, waiting, known = self.schedule.actions[rank], self.there_s, self.waiting, self.known
        free_s, place, freed = self.free_s[rank], self.place[rank], []
        for action in row[place:]:
            if action.pair is not None:
                end_s, lack = self._pair(action, free_s)
            else:
                took_s, own, need, send_s = known[action.kind, action.stage]
                came_s, lack = 0.0, -1
                if need >= 0:
                    came_s = there_s[need + action.microbatch]
                    lack = need + action.microbatch if came_s < 0 else -1
                end_s = max(free_s, came_s + send_s) + took_s
            if lack >= 0:
                waiting[lack] = rank
                break
            place, free_s = place + 1, end_s
            for part in (action,) if action.pair is None else action.pair:
                own = known[part.kind, part.stage][1]
                if own >= 0:
                    there_s[own + part.microbatch] = end_s
                    if waiting[own + part.microbatch] >= 0:
                        freed.append(waiting[own + part.microbatch])
                        waiting[own + part.microbatch] = -1
        self.place[rank], self.free_s[rank] = place, free_s
        return freed

    def _pair(self, action: Action, start_s: float) -> tuple[float, int]:
        """When a pair that might start then ends, and a result that it still waits for, -1 for none."""
        own = {self.known[part.kind, part.stage][1] + part.microbatch for part in action.parts}
        for part in action.parts:
            _, _, need, send_s = self.known[part.kind, part.stage]
            if need >= 0 and need + part.microbatch not in own:
                came_s = self.there_s[need + part.microbatch]
                if came_s < 0:
                    return 0.0, need + part.microbatch
                start_s = max(start_s, came_s + send_s)
        return start_s + self.costs.of(action), -1
