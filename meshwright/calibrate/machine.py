"""Measures this machine with the ranks that a run would have, and builds its calibration."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from meshwright.calibrate import collectives, compute
from meshwright.calibrate.clock import CHUNKS, DeviceTimer, agreed
from meshwright.calibrate.compute import CPU, GPU, QUICK, QUICK_GPU, GridSizes
from meshwright.calibrate.pace import Pace
from meshwright.cluster.calibration import Calibration
from meshwright.json_types import JsonObject
from meshwright.launch.contract import RankContext
from meshwright.launch.devices import allowed_core_time
from meshwright.launch.rendezvous import init_group
from meshwright.parallel.byte_collectives import broadcast_bytes
from meshwright.parallel.wire import WireOptions
from meshwright.planner.cost.rounding import CORE_BYTE
from meshwright.records import RecordCodec

GROUP_S = 60.0
"""Seconds in which all ranks must join the process group."""
HIDDEN_BYTES = 4194304
"""Bytes of the all-reduce whose hidden share is measured."""
ROUNDED_DTYPE = "float32"
"""Of gradients that are rounded."""
BETWEEN_BYTES = 1048576
"""Bytes of the all-reduce that is measured between matrix products."""

Report = Callable[[str], None]
_ROWS = RecordCodec()


def chosen_sizes(kind: str, quick: bool) -> GridSizes:
    """Returns the sizes to measure on ``cpu`` or ``cuda``."""
    sizes, quick_fields = (GPU, QUICK_GPU) if kind == "cuda" else (CPU, QUICK)
    return dataclasses.replace(sizes, **quick_fields) if quick else sizes  # type: ignore[arg-type]


def measure_rank(
    context: RankContext, machine: JsonObject, sizes: GridSizes, report: Report, timeout_s: float
) -> Calibration:
    """Measures on this rank, together with all others; every rank returns the same calibration.

    Args:
        context: of this rank.
        machine: facts of the machine, which give the calibration's key.
        sizes: to measure.
        report: called on rank 0 with a description of each part as it begins.
        timeout_s: of a collective.
    """
    start_s = time.perf_counter()
    init_group(context, timeout_s=timeout_s, group_s=GROUP_S)
    try:
        # More ranks than cores: chunks would be shorter than a scheduler's time slice, so the window stays whole.
        cores = float(machine["cores"]) if context.device == "cpu" else math.inf
        ranks_per_core = max(1.0, context.local_world / cores)
        clock = DeviceTimer(torch.device(context.device), sizes.window_s, 1 if ranks_per_core > 1.0 else CHUNKS)
        # Before Ampere bf16 is emulated; training uses fp16 there.
        if clock.device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
            sizes = dataclasses.replace(
                sizes, dtypes=tuple("fp16" if kind == "bf16" else kind for kind in sizes.dtypes)
            )
        clock.heat(sizes.heat_s)
        announcer = _PacedAnnouncer(clock, report if context.rank == 0 else _silent)
        tables: dict[str, Any] = {}
        for pass_number in range(sizes.passes):
            pass_sizes = sizes if pass_number == 0 else dataclasses.replace(sizes, dtypes=sizes.dtypes[:1])
            pass_tables = {
                **_measure_compute(pass_sizes, clock, ranks_per_core, max(1.0, 1.0 / cores), announcer.announce_part),
                **_measure_traffic(pass_sizes, clock, ranks_per_core, context, announcer.announce_part),
            }
            tables = fastest(tables, pass_tables) if tables else pass_tables
        tables |= announcer.pace_fields()
        duration_s = agreed([time.perf_counter() - start_s], largest=True)[0]
        return Calibration(
            machine=machine, ranks=context.world, nodes=context.nodes, taken_s=round(duration_s, 1), **tables
        )
    finally:
        dist.destroy_process_group()


def _silent(text: str) -> None:
    """Ignores progress, on ranks other than 0."""


def fastest(tables: JsonObject, second_tables: JsonObject) -> dict[str, Any]:
    """Merges two measurements by the smaller time of each row: a disturbance seldom hits the same row twice."""
    merged = dict(tables)
    for name, count in (("matmul", 1), ("attention", 2), ("operations", 1), ("optimizer", 1), ("collectives", 1)):
        # Rows are matched by all columns but their times.
        second_times = {row[:-count]: row[-count:] for row in second_tables.get(name, ())}
        merged[name] = [
            (*row[:-count], *map(min, row[-count:], second_times.get(row[:-count], row[-count:])))
            for row in tables.get(name, ())
        ]
    merged["launch_s"] = min(tables["launch_s"], second_tables["launch_s"])
    if "host" in tables:
        merged["host"] = tuple(
            (first_row[0], min(first_row[1], second_row[1]))
            for first_row, second_row in zip(tables["host"], second_tables["host"])
        )
    return merged


class _PacedAnnouncer:
    """Announces each part of the measurement, and times the pace probe before it on all ranks at once.

    Args:
        clock: timer of this rank.
        report: called with a description of each part.
    """

    def __init__(self, clock: DeviceTimer, report: Report) -> None:
        self._pace, self._report = Pace(clock.device), report
        self._seconds: list[float] = []

    def announce_part(self, text: str) -> None:
        """Announces a part; every rank calls it as the part begins."""
        self._report(text)
        dist.barrier()
        self._seconds += agreed([self._pace.seconds()], largest=False)

    def pace_fields(self) -> dict[str, float]:
        """Returns the fastest time of the probe, and the median's relative excess over it."""
        fastest_s = min(self._seconds)
        return {"pace_s": fastest_s, "pace_spread": round(statistics.median(self._seconds) / fastest_s - 1.0, 4)}


def _measure_compute(
    sizes: GridSizes, wall_timer: DeviceTimer, ranks_per_core: float, alone_per_core: float, announce: Report
) -> JsonObject:
    """Measures every computation with all ranks under load, and the first data type also with one rank alone.

    Args:
        sizes: to measure.
        wall_timer: reads wall-clock time.
        ranks_per_core: at least 1.
        alone_per_core: the same of one rank alone, which a quota may leave less than a core.
        announce: called as each part begins.
    """
    # With one thread a rank its processor time is the work; more threads would need wall-clock time.
    one_thread_a_rank = wall_timer.device.type == "cpu" and torch.get_num_threads() == 1
    tables: dict[str, Any] = {"matmul": [], "attention": [], "operations": []}
    dtype_loads = [(dtype, True) for dtype in sizes.dtypes]
    if dist.get_world_size() > 1:
        dtype_loads.append((sizes.dtypes[0], False))
    for dtype, busy in dtype_loads:
        clock = (
            dataclasses.replace(wall_timer, sharing=ranks_per_core if busy else alone_per_core, chunks=CHUNKS)
            if one_thread_a_rank
            else wall_timer
        )
        load_text = "all ranks at work" if busy else "one rank at work"
        # The full grid for the main case; every second size for all others.
        load_sizes = sizes if busy and dtype == sizes.dtypes[0] else sizes.thinned()
        announce(f"matrix products, {dtype}, {load_text}")
        for row in _mean_over_ranks(compute.matmuls(load_sizes, dtype, clock), busy):
            tables["matmul"].append((dtype, row[0], busy, *row[1:]))
        announce(f"attention, {dtype}, {load_text}")
        for row in _mean_over_ranks(compute.attentions(load_sizes, dtype, clock), busy, 2):
            tables["attention"].append((dtype, busy, *row))
        announce(f"other operations, {dtype}, {load_text}")
        for row in _mean_over_ranks(compute.operations(load_sizes, dtype, clock), busy):
            tables["operations"].append((row[0], dtype, busy, *row[1:]))
        if busy and dtype == ROUNDED_DTYPE:
            announce("rounding gradients, all ranks at work")
            for row in _mean_over_ranks(compute.roundings(load_sizes, clock), busy):
                tables["operations"].append((row[0], dtype, busy, *row[1:]))
    announce("optimizer")
    clock = dataclasses.replace(wall_timer, sharing=ranks_per_core, chunks=CHUNKS) if one_thread_a_rank else wall_timer
    tables["optimizer"] = _mean_over_ranks(compute.optimizer(sizes, clock), True)
    tables["launch_s"] = _mean_over_ranks(iter([(compute.launch_s(clock),)]), True)[0][0]
    return tables


def _mean_over_ranks(
    measurements: Iterator[tuple[Any, ...]], busy: bool, time_columns: int = 1
) -> list[tuple[Any, ...]]:
    """Runs measurements and averages the last ``time_columns`` entries of each row over the ranks.

    Without ``busy`` rank 0 measures alone and all other ranks wait.
    """
    if not busy:
        # The others wait in the broadcast, so that rank 0 has the machine to itself.
        rows = list(measurements) if dist.get_rank() == 0 else []
        return list(_ROWS.loads(broadcast_bytes(_ROWS.dumps(rows))))
    rows = []
    if dist.get_world_size() > 1:
        dist.barrier()
    for row in measurements:
        rows.append((*row[:-time_columns], *agreed(list(row[-time_columns:]), largest=False)))
    return rows


def _measure_traffic(
    sizes: GridSizes, clock: DeviceTimer, ranks_per_core: float, context: RankContext, announce: Report
) -> JsonObject:
    """Measures all collectives, and an all-reduce under and between matrix products."""
    if context.world == 1:
        return {}
    # Collectives vary more than computations: twice the window.
    long_timer = dataclasses.replace(clock, window_s=2 * clock.window_s)
    rows, placement = [], None
    wire = WireOptions(node="" if context.node is None else str(context.node), cores=allowed_core_time())
    for row in collectives.collectives(sizes.messages, context.local_world, long_timer, wire):
        # Announce each placement once, not each size.
        if placement != row[1:4]:
            placement = row[1:4]
            announce(
                f"collectives over {row[1]} ranks, {row[3]} apart" + (f", on {row[2]} nodes" if row[2] > 1 else "")
            )
        rows.append(row)
    announce("an all-reduce under matrix products")
    hidden_share = collectives.overlapped(min(HIDDEN_BYTES, sizes.messages[-1]), long_timer, wire)
    announce("an all-reduce between matrix products")
    wait_s = collectives.awaited(min(BETWEEN_BYTES, sizes.messages[-1]), long_timer, wire)
    host: list[tuple[str, float]] = [("wait", wait_s)]
    if context.nodes > 1 and clock.device.type == "cpu":
        announce("a core's own seconds for an all-reduce")
        core_byte_s = collectives.core_byte_s(min(HIDDEN_BYTES, sizes.messages[-1]), long_timer, wire)
        # A rank that has a part of a core takes longer for its processor seconds.
        host.append((CORE_BYTE, core_byte_s * ranks_per_core))
    return {"collectives": rows, "overlap": hidden_share, "host": tuple(host)}
