"""Simulates only the makespan of a complete schedule: the result of `simulate`, several times faster.

Results are numbered for array access: the forward of stage s on micro-batch m of M is s M + m, and its backward is
larger by the number of forwards.
"""

from __future__ import annotations

from collections import deque

from meshwright.schedules.action import Action, ActionKind, Schedule
from meshwright.schedules.costs import ActionCosts
from meshwright.schedules.simulate import simulate

KINDS = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT, ActionKind.WEIGHT)
"""Kinds of computation of a stage."""
NOT_RUN = -1.0
"""End time of a result that doesn't exist yet."""


def makespan_s(schedule: Schedule, costs: ActionCosts) -> float:
    """Returns seconds from the first start to the last end: `Simulation.makespan_s`.

    Args:
        schedule: complete, as those that are built by name.
        costs: seconds of its actions and sends.

    Raises:
        PlanError: the schedule deadlocks.
    """
    costs.check(schedule)
    state = _MakespanState(schedule, costs)
    runnable_ranks = deque(range(schedule.ranks))
    while runnable_ranks:
        runnable_ranks.extend(state.advance(runnable_ranks.popleft()))
    if any(next_action < len(row) for next_action, row in zip(state.next_action, schedule.actions)):
        return simulate(schedule, costs).makespan_s
    return max(state.free_s)


class _MakespanState:
    """Progress of each rank, and the end time of each result."""

    def __init__(self, schedule: Schedule, costs: ActionCosts) -> None:
        self.schedule, self.costs = schedule, costs
        self.next_action = [0] * schedule.ranks
        self.free_s = [0.0] * schedule.ranks
        forwards = schedule.stages * schedule.microbatches
        self.result_end_s = [NOT_RUN] * (2 * forwards)
        self.waiting_rank = [-1] * (2 * forwards)
        self.facts = {
            (kind, stage): self._action_facts(kind, stage, forwards)
            for kind in KINDS
            for stage in range(schedule.stages)
        }

    def _action_facts(self, kind: ActionKind, stage: int, forwards: int) -> tuple[float, int, int, float]:
        """Returns (seconds of an action, its result, the result that it waits for, seconds of that one's send).

        Results are numbers for micro-batch 0; -1 for none.
        """
        schedule, costs, is_forward = self.schedule, self.costs, kind is ActionKind.FORWARD
        action_s = costs.of(Action(stage, kind, 0))
        result = stage * schedule.microbatches + (0 if is_forward else forwards)
        source_stage = stage - 1 if is_forward else stage + 1
        if kind is ActionKind.WEIGHT:
            return action_s, -1, -1, 0.0
        if not 0 <= source_stage < schedule.stages:
            return action_s, result, -1, 0.0
        needed_result = result - schedule.microbatches if is_forward else result + schedule.microbatches
        send_s = costs.between(schedule.placement[source_stage], schedule.placement[stage])
        return action_s, result, needed_result, send_s

    def advance(self, rank: int) -> list[int]:
        """Runs a rank until it must wait; returns the ranks that waited for what it computed."""
        # Local names: this loop is the search's hot path.
        row, result_end_s = self.schedule.actions[rank], self.result_end_s
        waiting_rank, facts = self.waiting_rank, self.facts
        free_s, next_action, unblocked_ranks = self.free_s[rank], self.next_action[rank], []
        for action in row[next_action:]:
            if action.pair is not None:
                end_s, missing_result = self._run_pair(action, free_s)
            else:
                action_s, result, needed_result, send_s = facts[action.kind, action.stage]
                ready_s, missing_result = 0.0, -1
                if needed_result >= 0:
                    ready_s = result_end_s[needed_result + action.microbatch]
                    missing_result = needed_result + action.microbatch if ready_s < 0 else -1
                end_s = max(free_s, ready_s + send_s) + action_s
            if missing_result >= 0:
                waiting_rank[missing_result] = rank
                break
            next_action, free_s = next_action + 1, end_s
            for single in (action,) if action.pair is None else action.pair:
                result = facts[single.kind, single.stage][1]
                if result >= 0:
                    result_end_s[result + single.microbatch] = end_s
                    if waiting_rank[result + single.microbatch] >= 0:
                        unblocked_ranks.append(waiting_rank[result + single.microbatch])
                        waiting_rank[result + single.microbatch] = -1
        self.next_action[rank], self.free_s[rank] = next_action, free_s
        return unblocked_ranks

    def _run_pair(self, action: Action, start_s: float) -> tuple[float, int]:
        """Returns (end of a pair that starts at ``start_s`` or later, a result that it still waits for or -1)."""
        results = {self.facts[single.kind, single.stage][1] + single.microbatch for single in action.parts}
        for single in action.parts:
            _, _, needed_result, send_s = self.facts[single.kind, single.stage]
            if needed_result >= 0 and needed_result + single.microbatch not in results:
                ready_s = self.result_end_s[needed_result + single.microbatch]
                if ready_s < 0:
                    return 0.0, needed_result + single.microbatch
                start_s = max(start_s, ready_s + send_s)
        return start_s + self.costs.of(action), -1
