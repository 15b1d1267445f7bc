"""Chooses between shared memory and torch's own collectives for a group of ranks."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from typing import Literal

import torch.distributed as dist

from meshwright.errors import ConfigError
from meshwright.parallel.axis_group import AxisGroup, TrafficLog
from meshwright.parallel.byte_collectives import all_gather_bytes
from meshwright.parallel.shared_segment import (
    SegmentAddress,
    SharedSegment,
    machine_identity,
    obstacle_to_sharing,
)
from meshwright.parallel.shared_wire import SharedWire

WireChoice = Literal["auto", "gloo", "shm"]
"""``shm``: shared memory between ranks of one machine; ``gloo``: torch's; ``auto``: the former wherever it can be."""
MOST_RANKS = 64
"""Largest group over shared memory: each rank polls all others, and holds a ring of 4 MiB for each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WireOptions:
    """How the collectives of CPU ranks travel; the same on all ranks, but for ``node``."""

    choice: WireChoice = "auto"
    node: str = ""
    """This rank's node, where the launcher knows it: ranks of two nodes of one machine share no memory."""
    timeout_s: float = 600.0
    """Limit of one collective."""
    cores: float = math.inf
    """Cores' worth of processor time that a quota leaves this node's ranks; those they may run on are known here."""


AUTO = WireOptions()
"""Shared memory wherever it can be."""


def open_axis_group(axis: str, group: dist.ProcessGroup, log: TrafficLog, options: WireOptions) -> AxisGroup:
    """Returns the collectives of a group, over shared memory where that is wanted and can be; a collective call.

    Args:
        axis: the group's name.
        group: the ranks; those of a GPU, whose group isn't gloo's, share nothing.
        log: where traffic is booked.
        options: how CPU ranks' collectives travel.

    Raises:
        ConfigError: when shared memory is asked for and these ranks of one machine can't have it.
    """
    if options.choice == "gloo" or group.size() == 1 or dist.get_backend(group) != "gloo":
        return AxisGroup(axis, group, log)
    if group.size() > MOST_RANKS:
        return AxisGroup(axis, group, log, gloo_reason=f"{group.size()} ranks are more than {MOST_RANKS}")
    segment, obstacle, is_local = _share_segment(group, options.node)
    if segment is None:
        if options.choice == "shm" and is_local:
            raise ConfigError(
                f"launch.wire = shm: the ranks of {axis} can't share memory: {obstacle}; write launch.wire = auto, "
                "which takes gloo then"
            )
        return AxisGroup(axis, group, log, gloo_reason=obstacle)
    ranks = dist.get_process_group_ranks(group)
    # Of all ranks those on other nodes don't use these cores; taking them for neighbours only shortens the polling.
    is_crowded = dist.get_world_size() > min(len(os.sched_getaffinity(0)), options.cores)
    wire = SharedWire(segment, group.rank(), ranks, axis, options.timeout_s, is_crowded)
    return AxisGroup(axis, group, log, wire)


def _share_segment(group: dist.ProcessGroup, node: str) -> tuple[SharedSegment | None, str, bool]:
    """Returns a segment of all ranks, or why there is none; and whether all are on one machine."""
    segment, obstacle, index = None, obstacle_to_sharing(), group.rank()
    if index == 0 and not obstacle:
        try:
            segment = SharedSegment.create(group.size())
        except OSError as error:
            obstacle = f"the kernel gives no shared memory: {error.strerror or error}"
    identity = machine_identity()
    offer = {
        "machine": f"{identity}/{node}" if identity else "",
        "address": asdict(segment.address) if segment else None,
    }
    offers = [json.loads(data) for data in all_gather_bytes(json.dumps(offer).encode(), group)]
    is_local = len({offer["machine"] for offer in offers}) == 1
    if not is_local:
        obstacle = obstacle or "its ranks are on several machines"
    elif not identity:
        obstacle = obstacle or "/proc doesn't say which machine this is"
    if not obstacle and index and offers[0]["address"] is not None:
        try:
            segment = SharedSegment.open(SegmentAddress(**offers[0]["address"]), group.size())
        except OSError as error:
            obstacle = f"a rank can't open another's memory: {error.strerror or error}"
    if segment is not None and not obstacle:
        segment.hold(index)
    # All or none: from here on every rank knows that all have mapped it, and hold their locks.
    obstacles = [data.decode() for data in all_gather_bytes(obstacle.encode(), group)]
    first = next(filter(None, obstacles), "")
    return (None if first else segment), first, is_local
