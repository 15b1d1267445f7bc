"""A true lower bound on the time of a simulated pipeline, from the sums over its ranks: arrays over N layouts.

The bounds are those of any order of actions in which a rank computes one at a time. Stages pass results on, so a rank
waits for the first forward of the ranks before it, and after its last backward theirs follow. Every link carries its
bytes one after the other. For equal stages and free sends the bound of 1F1B, interleaved 1F1B and ZB-H1 is their time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from meshwright.array_types import Values
from meshwright.planner.cost.groups import WireTime
from meshwright.planner.cost.layout_batch import Array, LayoutBatch, splits_backward
from meshwright.planner.cost.stages import StageCut
from meshwright.planner.cost.timing import makespan

MAX_SIMULATED_ACTIONS = 16384
"""Most forwards and backwards that are simulated of a layout: a tenth of a second."""
FILLING_ROUNDS = 3
"""Rounds of as many micro-batches as ranks that are simulated: two fill every schedule, and one shows the pace."""


@dataclass(frozen=True, slots=True)
class SendCounts:
    """Sends of a micro-batch, forward and backward together, inside nodes and between them."""

    crosses: tuple[bool, ...]
    """Of each stage but the last: whether its result leaves the node; False where it stays on the rank."""
    moves: tuple[bool, ...]
    """Of each stage but the last: whether its result leaves the rank."""
    inside: Array
    """(P,), that a rank sends to one of its node."""
    outside: Array
    """(P,), that a rank sends to another node."""
    stage_inside: Array
    """(S,), that a stage sends to a rank of its node: as many as it gets from there."""
    stage_outside: Array
    """(S,), that a stage sends to another node."""
    busiest_node: float
    """Sends over the network of the node that has most."""


@lru_cache(maxsize=1024)
def count_sends(owners: tuple[int, ...], ranks: int, stage_ranks: float, devices: int) -> SendCounts:
    """Returns the sends of a micro-batch.

    Args:
        owners: rank along pp of each stage.
        ranks: P.
        stage_ranks: ranks of a stage, in a row.
        devices: of a node.
    """

    def nodes(rank: int) -> set[int]:
        return {int(rank * stage_ranks // devices), int(((rank + 1) * stage_ranks - 1) // devices)}

    moves = [sender != receiver for sender, receiver in pairwise(owners)]
    crosses = [
        moved and (2 * stage_ranks > devices or len(nodes(sender) | nodes(receiver)) > 1)
        for moved, (sender, receiver) in zip(moves, pairwise(owners))
    ]
    stage_inside, stage_outside = np.zeros(len(owners)), np.zeros(len(owners))
    for stage, (moved, crossed) in enumerate(zip(moves, crosses)):
        # The one sends the result, the next its gradient.
        (stage_outside if crossed else stage_inside)[stage : stage + 2] += moved
    inside, outside = (np.bincount(owners, weights, ranks) for weights in (stage_inside, stage_outside))
    by_node: dict[int, float] = {}
    for rank in range(ranks):
        node = int(rank * stage_ranks // devices)
        by_node[node] = by_node.get(node, 0.0) + float(outside[rank])
    for array in (inside, outside, stage_inside, stage_outside):
        array.flags.writeable = False
    return SendCounts(tuple(crosses), tuple(moves), inside, outside, stage_inside, stage_outside, max(by_node.values()))


def sends_of_cut(ranks: Any, cut: StageCut) -> SendCounts:
    """Returns the sends of a micro-batch under a cut of a `RankTimes` or `UnequalRankTimes`."""
    stage_ranks = float(ranks.layouts.world[0] / ranks.layouts.pp[0])
    return count_sends(cut.owners, ranks.ranks, stage_ranks, ranks.model.machine.fabric.devices)


class PipelineFloor:
    """Bounds on the seconds of N layouts' pipelines of P ranks each.

    Args:
        ranks: a `RankTimes` or `UnequalRankTimes` of the layouts.
        gather: of a rank's weights at the start of a step, (N, P).
        reduce: of a rank's gradients at its end, (N, P).
    """

    def __init__(self, ranks: Any, gather: WireTime, reduce: WireTime) -> None:
        self._ranks, self._layouts = ranks, ranks.layouts
        self._gather, self._reduce = gather, reduce
        self._microbatches = self._layouts.microbatches[:, None]
        self._splits = splits_backward(self._layouts.schedule)[:, None] & bool(ranks.job.splits_backward)
        # As `Layout.pipeline` runs it: whole under recompute, and where weight gradients hide tp's traffic.
        is_whole = (self._layouts.recompute > 0) | (self._layouts.tp_overlap > 0)
        self._splits = self._splits & ~is_whole[:, None]
        self._forward, self._backward = ranks.compute_forward, ranks.compute_backward
        # What no other rank waits for comes after the inputs' gradients where a schedule splits the backward.
        weight = np.minimum(ranks.weight, self._backward) * self._splits
        self._input = self._backward - weight
        self._sends = [sends_of_cut(ranks, cut) for cut in ranks.cuts]
        self._of_layout = np.broadcast_to(ranks.cut_index, ranks.count)
        first_forward, first_backward, share = ranks.first_stages
        self._in_order = np.array([cut.owners[: ranks.ranks] == tuple(range(ranks.ranks)) for cut in ranks.cuts])
        self._in_order = self._in_order[self._of_layout][:, None]
        self._first_forward, self._first_backward = first_forward * self._in_order, first_backward * self._in_order
        self._first_backward = np.maximum(self._first_backward - weight, 0.0)
        self._first_gather = share * np.asarray(gather.seconds)
        # Copies' sums follow on all of a rank's actions; of sharded state each stage's on its own last backward.
        last_share = np.where(self._layouts.zero[:, None] > 0, share, 1.0)
        self._last_reduce = last_share * np.asarray(reduce.seconds)

    @property
    def first_gather_s(self) -> Array:
        """Seconds in which a rank gathers the weights of its first stage, (N, P)."""
        return self._first_gather

    def step_s(self) -> Array:
        """Returns the bound on the seconds from the start of the step to the end of all ranks' sums, (N,)."""
        bounds = [self.serial_s(), self.round_trip_s(), *self._wire_s()]
        if self._ranks.engine.runtime.sends_in_turn:
            bounds.append(self.sends_s())
        return np.asarray(np.max(np.stack(bounds), axis=0))

    # ---------------------------------------------------------------- ranks

    @cached_property
    def _hop_s(self) -> Array:
        """Seconds of the sends between the first stages of neighbouring ranks, (N, P - 1)."""
        crosses = np.array([sends.crosses[: self._ranks.ranks - 1] for sends in self._sends])[self._of_layout]
        inside_s, outside_s = self._ranks.hops_s()
        return np.where(crosses, outside_s[:, None], inside_s[:, None]) * self._in_order

    @cached_property
    def _heads_and_tails_s(self) -> tuple[Array, Array]:
        """The least seconds before each rank's first forward, and after its last input gradient, (N, P) each."""
        hop_s = self._hop_s
        head, tail = self._first_gather.copy(), self._last_reduce.copy()
        for rank in range(1, self._ranks.ranks):
            before = slice(rank - 1, rank)
            through_s = head[:, before] + self._first_forward[:, before] + hop_s[:, before]
            head[:, rank] = np.maximum(head[:, rank], through_s[:, 0])
            through_s = tail[:, before] + self._first_backward[:, before] + hop_s[:, before]
            tail[:, rank] = np.maximum(tail[:, rank], through_s[:, 0])
        return head, tail

    def serial_s(self) -> Array:
        """Returns what the busiest rank computes between the others' first forwards and last backwards, (N,)."""
        head, tail = self._heads_and_tails_s
        # Where weights' gradients come later, so may the sums of the rank's other stages.
        earlier_reduce = (np.asarray(self._reduce.seconds) - self._last_reduce) * ~self._splits
        passes = self._microbatches * (self._forward + self._input) + earlier_reduce + tail
        with_weights = self._microbatches * (self._forward + self._backward) + np.asarray(self._reduce.seconds)
        return np.asarray((head + np.maximum(passes, with_weights)).max(axis=1))

    def round_trip_s(self) -> Array:
        """Returns the time of micro-batches that follow one another through all stages and back, (N,).

        A rank holds at most K at once, so each K-th waits for one to return; with one stage a rank, the way begins
        and ends there, and the others only pass it.
        """
        ranks, microbatches = self._ranks, self._layouts.microbatches
        inside_s, outside_s = ranks.hops_s()
        moves = np.array([sum(sends.moves) for sends in self._sends], float)[self._of_layout]
        crosses = np.array([sum(sends.crosses) for sends in self._sends], float)[self._of_layout]
        once_s = (self._forward + self._input).sum(axis=1) + 2.0 * ((moves - crosses) * inside_s + crosses * outside_s)
        last_s = ranks.last_stage_s(self._splits[:, 0])
        bound = self._first_gather[:, 0] * self._in_order[:, 0] + once_s + (microbatches - 1.0) * last_s
        single = (self._layouts.stages == 1) & self._in_order[:, 0]
        if not single.any():
            return np.asarray(bound)
        return np.where(single, np.maximum(bound, self._single_stage_s()), bound)

    def _single_stage_s(self) -> Array:
        """Returns the bound by micro-batches in flight of pipelines with a stage a rank, (N,)."""
        head, tail = self._heads_and_tails_s
        forward, both, in_flight = self._forward, self._forward + self._input, np.maximum(self._ranks.in_flight, 1.0)
        in_flight = np.minimum(np.ceil(in_flight), self._microbatches)
        hop_s = np.concatenate([2.0 * self._hop_s, np.zeros((self._ranks.count, 1))], axis=1)

        def from_here(values: Array) -> Array:
            return np.cumsum(values[:, ::-1], axis=1)[:, ::-1]

        # From the start of a forward to the start of the same micro-batch's backward.
        away_s = from_here(both + hop_s) - self._input
        later = self._microbatches - in_flight
        last_start = (self._microbatches - 1.0) * forward
        steady = away_s + later * both - forward
        last_start = np.where(later >= 1.0, np.maximum(last_start, steady), last_start)
        loops = np.floor((self._microbatches - 1.0) / in_flight)
        looped = loops * (away_s + self._input) + (self._microbatches - 1.0 - loops * in_flight) * forward
        last_start = np.maximum(last_start, looped)
        passed = head + last_start + away_s + self._input + tail
        # Before its first backward a rank has at most K forwards to compute.
        waits = np.maximum(away_s - in_flight * forward, 0.0)
        everything = self._microbatches * (forward + self._backward) + np.asarray(self._reduce.seconds)
        return np.asarray(np.maximum(passed, head + waits + everything).max(axis=1))

    # ---------------------------------------------------------------- links

    def sends_s(self) -> Array:
        """Returns the bound by the sends and receives of each rank, of which it carries one at a time, (N,).

        Before a rank's first send or receive are the first forwards of the ranks before it, for the first rank its own;
        after its last one come their last backwards.
        """
        inside_s, outside_s = self._ranks.stage_sends_s()
        inside, outside = (
            np.stack([getattr(sends, name) for sends in self._sends])[self._of_layout] for name in ("inside", "outside")
        )
        # As many receives as sends.
        carried_s = 2.0 * self._microbatches * (inside * inside_s[:, None] + outside * outside_s[:, None])
        head, tail = self._heads_and_tails_s
        around_s = head + tail
        around_s[:, 1:] -= 2.0 * self._hop_s
        around_s[:, 0] += self._first_forward[:, 0] + self._first_backward[:, 0]
        return np.asarray((carried_s + np.where(self._in_order, around_s, 0.0)).max(axis=1))

    def _wire_s(self) -> list[Array]:
        """Returns the seconds in which a step fills the busiest links inside nodes, and the network, (N,) each."""
        ranks, layouts = self._ranks, self._layouts
        inside_s, outside_s = ranks.stage_sends_s()
        carried = ranks.carried(is_backward=False) + ranks.carried(is_backward=True)
        inside = self._microbatches * carried.inside + self._gather.inside + self._reduce.inside
        outside = self._microbatches * carried.outside + self._gather.outside + self._reduce.outside
        sent_inside = np.stack([sends.inside for sends in self._sends])[self._of_layout]
        sent_outside = np.stack([sends.outside for sends in self._sends])[self._of_layout]
        inside_total = inside + self._microbatches * sent_inside * inside_s[:, None]
        outside_total = outside + self._microbatches * sent_outside * outside_s[:, None]
        # Stages that share a node share its cards.
        fabric = ranks.model.machine.fabric
        stage_ranks = layouts.world / layouts.pp
        filled = np.minimum(1.0, stage_ranks / max(fabric.cards, 1))
        node_sends = np.array([sends.busiest_node for sends in self._sends])[self._of_layout]
        node_s = outside.min(axis=1) + layouts.microbatches * node_sends * outside_s * filled
        return [inside_total.max(axis=1), outside_total.max(axis=1), node_s]


def simulated_actions(ranks: Values, stages_per_rank: Values, microbatches: Values) -> Values:
    """Returns the forwards and backwards that a simulation of a pipeline computes, of numbers or arrays."""
    simulated = np.minimum(microbatches, (2 * FILLING_ROUNDS + 1) * ranks)
    return np.asarray(2 * ranks * stages_per_rank * simulated)


def round_micro_batches(ranks: int, microbatches: int) -> int:
    """Returns the micro-batches of a round: as many as ranks, or a few more where rounds of equal size divide all."""
    rounds = microbatches // ranks
    return microbatches // rounds if rounds and microbatches % rounds == 0 else ranks


def is_long(layouts: LayoutBatch) -> Array:
    """Returns which pipelines have too many actions to be simulated, (N,) bool."""
    actions = simulated_actions(layouts.pp, layouts.stages, layouts.microbatches)
    return np.asarray(actions > MAX_SIMULATED_ACTIONS)


def bound_s(ranks: Any) -> Array:
    """Returns seconds of all micro-batches, (N,), without traffic of data axes: at most those of any sharing.

    Args:
        ranks: a `RankTimes` of N layouts.
    """
    nothing = WireTime(*(np.zeros((ranks.count, ranks.ranks)) for _ in range(3)))
    floor_s = PipelineFloor(ranks, nothing, nothing).step_s()
    closed_s = makespan(ranks.layouts, ranks.forward, ranks.backward, ranks.weight)
    return np.maximum(floor_s, np.where(is_long(ranks.layouts), closed_s, 0.0))


def floor_parts(ranks: Any) -> dict[str, Array]:
    """Returns seconds by part, (N,), up to the end of all ranks' sums of gradients.

    They add up to a lower bound of the simulation (`PipelineFloor`), or to the schedule's formula where its actions are
    too many to be simulated. All but ``bubble`` are the slowest rank's.

    Args:
        ranks: a `RankTimes` or `UnequalRankTimes` of N layouts.
    """
    layouts, (gather, reduce) = ranks.layouts, ranks.pipeline_traffic
    floor, long = PipelineFloor(ranks, gather, reduce), is_long(layouts)
    traffic_s = floor.first_gather_s + np.asarray(reduce.seconds)
    slowest = np.argmax(layouts.microbatches[:, None] * (ranks.forward + ranks.backward) + traffic_s, axis=1)
    parts = dict(ranks.busy_parts(slowest))
    work_s = 2.0 * layouts.microbatches * np.take_along_axis(ranks.send_work_s, slowest[:, None], 1)[:, 0]
    parts["send"] = np.where(long, parts["send"], work_s)
    gather_s, reduce_s = (
        np.take_along_axis(np.broadcast_to(seconds, traffic_s.shape), slowest[:, None], 1)[:, 0]
        for seconds in (floor.first_gather_s, np.asarray(reduce.seconds))
    )
    # What ZeRO-1 and 2 gather belongs to the update before it.
    is_late = (layouts.zero == 1) | (layouts.zero == 2)
    parts["gather"] = np.where(is_late, 0.0, gather_s)
    parts["reduce"] = reduce_s + np.where(is_late, gather_s, 0.0)
    busy_s = sum(parts.values())
    closed_s = makespan(layouts, ranks.forward, ranks.backward, ranks.weight) + gather_s + reduce_s
    step_s = np.maximum(floor.step_s(), np.where(long, np.maximum(closed_s, busy_s), 0.0))
    parts["bubble"] = np.maximum(step_s - busy_s, 0.0)
    return parts
