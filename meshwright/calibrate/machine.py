"""Measures the machine at hand with the ranks that a run would have, and makes a calibration of it."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from meshwright.calibrate import collectives, compute
from meshwright.calibrate.clock import CHUNKS, DeviceTimer, agreed
from meshwright.calibrate.compute import CPU, GPU, QUICK, GridSizes
from meshwright.calibrate.pace import Pace
from meshwright.cluster.calibration import Calibration
from meshwright.launch.contract import RankContext
from meshwright.launch.rendezvous import init_group
from meshwright.parallel.byte_collectives import broadcast_bytes
from meshwright.records import RecordCodec

GROUP_S = 60.0
"""Limit for the ranks to find each other."""
HIDDEN_BYTES = 4194304
"""Size of the all-reduce whose hidden share is measured."""
BETWEEN_BYTES = 1048576
"""Size of the all-reduce that is measured between matrix products."""

Told = Callable[[str], None]
_ROWS = RecordCodec()


def chosen_sizes(kind: str, quick: bool) -> GridSizes:
    """Returns what is measured on ``cpu`` or ``cuda``."""
    sizes = GPU if kind == "cuda" else CPU
    return dataclasses.replace(sizes, **QUICK) if quick else sizes  # type: ignore[arg-type]


def measure_rank(
    context: RankContext, machine: Mapping[str, Any], sizes: GridSizes, told: Told, timeout_s: float
) -> Calibration:
    """Measures on one rank, together with all others; every rank returns the same.

    Args:
        context: this rank's place.
        machine: facts of the machine, by which the calibration is found again.
        sizes: what is measured.
        told: is told of each part as it begins, on rank 0.
        timeout_s: limit of a collective.
    """
    begun = time.perf_counter()
    init_group(context, timeout_s=timeout_s, group_s=GROUP_S)
    try:
        crowd = max(1.0, context.local_world / int(machine["cores"])) if context.device == "cpu" else 1.0
        clock = DeviceTimer(torch.device(context.device), sizes.window_s, 1 if crowd > 1.0 else CHUNKS)
        if clock.device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
            sizes = dataclasses.replace(
                sizes, dtypes=tuple("fp16" if kind == "bf16" else kind for kind in sizes.dtypes)
            )
        steps = _Paced(clock, told if context.rank == 0 else _silent)
        tables: dict[str, Any] = {}
        for number in range(sizes.passes):
            some = sizes if number == 0 else dataclasses.replace(sizes, dtypes=sizes.dtypes[:1])
            found = _compute(some, clock, crowd, steps.begin) | _traffic(some, clock, context, steps.begin)
            tables = fastest(tables, found) if tables else found
        tables |= steps.found()
        taken = agreed([time.perf_counter() - begun], largest=True)[0]
        return Calibration(machine=machine, ranks=context.world, nodes=context.nodes, taken_s=round(taken, 1), **tables)
    finally:
        dist.destroy_process_group()


def _silent(text: str) -> None:
    """What the other ranks say."""


def fastest(tables: dict[str, Any], again: dict[str, Any]) -> dict[str, Any]:
    """Returns tables with the lesser of two times of each row: what disturbed one seldom disturbs the other."""
    found = dict(tables)
    for name, count in (("matmul", 1), ("attention", 2), ("operations", 1), ("optimizer", 1), ("collectives", 1)):
        second = {row[:-count]: row[-count:] for row in again.get(name, ())}
        found[name] = [
            (*row[:-count], *map(min, row[-count:], second.get(row[:-count], row[-count:])))
            for row in tables.get(name, ())
        ]
    found["launch_s"] = min(tables["launch_s"], again["launch_s"])
    if "host" in tables:
        found["host"] = tuple((one[0], min(one[1], two[1])) for one, two in zip(tables["host"], again["host"]))
    return found


class _Paced:
    """Says which part of the measuring begins, and times a fixed bit of work before each, all ranks at once.

    Args:
        clock: of this rank.
        told: is told of each part.
    """

    def __init__(self, clock: DeviceTimer, told: Told) -> None:
        self._pace, self._told = Pace(clock.device), told
        self._seconds: list[float] = []

    def begin(self, text: str) -> None:
        """Called by every rank as a part begins."""
        self._told(text)
        dist.barrier()
        self._seconds += agreed([self._pace.seconds()], largest=False)

    def found(self) -> dict[str, float]:
        """Returns the pace while nothing disturbed, as the fastest times are, and how much slower the median was."""
        best = min(self._seconds)
        return {"pace_s": best, "pace_spread": round(statistics.median(self._seconds) / best - 1.0, 4)}


def _compute(sizes: GridSizes, wall: DeviceTimer, crowd: float, say: Told) -> dict[str, Any]:
    """Measures every computation with all ranks at work, the first data type's with one alone as well.

    Args:
        sizes: what is measured.
        wall: reads the time that passes.
        crowd: ranks to a core.
        say: is told of each part.
    """
    own = wall.device.type == "cpu" and torch.get_num_threads() == 1
    tables: dict[str, Any] = {"matmul": [], "attention": [], "operations": []}
    loads = [(dtype, True) for dtype in sizes.dtypes]
    if dist.get_world_size() > 1:
        loads.append((sizes.dtypes[0], False))
    for dtype, busy in loads:
        clock = dataclasses.replace(wall, sharing=crowd if busy else 1.0, chunks=CHUNKS) if own else wall
        load = "all ranks at work" if busy else "one rank at work"
        some = sizes if busy and dtype == sizes.dtypes[0] else sizes.fewer()
        say(f"matrix products, {dtype}, {load}")
        for row in _measured(compute.matmuls(some, dtype, clock), busy):
            tables["matmul"].append((dtype, row[0], busy, *row[1:]))
        say(f"attention, {dtype}, {load}")
        for row in _measured(compute.attentions(some, dtype, clock), busy, 2):
            tables["attention"].append((dtype, busy, *row))
        say(f"other operations, {dtype}, {load}")
        for row in _measured(compute.operations(some, dtype, clock), busy):
            tables["operations"].append((row[0], dtype, busy, *row[1:]))
    say("optimizer")
    clock = dataclasses.replace(wall, sharing=crowd, chunks=CHUNKS) if own else wall
    tables["optimizer"] = _measured(compute.optimizer(sizes, clock), True)
    tables["launch_s"] = _measured(iter([(compute.launch_s(clock),)]), True)[0][0]
    return tables


def _measured(work: Iterator[tuple[Any, ...]], busy: bool, times: int = 1) -> list[tuple[Any, ...]]:
    """Takes a measurement's rows, whose last ``times`` entries become the mean over the ranks.

    Without ``busy`` rank 0 measures and the others wait.
    """
    if not busy:
        rows = list(work) if dist.get_rank() == 0 else []
        return list(_ROWS.loads(broadcast_bytes(_ROWS.dumps(rows))))
    rows = []
    if dist.get_world_size() > 1:
        dist.barrier()
    for row in work:
        rows.append((*row[:-times], *agreed(list(row[-times:]), largest=False)))
    return rows


def _traffic(sizes: GridSizes, clock: DeviceTimer, context: RankContext, say: Told) -> dict[str, Any]:
    if context.world == 1:
        return {}
    slow = dataclasses.replace(clock, window_s=2 * clock.window_s)
    rows, place = [], None
    for row in collectives.collectives(sizes.messages, context.local_world, slow):
        if place != row[1:4]:
            place = row[1:4]
            say(f"collectives over {row[1]} ranks, {row[3]} apart" + (f", on {row[2]} nodes" if row[2] > 1 else ""))
        rows.append(row)
    say("an all-reduce under matrix products")
    hidden = collectives.overlapped(min(HIDDEN_BYTES, sizes.messages[-1]), slow)
    say("an all-reduce between matrix products")
    wait_s = collectives.awaited(min(BETWEEN_BYTES, sizes.messages[-1]), slow)
    return {"collectives": rows, "overlap": hidden, "host": (("wait", wait_s),)}
