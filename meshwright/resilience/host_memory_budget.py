"""The host memory that a node may spend on copies of the state, so that they never cause an out-of-memory kill."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from meshwright.control_groups import available_bytes
from meshwright.spec.axis import Holds
from meshwright.spec.groups import row_axes
from meshwright.spec.plan import Plan

SHARE = 0.5
"""Share of the available memory that copies may use."""
SNAPSHOTS_PER_RANK = 2
"""Snapshots of each rank, written in turn, so that one is complete at any moment."""
SNAPSHOTS_PER_RANK_AND_PEERS = 3
"""Snapshots of each rank on its own node over several nodes: the one that the peer also has must survive the writing of
the next (`train.memory.RecoveryMemory.peer_copies`)."""
_TABLE_BYTES = 1 << 28
"""Upper bound of a snapshot's tables and buffers, which the plan doesn't count."""


class HostMemoryBudget(NamedTuple):
    """Which copies fit into this node's memory."""

    snapshots: bool
    """Whether the `SNAPSHOTS_PER_RANK` snapshots of each rank fit."""
    disk: bool
    """Whether the copy fits from which checkpoints are written beside the training."""
    state_bytes: int
    """Bytes of one copy of the state of this node's ranks."""
    available_bytes: int
    """Memory that is available now."""


def state_bytes(plan: Plan, ranks: int) -> int:
    """Returns the bytes of one copy of the state of ``ranks`` ranks; replicated state is stored once."""
    # The plan's figures are per rank, as sharded by the layout; replicas hold the same bytes and share a copy.
    memory, replicas = plan.prediction.memory, max(1, _replicas(plan))
    total_bytes = sum(memory.get(kind, 0) for kind in ("parameters", "optimizer"))
    # Each island stores weights and moments of its own; all together store the outer weights and momentum once.
    outer_bytes = memory.get("outer", 0) * ranks // (replicas * plan.layout.islands)
    return total_bytes * ranks // replicas + outer_bytes


def _replicas(plan: Plan) -> int:
    """Returns the number of ranks that hold the same state and read other rows."""
    return math.prod(plan.layout.degree(name) for name in row_axes(Holds.COPY))


def max_snapshot_bytes(plan: Plan) -> int:
    """Returns an upper bound of a rank's snapshot in bytes; larger ones from other nodes are refused.

    It is several times a rank's average, because tensors are stored undivided, and tables and buffers are added.
    """
    return 4 * state_bytes(plan, _replicas(plan)) + _TABLE_BYTES


def _memory_after_offload(plan: Plan, ranks: int, available: int) -> int:
    """Returns the bytes that remain after ``ranks`` ranks have offloaded their state to host memory."""
    return max(0, available - plan.prediction.host * ranks)


def peer_snapshots_per_rank(peers: int) -> int:
    """Returns how many snapshots of a rank each of ``peers`` other nodes holds.

    A peer may be receiving a rank's next snapshot while another rank's last one is still in transit. With one peer the
    ranks' own nodes hold the missing ones; with more, two nodes may be lost at once, and the peers must hold them.
    """
    return SNAPSHOTS_PER_RANK if peers == 1 else SNAPSHOTS_PER_RANK_AND_PEERS


def copies_fit(plan: Plan, ranks: Sequence[int], available: Sequence[int], disk: int = 0, peers: int = 1) -> bool:
    """Returns whether snapshots fit on every node of a ring, each holding its own and those of ``peers`` nodes before.

    Args:
        plan: of the run.
        ranks: of each node, in the order of the ring.
        available: bytes that each node can give.
        disk: copies more of its own ranks, from which checkpoints are written.
        peers: nodes before whose copies each holds, fewer than there are nodes.
    """
    alone = len(ranks) == 1

    def snapshots_on(position: int) -> int:
        # Without peers only this node's snapshots, and the copy for the disk.
        if alone:
            return (disk + SNAPSHOTS_PER_RANK) * ranks[position]
        # The ring wraps around: negative indices are the last nodes.
        peer_ranks = sum(ranks[position - offset] for offset in range(1, peers + 1))
        return (disk + SNAPSHOTS_PER_RANK_AND_PEERS) * ranks[position] + peer_snapshots_per_rank(peers) * peer_ranks

    return all(
        state_bytes(plan, snapshots_on(position)) <= SHARE * _memory_after_offload(plan, rank_count, available_here)
        for position, (rank_count, available_here) in enumerate(zip(ranks, available))
    )


def fit_local_copies(plan: Plan, ranks: int, available: int | None = None) -> HostMemoryBudget:
    """Returns which copies fit: the snapshots and the copy for the disk, the latter alone, or none.

    Args:
        plan: of the run.
        ranks: how many of its ranks run on this node.
        available: bytes; what the node has now when None.
    """
    available_here, copy_bytes = available_bytes() if available is None else available, state_bytes(plan, ranks)
    budget_bytes = SHARE * _memory_after_offload(plan, ranks, available_here)
    return HostMemoryBudget(
        (SNAPSHOTS_PER_RANK + 1) * copy_bytes <= budget_bytes, copy_bytes <= budget_bytes, copy_bytes, available_here
    )
