"""The file descriptors that a node's processes need at once, counted before the first rank starts.

Ranks after a failure hold their own segments and those that the previous ranks left, so a limit that lets a run start
may prevent its recovery.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.resilience.host_memory_budget import (
    SNAPSHOTS_PER_RANK,
    SNAPSHOTS_PER_RANK_AND_PEERS,
    peer_snapshots_per_rank,
)
from meshwright.spec.layout import Layout

_SUPERVISOR = 7
"""Descriptors of a supervisor beside segments, pipes and connections: its store's socket, a selector, a planner's pipe,
those of this generation's keeper and of the previous one's."""
_NODE = 16
"""Further descriptors of one of several nodes: four listeners, their gates and selectors, ends of helpers."""
_ALONE, _RANK = 30, 40
"""Descriptors that a rank opens beside its groups, alone and with others: logs, text, its readers' pipes, events and
pipes of torch and gloo. Measured with torch 2, gloo, one reader."""
_CUDA = 160
"""Descriptors that CUDA and NCCL open for each rank."""


def count_descriptors(layout: Layout, ranks: int, nodes: int = 1, peers: int = 0, cuda: bool = False) -> int:
    """Returns the descriptors of the node's process with the most: a rank, which inherits its supervisor's.

    Args:
        layout: of the run.
        ranks: of this node.
        nodes: of the run.
        peers: other nodes that hold a copy of each one's state.
        cuda: whether ranks run on GPUs.
    """
    world = layout.world
    own_segments = ranks * ((SNAPSHOTS_PER_RANK_AND_PEERS if nodes > 1 else SNAPSHOTS_PER_RANK) + 1)
    peer_segments = ranks * peers * peer_snapshots_per_rank(peers) if peers else 0
    # The memory of these ranks, the state that those before left, and a pipe for each rank.
    supervisor = _open_descriptors() + 2 * (own_segments + peer_segments) + 2 + ranks + _SUPERVISOR
    if nodes > 1:
        # Each other node may have two connections for a moment: a lost one, and its successor.
        supervisor += _NODE + 2 * nodes
    ring_peers = [size - 1 for size in layout.shape().values() if size > 1]
    # Sockets: the store, the world's group, the checkpoints' group, one group per axis, and one over several axes.
    sockets = (
        world + 1 + 2 * (world - 1) + sum(ring_peers) + (world - 1 if len(ring_peers) > 1 else 0) + 3 + len(ring_peers)
    )
    return supervisor + sockets + own_segments // ranks + (_RANK if world > 1 else _ALONE) + (_CUDA if cuda else 0)


def raise_descriptor_limit(count: int) -> None:
    """Raises this process's soft limit of open files to ``count``.

    Raises:
        ConfigError: when the hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Descriptors cost nothing until used: the soft limit is only a default.
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    if hard != resource.RLIM_INFINITY and hard < count:
        raise ConfigError(
            f"the ranks of this node and their supervisor need {count} open files each at most, and the limit is "
            f"{hard}: after a failure no ranks could take their place; raise it (ulimit -Hn {count}, or LimitNOFILE="
            f"{count}), or give fewer --devices"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else count, hard))


def _open_descriptors() -> int:
    """Returns the number of descriptors that this process has open."""
    for folder in (Path("/proc/self/fd"), Path("/dev/fd")):
        if folder.is_dir():
            return len(os.listdir(folder))
    return 16
