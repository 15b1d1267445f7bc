"""Simulates one schedule at the costs of many layouts at once: what starts together is a row of arrays.

An action starts when its rank is free and its inputs are there: max-plus arithmetic over a fixed graph. The graph is
compiled once for a schedule, in levels of which no action waits for another, and is then evaluated for N sets of costs.

Beside the actions of `schedules.simulate` it books what a rank sends: results leave it one after the other, in the
order of its actions, beside what it computes. Before a stage's first forward its weights are gathered, in the order
in which the rank's stages begin; after its last backward its gradients are summed, before the rank goes on.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import PlanError
from meshwright.schedules.action import Action, ActionKind, Schedule

Array = NDArray[Any]
"""float64 of seconds, or int64 of indices."""
COMPUTE_KINDS = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT, ActionKind.WEIGHT)
"""Kinds of computation in the order of their rows of costs."""
_REDUCE = len(COMPUTE_KINDS)
"""Which block of rows has the sums of gradients."""
_SEND_FORWARD, _SEND_BACKWARD = _REDUCE + 1, _REDUCE + 2


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSeconds:
    """Seconds of N layouts' stages, S of them on P ranks; all float64."""

    forward: Array
    """(S, N), of a micro-batch."""
    backward: Array
    """(S, N), of both halves together."""
    weight: Array
    """(S, N), of the second half where a schedule splits it; at most ``backward``."""
    split_action: Array
    """(N,), what a backward in halves takes more, once for each second half."""
    send_forward: Array
    """(S, N), of a stage's result to the next stage; 0 where that is on the same rank, and of the last stage."""
    send_backward: Array
    """(S, N), of a stage's input gradient to the stage before; 0 where that is on the same rank, and of the first."""
    gather: Array
    """(S, N), of a stage's weights before its first forward."""
    reduce: Array
    """(S, N), of a stage's gradients after its last backward, during which its rank computes nothing."""
    late_reduce: Array
    """(P, N), of a rank's gradients after all of its actions."""

    def without_sends(self) -> StageSeconds:
        """Returns the same with results that are there at once."""
        free = np.zeros_like(self.send_forward)
        return dataclasses.replace(self, send_forward=free, send_backward=free)


class _TimedNode(NamedTuple):
    """An action, a sum of gradients, or the end of a rank."""

    level: int
    """Nodes of one level wait for none of each other."""
    before: int
    """Number of its rank's node before; -1 for the first."""
    inputs: tuple[tuple[int, bool], ...]
    """(node, whether by a send) that it waits for, two of an overlapped pair; -1 for none."""
    gather: int
    """Stage whose weights must be gathered; -1 for none."""
    rows: tuple[int, ...]
    """Rows of costs of what it computes: one, or two of a pair."""
    sends: tuple[int, ...]
    """Rows of costs of what it sends."""
    send_before: int
    """Its rank's last node before that sends; -1 for none."""


class _Compiler:
    """Orders a schedule's actions by levels."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._placement = schedule, schedule.placement
        self._unfinished = [schedule.microbatches] * schedule.stages
        self.nodes: list[_TimedNode] = []
        self._result: dict[tuple[bool, int, int], int] = {}
        self._waiting: dict[tuple[bool, int, int], int] = {}
        self._next = [0] * schedule.ranks
        self._last_node, self._last_send = [-1] * schedule.ranks, [-1] * schedule.ranks
        self._begun: set[int] = set()
        self.first_stages: list[list[int]] = [[] for _ in range(schedule.ranks)]
        self.ends: list[int] = []

    def run(self) -> None:
        """Visits every action after its inputs.

        Raises:
            PlanError: the schedule deadlocks.
        """
        runnable = deque(range(self._schedule.ranks))
        while runnable:
            runnable.extend(self._advance(runnable.popleft()))
        if len(self.ends) < self._schedule.ranks:
            raise PlanError(
                f"schedule {self._schedule.name} deadlocks; `python -m meshwright.schedules --draw` names it"
            )

    def _advance(self, rank: int) -> list[int]:
        """Runs a rank until it waits; returns the ranks that waited for what it computed."""
        row, unblocked = self._schedule.actions[rank], list[int]()
        for action in row[self._next[rank] :]:
            inputs = []
            for single in action.parts:
                needed = self._input_of(single, action)
                if needed is None:
                    continue
                node = self._result.get(needed)
                if node is None:
                    self._waiting[needed] = rank
                    return unblocked
                inputs.append((node, self._placement[needed[1]] != rank))
            unblocked += self._add_action(rank, action, tuple(inputs))
            self._next[rank] += 1
        self.ends.append(self._add(rank, ((self._last_send[rank], True),), -1, (self._late_row(rank),), ()))
        return unblocked

    def _late_row(self, rank: int) -> int:
        return (_SEND_BACKWARD + 1) * self._schedule.stages + rank

    def _input_of(self, single: Action, action: Action) -> tuple[bool, int, int] | None:
        """Returns the result of another stage that an action waits for."""
        if single.kind is ActionKind.WEIGHT:
            return None
        is_forward = single.kind is ActionKind.FORWARD
        source = single.stage - 1 if is_forward else single.stage + 1
        if not 0 <= source < self._schedule.stages:
            return None
        if any(other.stage == source and other.microbatch == single.microbatch for other in action.parts):
            return None
        return is_forward, source, single.microbatch

    def _add_action(self, rank: int, action: Action, inputs: tuple[tuple[int, bool], ...]) -> list[int]:
        stages, gather, sends, finished = self._schedule.stages, -1, [], []
        rows = []
        for single in action.parts:
            rows.append(COMPUTE_KINDS.index(single.kind) * stages + single.stage)
            if single.kind is ActionKind.FORWARD and single.stage not in self._begun:
                self._begun.add(single.stage)
                self.first_stages[rank].append(single.stage)
                gather = single.stage
            if single.kind is not ActionKind.WEIGHT:
                is_forward = single.kind is ActionKind.FORWARD
                target = single.stage + (1 if is_forward else -1)
                if 0 <= target < stages and self._placement[target] != rank:
                    sends.append((_SEND_FORWARD if is_forward else _SEND_BACKWARD) * stages + single.stage)
            if single.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT):
                self._unfinished[single.stage] -= 1
                if not self._unfinished[single.stage]:
                    finished.append(single.stage)
        node = self._add(rank, inputs, gather, tuple(rows), tuple(sends))
        for stage in finished:
            self._add(rank, ((self._last_send[rank], True),), -1, (_REDUCE * stages + stage,), ())
        unblocked = []
        for single in action.parts:
            if single.kind is not ActionKind.WEIGHT:
                key = (single.kind is ActionKind.FORWARD, single.stage, single.microbatch)
                self._result[key] = node
                if key in self._waiting:
                    unblocked.append(self._waiting.pop(key))
        return unblocked

    def _add(
        self,
        rank: int,
        inputs: tuple[tuple[int, bool], ...],
        gather: int,
        rows: tuple[int, ...],
        sends: tuple[int, ...],
    ) -> int:
        before, nodes = self._last_node[rank], self.nodes
        level = max((nodes[node].level + 1 for node in (before, *(node for node, _ in inputs)) if node >= 0), default=0)
        number = len(nodes)
        nodes.append(_TimedNode(level, before, inputs, gather, rows, sends, self._last_send[rank] if sends else -1))
        self._last_node[rank] = number
        if sends:
            self._last_send[rank] = number
        return number


class ArraySchedule:
    """A schedule, compiled to be evaluated at many costs.

    Rows of values: zeros, the gathers of S stages, the end of each node, and when what it sends has arrived.

    Args:
        schedule: complete, as those that are built by name.

    Raises:
        PlanError: the schedule deadlocks.
    """

    def __init__(self, schedule: Schedule) -> None:
        compiler = _Compiler(schedule)
        compiler.run()
        self.stages, self.ranks, self._first_stages = schedule.stages, schedule.ranks, compiler.first_stages
        nodes = compiler.nodes
        levels = np.array([node.level for node in nodes])
        order = np.argsort(levels, kind="stable")
        place = np.empty(len(nodes) + 1, dtype=np.int64)
        place[order] = np.arange(len(nodes))
        self._count, first = len(nodes), 1 + self.stages
        none_row = (_SEND_BACKWARD + 1) * self.stages + self.ranks

        def value_row(node: int, sent: bool) -> int:
            return int(place[node]) + first + (self._count if sent else 0) if node >= 0 else 0

        before, inputs, second_inputs, gathers, rows, second_rows = ([] for _ in range(6))
        sends, second_sends, sends_before = [], [], []
        for index in order.tolist():
            node = nodes[index]
            before.append(value_row(node.before, False))
            values = [*(value_row(*item) for item in node.inputs), 0, 0]
            inputs.append(values[0])
            second_inputs.append(values[1])
            gathers.append(1 + node.gather if node.gather >= 0 else 0)
            rows.append(node.rows[0])
            second_rows.append(node.rows[1] if len(node.rows) > 1 else none_row)
            sends.append(node.sends[0] if node.sends else none_row)
            second_sends.append(node.sends[1] if len(node.sends) > 1 else none_row)
            sends_before.append(value_row(node.send_before, True))
        bounds = [0, *(np.flatnonzero(np.diff(levels[order])) + 1).tolist(), self._count]
        self._has_pairs = any(row != none_row for row in second_rows)
        columns = [before, inputs, second_inputs, gathers, rows, second_rows, sends, second_sends, sends_before]
        arrays = [np.array(column, dtype=np.int64) for column in columns]
        self._bounds, self._columns = bounds, arrays
        self._ends = np.array([value_row(node, False) for node in compiler.ends])

    def makespan_s(self, seconds: StageSeconds) -> Array:
        """Returns seconds from the start of the step to the last end of all ranks, (N,).

        Args:
            seconds: of N layouts' stages.
        """
        layouts = seconds.forward.shape[1]
        halves = (seconds.backward - seconds.weight, seconds.weight + seconds.split_action)
        blocks = (seconds.forward, seconds.backward, *halves, seconds.reduce, seconds.send_forward,
                  seconds.send_backward, seconds.late_reduce, np.zeros((1, layouts)))  # fmt: skip
        costs = np.concatenate(blocks)
        first = 1 + self.stages
        values = np.zeros((first + 2 * self._count, layouts))
        for stages in self._first_stages:
            values[[1 + stage for stage in stages]] = np.cumsum(seconds.gather[stages], axis=0)
        arrivals = first + self._count
        for start, stop in pairwise(self._bounds):
            columns = [column[start:stop] for column in self._columns]
            before, one, other, gather, row, second_row, send, second_send, send_before = columns
            # The rank before it, its inputs, and the weights that are gathered.
            begin = np.maximum(np.maximum(values[before], values[one]), values[gather])
            if self._has_pairs:
                begin = np.maximum(begin, values[other])
            end = begin + costs[row]
            if self._has_pairs:
                end += costs[second_row]
            values[first + start : first + stop] = end
            arrived = np.maximum(end, values[send_before]) + costs[send]
            if self._has_pairs:
                arrived += costs[second_send]
            values[arrivals + start : arrivals + stop] = arrived
        return np.asarray(values[self._ends].max(axis=0))
