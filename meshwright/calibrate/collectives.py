"""Measures each collective of the runtime over each placement of an axis, all groups at once."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshwright.calibrate.clock import DeviceTimer, agreed
from meshwright.cluster.traffic import span
from meshwright.parallel.axis_group import AxisGroup, TrafficLog
from meshwright.parallel.token_dispatch import exchange
from meshwright.parallel.wire import AUTO, WireOptions, open_axis_group

SLOWEST_S = 0.5
"""Longest single call: larger sizes aren't measured, so that a slow network doesn't delay the calibration."""
MAX_PLACEMENTS = 12
"""Most placements that are measured; the widest groups come first."""
REPEATS = 200
"""Most calls in a chunk of a window."""
CORE_ROUNDS = 9
"""Pairs of passes by which a core's own seconds for an all-reduce are told."""
MIN_CHUNK_CALLS = 4
"""Calls in a chunk below which the window isn't split into chunks."""


def placements(ranks: int, node_ranks: int) -> list[tuple[int, int, int]]:
    """Lists (rank stride, degree, nodes) of every axis that a mesh of ``ranks`` can have.

    Args:
        ranks: world size.
        node_ranks: ranks of a node.
    """
    # An axis' degree, and the product of the faster axes, divide the world.
    divisors = [size for size in range(2, ranks + 1) if ranks % size == 0]
    axis_placements = [
        (rank_stride, degree, span(rank_stride, degree, node_ranks, ranks)[1])
        for degree in divisors
        for rank_stride in (1, *divisors)
        if ranks % (rank_stride * degree) == 0
    ]
    axis_placements.sort(key=lambda placement: (-placement[1], placement[0]))
    return axis_placements[:MAX_PLACEMENTS]


def collectives(
    messages: Sequence[int], node_ranks: int, clock: DeviceTimer, wire: WireOptions = AUTO
) -> Iterator[tuple[Any, ...]]:
    """Yields (kind, ranks, nodes, rank stride, bytes, seconds) for every placement; all ranks call it together.

    Args:
        messages: bytes of full tensors.
        node_ranks: ranks of a node.
        clock: timer of this rank.
        wire: how collectives of CPU ranks travel.
    """
    world = dist.get_world_size()
    for rank_stride, degree, nodes in placements(world, node_ranks):
        axis_group = open_axis_group("calibrate", _build_group(rank_stride, degree), TrafficLog(), wire)
        for kind, build in KINDS.items():
            points: list[tuple[int, float]] = []
            for size in messages:
                # Sizes ascend, so all larger ones would be slower still.
                if _extrapolate_s(points, size) > SLOWEST_S:
                    break
                call = build(axis_group, _divisible_elements(size, degree), clock.device)
                points.append((size, _slowest_rank_s(call, clock)))
                yield kind, degree, nodes, rank_stride, *points[-1]


class _ReduceBesideProducts:
    """An all-reduce over all ranks and as many matrix products as cover it, so that it could hide entirely.

    Args:
        size: bytes of the tensor.
        clock: timer of this rank.
        wire: how collectives of CPU ranks travel.
    """

    def __init__(self, size: int, clock: DeviceTimer, wire: WireOptions) -> None:
        group = dist.group.WORLD
        assert group is not None
        axis_group = open_axis_group("calibrate", group, TrafficLog(), wire)
        tensor = torch.ones(size // 4, device=clock.device)
        matrix = self._matrix = torch.randn(512, 512, device=clock.device)
        self._reduce = lambda: axis_group.all_reduce(tensor.zero_())
        self.alone_s = _slowest_rank_s(lambda: self._reduce().wait(), clock)
        product_s = agreed([clock.seconds(lambda: matrix @ matrix)], largest=False)[0]
        self._count = max(1, math.ceil(self.alone_s / product_s))
        self.products_s = self._count * product_s
        self.sent_bytes = 2.0 * (axis_group.size - 1) / axis_group.size * size
        """Bytes that a rank sends."""

    def run(self, reduces: bool = True) -> None:
        """Multiplies while the all-reduce is in flight, or without one, and then waits for it."""
        handle = self._reduce() if reduces else None
        for _ in range(self._count):
            torch.mm(self._matrix, self._matrix)
        if handle is not None:
            handle.wait()


def overlapped(size: int, clock: DeviceTimer, wire: WireOptions) -> float:
    """Measures the share of an all-reduce over all ranks that hides under matrix products, 0 to 1.

    Args:
        size: bytes of the tensor.
        clock: timer of this rank.
        wire: how collectives of CPU ranks travel.
    """
    work = _ReduceBesideProducts(size, clock, wire)
    together_s = _slowest_rank_s(work.run, clock)
    # Time saved by the overlap, over the most that could be saved.
    saved_s = work.alone_s + work.products_s - together_s
    return min(1.0, max(0.0, saved_s / min(work.alone_s, work.products_s)))


def core_byte_s(size: int, clock: DeviceTimer, wire: WireOptions) -> float:
    """Measures the processor seconds of a rank for each byte that it sends in an all-reduce over all ranks.

    What arrives is summed and copied by the same core, in the network's threads and in the kernel's interrupts of
    whatever runs. So products run meanwhile, and what the process takes beyond these products alone counts: waiting
    and other programs don't.

    Args:
        size: bytes of the tensor.
        clock: timer of this rank.
        wire: how collectives of CPU ranks travel.
    """
    work = _ReduceBesideProducts(size, clock, wire)

    def processor_s(reduces: bool) -> float:
        start_s = time.process_time()
        work.run(reduces)
        return time.process_time() - start_s

    # In turn, so that what slows the core meanwhile slows both; the middle difference counts.
    differences = [processor_s(True) - processor_s(False) for _ in range(CORE_ROUNDS)]
    return max(0.0, agreed([statistics.median(differences)], largest=False)[0]) / work.sent_bytes


def awaited(size: int, clock: DeviceTimer, wire: WireOptions) -> float:
    """Measures the extra seconds of a collective between matrix products, over one in a tight loop.

    They come from ranks that arrive unevenly and from waking threads. More than the collective itself can't be, and is
    blamed on other programs.

    Args:
        size: bytes of the tensor.
        clock: timer of this rank.
        wire: how collectives of CPU ranks travel.
    """
    group = dist.group.WORLD
    assert group is not None
    axis_group = open_axis_group("calibrate", group, TrafficLog(), wire)
    tensor = torch.ones(size // 4, device=clock.device)
    matrix = torch.randn(512, 512, device=clock.device)
    alone_s = _slowest_rank_s(lambda: axis_group.all_reduce(tensor.zero_()).wait(), clock)
    product_s = agreed([clock.seconds(lambda: matrix @ matrix)], largest=False)[0]

    def serial_pass() -> None:
        torch.mm(matrix, matrix)
        axis_group.all_reduce(tensor.zero_()).wait()

    return min(alone_s, max(0.0, _slowest_rank_s(serial_pass, clock) - product_s - alone_s))


def _build_group(rank_stride: int, degree: int) -> dist.ProcessGroup:
    """Creates all groups of ``degree`` members, ``rank_stride`` ranks apart; returns this rank's."""
    world, block = dist.get_world_size(), rank_stride * degree
    # All groups of the axis exist at once, as in a run: they share links during the measurement.
    groups = [
        [start + offset + rank_stride * index for index in range(degree)]
        for start in range(0, world, block)
        for offset in range(rank_stride)
    ]
    group, _ = dist.new_subgroups_by_enumeration(groups)
    assert group is not None
    return group


def _extrapolate_s(points: Sequence[tuple[int, float]], size: int) -> float:
    """Extrapolates seconds of a size linearly from the last two measured ones; 0 for fewer."""
    if len(points) < 2:
        return 0.0
    (smaller, smaller_s), (larger, larger_s) = points[-2:]
    return larger_s + max(0.0, larger_s - smaller_s) / (larger - smaller) * (size - larger)


def _divisible_elements(size: int, degree: int) -> int:
    """Returns the number of float32 elements in about ``size`` bytes, a multiple of ``degree``."""
    return max(1, size // 4 // degree) * degree


def _slowest_rank_s(call: Callable[[], object], clock: DeviceTimer) -> float:
    """Returns seconds of one call on the slowest rank; all ranks make the same number of calls.

    Chunks of few calls would be too short: data that a peer sent during this rank's previous call makes one call fast
    and the next slow. The mean of all calls counts then, not the fastest chunk.
    """
    call()
    single_s = agreed([clock.timed(call, 1)], largest=True)[0]
    # A call far longer than the window needs no repeats; all ranks agree on this by the maximum.
    if single_s > 10 * clock.window_s:
        return single_s
    # All ranks compute the same number from the agreed time, or collectives wouldn't match.
    repeats = round(clock.window_s / clock.chunks / single_s)
    if repeats < MIN_CHUNK_CALLS:
        return agreed([clock.timed(call, max(2, round(clock.window_s / single_s)))], largest=True)[0]
    return min(agreed([clock.timed(call, min(REPEATS, repeats)) for _ in range(clock.chunks)], largest=True))


def _all_reduce(axis_group: AxisGroup, count: int, device: torch.device) -> Callable[[], object]:
    tensor = torch.zeros(count, device=device)
    return lambda: axis_group.all_reduce(tensor).wait()


def _all_gather(axis_group: AxisGroup, count: int, device: torch.device) -> Callable[[], object]:
    full, shard = torch.zeros(count, device=device), torch.zeros(count // axis_group.size, device=device)
    return lambda: axis_group.all_gather(full, shard).wait()


def _reduce_scatter(axis_group: AxisGroup, count: int, device: torch.device) -> Callable[[], object]:
    full, shard = torch.zeros(count, device=device), torch.zeros(count // axis_group.size, device=device)
    return lambda: axis_group.reduce_scatter(shard, full).wait()


def _all_to_all(axis_group: AxisGroup, count: int, device: torch.device) -> Callable[[], object]:
    inputs = list(torch.zeros(axis_group.size, count // axis_group.size, device=device))
    outputs = list(torch.zeros(axis_group.size, count // axis_group.size, device=device))
    return lambda: axis_group.all_to_all(outputs, inputs).wait()


def _exchange(axis_group: AxisGroup, count: int, device: torch.device) -> Callable[[], object]:
    rows, split_sizes = torch.zeros(count, device=device), [count // axis_group.size] * axis_group.size
    return lambda: exchange(rows, axis_group, split_sizes, split_sizes)


def _send(axis_group: AxisGroup, count: int, device: torch.device) -> Callable[[], object]:
    """Sends to the next member and receives from the previous one, like pipeline stages in steady state."""
    sent, received = (torch.zeros(count, device=device) for _ in range(2))
    peers = dist.get_process_group_ranks(axis_group.group)
    # A ring, so that every rank sends and receives, also the first and the last.
    next_rank, previous_rank = peers[(axis_group.index + 1) % axis_group.size], peers[axis_group.index - 1]

    def call() -> None:
        operations = [
            dist.P2POp(dist.isend, sent, next_rank, group=axis_group.group),
            dist.P2POp(dist.irecv, received, previous_rank, group=axis_group.group),
        ]
        # Batched, so that send and receive can't deadlock.
        for request in dist.batch_isend_irecv(operations):
            request.wait()

    return call


KINDS: dict[str, Callable[[AxisGroup, int, torch.device], Callable[[], object]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "exchange": _exchange,
    "send": _send,
}
"""Builder of a call of each collective, by its name in the cluster's tables."""
