"""Whether this node has memory for copies of the state: they must never be what makes the kernel kill a rank."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from meshwright.spec.axis import Holds
from meshwright.spec.groups import row_axes
from meshwright.spec.plan import Plan

SHARE = 0.5
"""Share of the memory that is available now which copies may take."""
COPIES = 2
"""Snapshots of each rank that are held, so that one is whole at any moment."""
NODE_COPIES = 3
"""Over several nodes, where the rank is: one that the next node has too outlives the next (`Memory.copied`)."""
_TABLE_BYTES = 1 << 28
"""Of a snapshot's tables and of buffers, which the plan doesn't count, at most."""


class HostMemoryBudget(NamedTuple):
    """Which copies fit into this node's memory."""

    snapshots: bool
    """Whether the two fit that ranks write in turn."""
    disk: bool
    """Whether the one fits from which checkpoints are written beside the training."""
    state_bytes: int
    """Bytes of one copy of what this node's ranks keep."""
    available_bytes: int
    """Memory that is available now."""


def state_bytes(plan: Plan, ranks: int) -> int:
    """Returns the bytes that ``ranks`` of the plan's ranks keep in one copy: copies of a part are kept once."""
    held = sum(plan.prediction.memory.get(part, 0) for part in ("parameters", "optimizer"))
    return held * ranks // _copies(plan)


def _copies(plan: Plan) -> int:
    """Ranks that hold the same part and read other rows."""
    return math.prod(plan.layout.degree(name) for name in row_axes(Holds.COPY))


def largest_snapshot(plan: Plan) -> int:
    """Returns the bytes above which what another node sends is no snapshot of one of the plan's ranks.

    Several times what a rank keeps on average: parts are whole, and tables and buffers come on top.
    """
    return 4 * state_bytes(plan, _copies(plan)) + _TABLE_BYTES


def _left(plan: Plan, ranks: int, available: int) -> int:
    """Bytes that are left once ``ranks`` of the plan's ranks have put there what they offload."""
    return max(0, available - plan.prediction.host * ranks)


def available_bytes() -> int:
    """Returns the memory that this node can give without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def held_for_others(peers: int) -> int:
    """Returns how many snapshots of a rank each of ``peers`` other nodes holds.

    One may have begun to take in the next while another rank's last is still on its way. Where the ranks' own nodes are
    there, these have what is missing then; where two of them may be gone at once, those that hold copies must.
    """
    return COPIES if peers == 1 else NODE_COPIES


def nodes_have_room(plan: Plan, ranks: Sequence[int], available: Sequence[int], disk: int = 0, peers: int = 1) -> bool:
    """Says whether snapshots fit where each node of a ring holds its own ranks' and copies of those before.

    Args:
        plan: of the run.
        ranks: of each node, in the order of the ring.
        available: bytes that each node can give.
        disk: copies more of its own ranks, from which checkpoints are written.
        peers: nodes before whose copies each holds, fewer than there are nodes.
    """
    alone = len(ranks) == 1

    def need(at: int) -> int:
        if alone:
            return (disk + COPIES) * ranks[at]
        before = sum(ranks[at - back] for back in range(1, peers + 1))
        return (disk + NODE_COPIES) * ranks[at] + held_for_others(peers) * before

    return all(
        state_bytes(plan, need(at)) <= SHARE * _left(plan, own, room)
        for at, (own, room) in enumerate(zip(ranks, available))
    )


def room_for(plan: Plan, ranks: int, available: int | None = None) -> HostMemoryBudget:
    """Says which copies fit: the snapshots and the one for the disk, the latter alone, or none.

    Args:
        plan: of the run.
        ranks: how many of its ranks run on this node.
        available: bytes; what the node has now when None.
    """
    room, one = available_bytes() if available is None else available, state_bytes(plan, ranks)
    most = SHARE * _left(plan, ranks, room)
    return HostMemoryBudget((COPIES + 1) * one <= most, one <= most, one, room)
