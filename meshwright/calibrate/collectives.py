"""What the wires carry: each collective of the runtime over each placement of an axis, all groups at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshwright.calibrate.clock import DeviceTimer, agreed
from meshwright.cluster.traffic import span
from meshwright.parallel.axis_group import AxisGroup, TrafficLog
from meshwright.parallel.token_dispatch import exchange

SLOWEST_S = 0.5
"""A size that would take longer for one call isn't measured: a slow network mustn't hold up the calibration."""
MOST_PLACES = 12
"""Placements that are measured at most; the widest groups go first."""
REPEATS = 200
"""Calls in a part of a window at most."""
FEW = 4
"""Calls in a part of a window under which it isn't taken in parts."""


def placements(ranks: int, node: int) -> list[tuple[int, int, int]]:
    """Returns (before, degree, nodes) of every axis that a mesh of so many ranks can have.

    Args:
        ranks: all of them.
        node: ranks of a node.
    """
    divisors = [size for size in range(2, ranks + 1) if ranks % size == 0]
    found = [
        (before, degree, span(before, degree, node, ranks)[1])
        for degree in divisors
        for before in (1, *divisors)
        if ranks % (before * degree) == 0
    ]
    found.sort(key=lambda place: (-place[1], place[0]))
    return found[:MOST_PLACES]


def collectives(messages: Sequence[int], node: int, clock: DeviceTimer) -> Iterator[tuple[Any, ...]]:
    """Yields (kind, ranks, nodes, before, bytes, seconds) for every placement; all ranks call it together.

    Args:
        messages: bytes of whole tensors.
        node: ranks of a node.
        clock: of this rank.
    """
    world = dist.get_world_size()
    for before, degree, nodes in placements(world, node):
        group = _group(before, degree)
        for kind, build in KINDS.items():
            points: list[tuple[int, float]] = []
            for size in messages:
                if _expected(points, size) > SLOWEST_S:
                    break
                work = build(AxisGroup("calibrate", group, TrafficLog()), _even(size, degree), clock.device)
                points.append((size, _timed(work, clock)))
                yield kind, degree, nodes, before, *points[-1]


def overlapped(size: int, clock: DeviceTimer) -> float:
    """Returns the share of an all-reduce over all ranks that hides under matrix products, 0 to 1.

    Args:
        size: bytes of the tensor.
        clock: of this rank.
    """
    group = dist.group.WORLD
    assert group is not None
    wire, tensor = AxisGroup("calibrate", group, TrafficLog()), torch.ones(size // 4, device=clock.device)
    square = torch.randn(512, 512, device=clock.device)
    alone = _timed(lambda: wire.all_reduce(tensor.zero_()).wait(), clock)
    product = agreed([clock.seconds(lambda: square @ square)], largest=False)[0]
    count = max(1, math.ceil(alone / product))

    def both() -> None:
        started = wire.all_reduce(tensor.zero_())
        for _ in range(count):
            torch.mm(square, square)
        started.wait()

    together = _timed(both, clock)
    return min(1.0, max(0.0, (alone + count * product - together) / min(alone, count * product)))


def awaited(size: int, clock: DeviceTimer) -> float:
    """Returns what a collective between products takes over one in a tight row: ranks that come unevenly, wakening.

    It is at most as long as the collective: what is longer was something else's doing.

    Args:
        size: bytes of the tensor.
        clock: of this rank.
    """
    group = dist.group.WORLD
    assert group is not None
    wire, tensor = AxisGroup("calibrate", group, TrafficLog()), torch.ones(size // 4, device=clock.device)
    square = torch.randn(512, 512, device=clock.device)
    alone = _timed(lambda: wire.all_reduce(tensor.zero_()).wait(), clock)
    product = agreed([clock.seconds(lambda: square @ square)], largest=False)[0]

    def both() -> None:
        torch.mm(square, square)
        wire.all_reduce(tensor.zero_()).wait()

    return min(alone, max(0.0, _timed(both, clock) - product - alone))


def _group(before: int, degree: int) -> dist.ProcessGroup:
    """Returns this rank's group of members that stand ``before`` ranks apart."""
    world, block = dist.get_world_size(), before * degree
    groups = [
        [start + offset + before * index for index in range(degree)]
        for start in range(0, world, block)
        for offset in range(before)
    ]
    group, _ = dist.new_subgroups_by_enumeration(groups)
    assert group is not None
    return group


def _expected(points: Sequence[tuple[int, float]], size: int) -> float:
    """Returns seconds that a size will take, by the rate between the last two that were measured; 0 before that."""
    if len(points) < 2:
        return 0.0
    (small, least), (large, most) = points[-2:]
    return most + max(0.0, most - least) / (large - small) * (size - large)


def _even(size: int, degree: int) -> int:
    """Returns float32 elements of about ``size`` bytes that divide over the ranks."""
    return max(1, size // 4 // degree) * degree


def _timed(work: Callable[[], object], clock: DeviceTimer) -> float:
    """Returns seconds of one call, the slowest rank's; all ranks make the same number of calls.

    Parts of a window of a few calls each would be too short: what a peer has sent already while this rank was at the
    call before makes one call fast and the next one slow. Then the mean of all calls counts, not the fastest part.
    """
    work()
    once = agreed([clock.timed(work, 1)], largest=True)[0]
    if once > 10 * clock.window_s:
        return once
    repeats = round(clock.window_s / clock.chunks / once)
    if repeats < FEW:
        return agreed([clock.timed(work, max(2, round(clock.window_s / once)))], largest=True)[0]
    return min(agreed([clock.timed(work, min(REPEATS, repeats)) for _ in range(clock.chunks)], largest=True))


def _all_reduce(wire: AxisGroup, count: int, device: torch.device) -> Callable[[], object]:
    tensor = torch.zeros(count, device=device)
    return lambda: wire.all_reduce(tensor).wait()


def _all_gather(wire: AxisGroup, count: int, device: torch.device) -> Callable[[], object]:
    whole, part = torch.zeros(count, device=device), torch.zeros(count // wire.size, device=device)
    return lambda: wire.all_gather(whole, part).wait()


def _reduce_scatter(wire: AxisGroup, count: int, device: torch.device) -> Callable[[], object]:
    whole, part = torch.zeros(count, device=device), torch.zeros(count // wire.size, device=device)
    return lambda: wire.reduce_scatter(part, whole).wait()


def _all_to_all(wire: AxisGroup, count: int, device: torch.device) -> Callable[[], object]:
    parts = list(torch.zeros(wire.size, count // wire.size, device=device))
    places = list(torch.zeros(wire.size, count // wire.size, device=device))
    return lambda: wire.all_to_all(places, parts).wait()


def _exchange(wire: AxisGroup, count: int, device: torch.device) -> Callable[[], object]:
    rows, each = torch.zeros(count, device=device), [count // wire.size] * wire.size
    return lambda: exchange(rows, wire, each, each)


def _send(wire: AxisGroup, count: int, device: torch.device) -> Callable[[], object]:
    """To the next member and from the one before, as the stages of a pipeline in full flow."""
    given, taken = (torch.zeros(count, device=device) for _ in range(2))
    peers = dist.get_process_group_ranks(wire.group)
    after, before = peers[(wire.index + 1) % wire.size], peers[wire.index - 1]

    def work() -> None:
        pair = [
            dist.P2POp(dist.isend, given, after, group=wire.group),
            dist.P2POp(dist.irecv, taken, before, group=wire.group),
        ]
        for started in dist.batch_isend_irecv(pair):
            started.wait()

    return work


KINDS: dict[str, Callable[[AxisGroup, int, torch.device], Callable[[], object]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "exchange": _exchange,
    "send": _send,
}
"""Each collective by the name that the cluster's tables give it, and what makes a call of it."""
