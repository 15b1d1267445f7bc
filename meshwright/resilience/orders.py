"""A generation's order, composed from the nodes' reports: which node runs which ranks, and which state they restore."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from meshwright.checkpoint.remote import complete_steps
from meshwright.resilience.host_memory_budget import copies_fit, fit_local_copies, state_bytes
from meshwright.resilience.messages import CopyPlan, Device, NodeReport, NodeShare, Order, StateLocation
from meshwright.spec.plan import Plan
from meshwright.train.config import RecoveryConfig
from meshwright.train.copies import SHARE

LINK_BYTES_S = 1.25e9
"""Assumed rate of a network interface that reports none: 10 Gbit/s."""
_COPY_BYTES_S = 2e9
"""Bytes a second of a snapshot, copy and checksum, as the slowest machines give them."""
_COMPARE_BYTES_S = 8e9
"""Bytes a second of a checksum's sums: memory's own speed, of one core."""
_STALL_SHARE = 0.01
_MOST_STEPS = 100
Reports = Mapping[int, NodeReport]
"""The last report of each connected node, by node."""
StateKey = tuple[int, int]
"""Step and generation of a state in memory."""


def choose_snapshot_interval(plan: Plan, wanted: int | None, send_s: float = 0.0) -> int:
    """Returns the steps between snapshots: as configured, or so that they cost about 1 % of the planned step time.

    Args:
        plan: of the run.
        wanted: the user's setting; None chooses by cost.
        send_s: seconds to send a snapshot to another node; it should arrive before the next one.
    """
    if wanted is not None:
        return wanted
    step_s = plan.prediction.step_s
    if not step_s:
        return 10
    # A snapshot blocks the step for its copy: amortise that over steps to `_STALL_SHARE`.
    snapshot_s = state_bytes(plan, 1) / _COPY_BYTES_S
    # State that several ranks hold is compared before each snapshot, at a share of its own (`train.copies.SHARE`).
    compare_s = sum(plan.prediction.memory.get(kind, 0) for kind in ("parameters", "optimizer")) / _COMPARE_BYTES_S
    steps = max(snapshot_s / _STALL_SHARE, compare_s / SHARE if plan.ranks > 1 else 0.0) / step_s
    # The send time is no cost, but a snapshot should arrive before the next one is due.
    return max(1, min(_MOST_STEPS, round(steps + 0.5)), math.ceil(send_s / step_s))


def assign_ranks(reports: Reports, devices: Sequence[Device]) -> tuple[NodeShare, ...]:
    """Returns each node's share of the ranks.

    Args:
        reports: of the connected nodes.
        devices: node and device of each rank, ordered by node.
    """
    shares = []
    for node in dict.fromkeys(node for node, _ in devices):
        slots = tuple(slot for owner, slot in devices if owner == node)
        first_rank = next(rank for rank, (owner, _) in enumerate(devices) if owner == node)
        courier, disk = reports[node].address("courier"), reports[node].address("disk")
        shares.append(NodeShare(node=node, first_rank=first_rank, slots=slots, courier=courier, disk=disk))
    return tuple(shares)


def counts_after_loss(order: Order, minimum: int) -> list[int]:
    """Returns the numbers of ranks, from ``minimum`` on, that the loss of one rank, two or a node would leave."""
    losses = {1, 2, *(len(share.slots) for share in order.shares)}
    return [order.world - loss for loss in sorted(losses) if order.world - loss >= minimum]


def complete_states(reports: Reports, refused: Collection[StateKey] = (), floor: int = -1) -> list[StateKey]:
    """Returns the states in memory of which every rank's snapshot is on some node, newest first.

    Args:
        reports: of the connected nodes.
        refused: states that turned out damaged.
        floor: newest generation whose states don't count, because the run was rewound from them.
    """
    records = [record for report in reports.values() for record in report.snapshots]
    return [key for key in complete_steps(records) if key not in refused and key[1] > floor]


def states_after(reports: Reports, step: int) -> set[StateKey]:
    """Returns the states after a step of which any node has a snapshot: missing nodes may complete them later."""
    records = [record for report in reports.values() for record in report.snapshots]
    return {(record.step, record.generation) for record in records if record.step > step}


def choose_state(
    reports: Reports, refused: Collection[StateKey], disk_step: int, floor: int = -1
) -> StateLocation | None:
    """Returns where the newest complete state lies; None where the checkpoint of ``disk_step`` is newer.

    Args:
        reports: of the connected nodes.
        refused: states that turned out damaged.
        disk_step: step of the newest checkpoint; -1 for none.
        floor: newest generation whose states don't count.
    """
    complete = complete_states(reports, refused, floor)
    if not complete or disk_step > complete[0][0]:
        return None
    step, generation = complete[0]
    holders: dict[int, int] = {}
    local_ranks: set[int] = set()
    copies: Counter[int] = Counter()
    for node in sorted(reports):
        records = [record for record in reports[node].snapshots if (record.step, record.generation) == complete[0]]
        local_ranks |= {record.rank for record in records if record.is_local}
        for rank in {record.rank for record in records}:
            holders.setdefault(rank, node)
            copies[rank] += 1
    # Event detail: every snapshot by its own node's ranks, or some from peers' copies.
    return StateLocation(
        step=step,
        generation=generation,
        holders=holders,
        tier="memory" if len(local_ranks) == len(holders) else "peer",
        single_copies=tuple(sorted(rank for rank, count in copies.items() if count == 1)),
    )


def plan_copies(plan: Plan, shares: Sequence[NodeShare], reports: Reports, config: RecoveryConfig) -> CopyPlan:
    """Returns which copies of the state fit into the nodes' memory.

    Args:
        plan: of the run.
        shares: of the nodes with ranks, in the order of the ring.
        reports: of the connected nodes.
        config: steps between snapshots (None chooses by cost) and the number of copies on other nodes.
    """
    ranks = [len(share.slots) for share in shares]
    available = [reports[share.node].available_bytes for share in shares]
    wanted_peers = min(config.copies, len(shares) - 1)
    # Prefer as many copies as configured, then fewer, before giving up snapshots.
    peers = next((number for number in range(wanted_peers, 0, -1) if copies_fit(plan, ranks, available, 0, number)), 0)
    # Over several nodes a snapshot that no other node holds would be lost with its node.
    fits = peers > 0 or (wanted_peers == 0 and copies_fit(plan, ranks, available))
    link = min(reports[share.node].link_bytes_s or LINK_BYTES_S for share in shares)
    every = (
        choose_snapshot_interval(plan, config.snapshot_every, peers * state_bytes(plan, max(ranks)) / link)
        if fits
        else 0
    )
    return CopyPlan(every=every, disk=copies_fit(plan, ranks, available, 1, max(1, peers)), peers=peers)


def plan_local_copies(plan: Plan, report: NodeReport, config: RecoveryConfig) -> tuple[CopyPlan, dict[str, Any] | None]:
    """Returns which copies fit on a run's only node, and the event that reports missing snapshots; None when they fit.

    Args:
        plan: of the run.
        report: of the node.
        config: steps between snapshots; None chooses by cost.
    """
    room = fit_local_copies(plan, plan.ranks, report.available_bytes)
    if room.snapshots:
        return CopyPlan(every=choose_snapshot_interval(plan, config.snapshot_every), disk=room.disk), None
    sizes = {"state_bytes": room.state_bytes, "available_bytes": room.available_bytes}
    return CopyPlan(every=0, disk=room.disk), {"kind": "snapshots_off", **sizes, "from_disk_only": True}


def describe_shortage(order: Order, config: RecoveryConfig) -> dict[str, Any] | None:
    """Returns the event that reports snapshots or copies left out for lack of memory; None when all fit.

    Args:
        order: of a run over several nodes.
        config: the run's settings, as for `plan_copies`.
    """
    nodes = order.nodes
    if not order.copies.every:
        return {"kind": "snapshots_off", "nodes": nodes, "from_disk_only": True} if config.snapshot_every != 0 else None
    if order.copies.peers < min(config.copies, len(nodes) - 1):
        return {"kind": "copies_reduced", "nodes": nodes, "copies": order.copies.peers, "wanted": config.copies}
    return None


def ranks_to_copy(order: Order, node: int) -> dict[int, int]:
    """Returns the ranks of the old layout whose snapshots a node should copy, each with its only holder.

    The nodes that follow the holder in the ring copy, as for regular snapshots.

    Args:
        order: the leader's.
        node: the node that would copy.
    """
    if order.state is None or not order.peers:
        return {}
    holders = {rank: order.state.holders[rank] for rank in order.state.single_copies}
    return {
        rank: holder
        for rank, holder in holders.items()
        if node != holder and node in [share.node for share in order.neighbours(holder, 1, order.peers)]
    }
