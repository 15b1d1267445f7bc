"""How many files and sockets a node's processes have open at once: known before the first rank starts.

The ranks after a failure hold what the first held, and the memory that these left: a limit may let a run begin that it
doesn't let go on.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.resilience.host_memory_budget import COPIES, NODE_COPIES, held_for_others
from meshwright.spec.layout import Layout

_SUPERVISOR = 7
"""What a supervisor has open beside memory, pipes and lines: its store's socket, a selector, a planner's pipe, those of
this generation's keeper and the one before's."""
_NODE = 16
"""What one of several nodes has open beside: four listeners, their gates and selectors, ends of helpers."""
_ALONE, _RANK = 30, 40
"""What a rank opens itself beside groups, alone and with others: logs, text, its readers' pipes, torch's and gloo's
own events and pipes. Measured with torch 2, gloo, one reader."""
_CUDA = 160
"""What CUDA and NCCL open beside, for each rank."""


def needed(layout: Layout, ranks: int, nodes: int = 1, peers: int = 0, cuda: bool = False) -> int:
    """Returns the descriptors of the process of a node that has the most.

    Args:
        layout: of the run.
        ranks: of this node.
        nodes: of the run.
        peers: other nodes that hold a copy of each one's state.
        cuda: whether ranks run on GPUs.
    """
    world = layout.world
    own = ranks * ((NODE_COPIES if nodes > 1 else COPIES) + 1)
    others = ranks * peers * held_for_others(peers) if peers else 0
    # The memory of these ranks, the state that those before left, and a pipe for each rank.
    supervisor = _opened() + 2 * (own + others) + 2 + ranks + _SUPERVISOR
    if nodes > 1:
        supervisor += _NODE + 2 * nodes
    lines = [size - 1 for size in layout.shape().values() if size > 1]
    # Ranks meet at the store, in the world's group, in that of checkpoints, along each axis and along several at once.
    sockets = world + 1 + 2 * (world - 1) + sum(lines) + (world - 1 if len(lines) > 1 else 0) + 3 + len(lines)
    return supervisor + sockets + own // ranks + (_RANK if world > 1 else _ALONE) + (_CUDA if cuda else 0)


def ensure(count: int) -> None:
    """Sees to it that so many descriptors may be open: raises this process's limit as far as it may be raised.

    Raises:
        ConfigError: when that isn't enough.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    if hard != resource.RLIM_INFINITY and hard < count:
        raise ConfigError(
            f"the ranks of this node and their supervisor need {count} open files each at most, and the limit is "
            f"{hard}: after a failure no ranks could take their place; raise it (ulimit -Hn {count}, or LimitNOFILE="
            f"{count}), or give fewer --devices"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else count, hard))


def _opened() -> int:
    """Returns how many this process has open."""
    for folder in (Path("/proc/self/fd"), Path("/dev/fd")):
        if folder.is_dir():
            return len(os.listdir(folder))
    return 16
