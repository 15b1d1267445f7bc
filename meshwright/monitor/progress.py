"""Progress of every rank, and the collective that it waits for: one memory-mapped file with a fixed record a rank.

A rank stamps its record at every change of phase and of layer, which costs about half a microsecond and no system call.
The stamps outlive a killed or hanging rank, also one that hangs while it holds the GIL. Readers on the same host see
them at once. Times are CLOCK_MONOTONIC, which all processes of a host share: ranks of several hosts need
a file each.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import RankError
from meshwright.units import format_bytes

PROGRESS = "progress.bin"
PHASES = (
    "start", "data", "forward", "backward", "reduce", "optimizer", "evaluate", "checkpoint", "sample", "export", "done",
    "snapshot", "record", "restore", "compare", "join", "server",
)  # fmt: skip
"""Phases by code; new ones go to the end."""

# Version, pid, generation, micro-batch, step, time, phase, layer, number, bytes, waits for, version: 128 bytes. Each
# rank alternates between two of these slots, so that a rank killed within a stamp leaves the older one intact.
# Packing stores the leading version first and the trailing one last. A reader reads the trailing one, then the slot,
# then the leading one, and trusts the slot when they agree (a sequence lock).
_TEXT_BYTES = 77
_SLOT = struct.Struct(f"<IiiiqdBhiq{_TEXT_BYTES}sI")
_VERSION = struct.Struct("<I")
_RANK_BYTES = 2 * _SLOT.size
_CODES = {name: code for code, name in enumerate(PHASES)}
_READ_ATTEMPTS = 64
NO_LAYER = -1
"""No layer: work before the first one, after the last one, and between steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStamp:
    """The last stamp of one rank."""

    rank: int
    """Global rank."""
    pid: int
    """Process id of the rank."""
    generation: int
    """Number of restarts of the run before this process."""
    step: int
    """Current step, counted from 1; 0 before the first."""
    micro: int
    """Current micro-batch."""
    phase: str
    """One of `PHASES`."""
    waits_for: str
    """Collective that the rank waits for, as ``all_reduce over replicate``; empty when it computes."""
    since: float
    """time.monotonic() of the stamp."""
    number: int = 0
    """Number of that collective, or of the last one, within the step, counted from 1; 0 before the first."""
    layer: int = NO_LAYER
    """Index of the layer that it runs, counted from 0 as in their names; `NO_LAYER` for none."""
    size_bytes: int = 0
    """Bytes that this rank sends in that collective; 0 where unknown."""

    @property
    def collective(self) -> str:
        """The awaited collective, with size and number: ``all_reduce over tp, 2.00 MiB (3rd of the step)``."""
        size = f", {format_bytes(self.size_bytes)}" if self.size_bytes else ""
        return f"{self.waits_for}{size}" + (f" ({ordinal(self.number)} of the step)" if self.number else "")

    @property
    def place(self) -> str:
        """Phase, step and layer: ``backward of step 12, layer 3,`` or ``data of step 12``."""
        return f"{self.phase} of step {self.step}" + (f", layer {self.layer}," if self.layer >= 0 else "")

    def age_s(self, now: float | None = None) -> float:
        """Returns the seconds since the stamp."""
        return max(0.0, (time.monotonic() if now is None else now) - self.since)


class ProgressWriter:
    """Writes one rank's record."""

    def __init__(self, path: Path, rank: int, generation: int = 0) -> None:
        """Maps the file and extends it where needed; several ranks may do so at once.

        Args:
            path: the progress file.
            rank: global rank, the index of the record in the file.
            generation: number of restarts of the run before this process.

        Raises:
            RankError: when the file can't be written.
        """
        self._offset = rank * _RANK_BYTES
        self._generation = generation
        self._pid = os.getpid()
        self._version = 0
        self._position = (0, 0, _CODES["start"], 0)
        self._encoded: dict[str, bytes] = {"": b""}
        fd = -1
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            # Writing this rank's record extends the file and never shrinks it, as ftruncate by a slower rank could.
            os.pwrite(fd, bytes(_RANK_BYTES), self._offset)
            self._map = mmap.mmap(fd, self._offset + _RANK_BYTES)
        except OSError as error:
            raise RankError(f"{path} can't be written: {error.strerror}; free space or move the run") from error
        finally:
            if fd >= 0:
                os.close(fd)
        self.stamp("start")

    def stamp(
        self,
        phase: str,
        step: int = 0,
        micro: int = 0,
        waits_for: str = "",
        number: int = 0,
        layer: int = NO_LAYER,
        size_bytes: int = 0,
    ) -> None:
        """Stamps the rank's current phase.

        Args:
            phase: one of `PHASES`.
            step: current step, counted from 1.
            micro: current micro-batch.
            waits_for: operation and axis of the collective that the rank is about to wait for.
            number: of that collective, or of the last one, within the step.
            layer: index of the current layer.
            size_bytes: bytes that the rank sends in that collective.
        """
        encoded = self._encoded.get(waits_for)
        if encoded is None:
            # Encoded once for each collective: stamping must not allocate.
            encoded = self._encoded[waits_for] = waits_for.encode()[:_TEXT_BYTES]
        version = self._version = self._version % 0xFFFFFFFF + 1
        phase_code = _CODES[phase]
        # Kept for `enter`, which stamps a layer of the same phase.
        self._position = (micro, step, phase_code, number)
        _SLOT.pack_into(
            self._map, self._offset + (version & 1) * _SLOT.size, version, self._pid, self._generation, micro, step,
            time.monotonic(), phase_code, layer, number, size_bytes, encoded, version,
        )  # fmt: skip

    def enter(self, layer: int) -> None:
        """Stamps the current layer, with phase and step of the last stamp, waiting for nothing."""
        version = self._version = self._version % 0xFFFFFFFF + 1
        micro, step, phase_code, number = self._position
        _SLOT.pack_into(
            self._map, self._offset + (version & 1) * _SLOT.size, version, self._pid, self._generation, micro, step,
            time.monotonic(), phase_code, layer, number, 0, b"", version,
        )  # fmt: skip

    def close(self) -> None:
        """Stamps ``done`` and unmaps the file; a second call does nothing."""
        if not self._map.closed:
            self.stamp("done")
            self._map.close()


def node_progress(node: int) -> str:
    """Returns the file name of a node's ranks, where several nodes share a run directory."""
    return f"node-{node}-{PROGRESS}"


def reset_progress(path: Path, ranks: int) -> None:
    """Creates an empty progress file for this many ranks, before any of them starts; it replaces an older one."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_bytes(bytes(ranks * _RANK_BYTES))
    # Replaced, not truncated: readers that map the old file keep valid memory.
    temporary.replace(path)


def read_progress(path: Path) -> list[RankStamp]:
    """Reads the last stamp of every rank that has stamped, in order of ranks; empty without a file."""
    try:
        with path.open("rb") as file:
            rank_count = os.fstat(file.fileno()).st_size // _RANK_BYTES
            if not rank_count:
                return []
            with mmap.mmap(file.fileno(), rank_count * _RANK_BYTES, access=mmap.ACCESS_READ) as view:
                stamps = [_read_rank(view, rank) for rank in range(rank_count)]
    except FileNotFoundError:
        return []
    return [stamp for stamp in stamps if stamp is not None]


def read_run_progress(run_dir: Path) -> list[RankStamp]:
    """Reads the last stamp of every rank of a run's newest generation, on one node or several; empty without any."""
    paths = sorted(run_dir.glob(f"*{PROGRESS}"), key=lambda path: path.stat().st_mtime)
    # A directory may hold files of an earlier command, which ran on one node where this one runs on several.
    alone = bool(paths) and paths[-1].name == PROGRESS
    stamps = [stamp for path in paths if (path.name == PROGRESS) == alone for stamp in read_progress(path)]
    newest = max((stamp.generation for stamp in stamps), default=0)
    return sorted((stamp for stamp in stamps if stamp.generation == newest), key=lambda stamp: stamp.rank)


def _read_rank(view: mmap.mmap, rank: int) -> RankStamp | None:
    """Reads the newer intact slot of a rank; None when it never stamped."""
    record_offset = rank * _RANK_BYTES
    for _ in range(_READ_ATTEMPTS):
        slots = [
            slot
            for slot in (_read_slot(view, record_offset), _read_slot(view, record_offset + _SLOT.size))
            if slot is not None
        ]
        if slots:
            # Both slots may be intact: the later time wins.
            newest = max(slots, key=lambda slot: slot[5])
            _, pid, generation, micro, step, since, phase_code, layer, number, size, encoded, _ = newest
            text = encoded.rstrip(b"\0").decode("utf-8", "replace")
            return RankStamp(
                rank=rank, pid=pid, generation=generation, step=step, micro=micro, phase=PHASES[phase_code],
                waits_for=text, since=since, number=number, layer=layer, size_bytes=size,
            )  # fmt: skip
        # All zeros: the rank has not started. Else both slots were torn by a write just now: read again.
        if not any(view[record_offset : record_offset + _RANK_BYTES]):
            return None
    return None


def _read_slot(view: mmap.mmap, offset: int) -> tuple[Any, ...] | None:
    """Reads a slot; None when it was never written, or is torn by a write in progress."""
    (trailing_version,) = _VERSION.unpack_from(view, offset + _SLOT.size - _VERSION.size)
    slot = _SLOT.unpack_from(view, offset)
    (leading_version,) = _VERSION.unpack_from(view, offset)
    return (
        slot
        if trailing_version and leading_version == trailing_version == slot[0] == slot[-1] and slot[6] < len(PHASES)
        else None
    )


def waiting_sentences(
    ranks: Sequence[RankStamp],
    after_s: float = 1.0,
    describe: Callable[[int], str] | None = None,
    now: float | None = None,
    limit: int = 8,
) -> list[str]:
    """Describes waiting ranks, one sentence for each group with the same collective, and the others' phases.

    Args:
        ranks: the last stamps.
        after_s: shortest wait to report, in seconds.
        describe: formats a rank as ``rank 1: replicate 1``, by `Layout.describe_rank`.
        now: time.monotonic() to measure against; the present by default.
        limit: most sentences; one more counts the remaining groups.

    Returns:
        Sentences such as ``rank 1 [replicate 1] waits in backward of step 12 for all_reduce over replicate since
        4.2 s; rank 0 is in data``; empty when no rank waits.
    """
    groups: dict[tuple[str, str], list[RankStamp]] = {}
    for stamp in ranks:
        if stamp.waits_for and stamp.age_s(now) >= after_s:
            groups.setdefault((stamp.place, stamp.collective), []).append(stamp)
    waiting = {stamp.rank for group in groups.values() for stamp in group}
    others_text = _describe_phases([stamp for stamp in ranks if stamp.rank not in waiting])
    sentences = []
    for (position, collective), group in groups.items():
        # The rank that waited longest stands for its group.
        longest = max(stamp.age_s(now) for stamp in group)
        verb = "waits" if len(group) == 1 else "wait"
        subject = f"{_rank_names(group, describe)} {verb}"
        sentences.append(f"{subject} in {position} for {collective} since {longest:.1f} s")
    # A hang of a thousand ranks must not fill the screen.
    if len(sentences) > limit:
        sentences[limit:] = [f"{len(sentences) - limit} more groups wait"]
    if sentences and others_text:
        sentences[0] += f"; {others_text}"
    return sentences


def _rank_names(group: Sequence[RankStamp], describe: Callable[[int], str] | None) -> str:
    if len(group) == 1:
        rank = group[0].rank
        coordinates = describe(rank).partition(": ")[2] if describe is not None else ""
        return f"rank {rank}" + (f" [{coordinates}]" if coordinates else "")
    return f"ranks {spans([one.rank for one in group])}"


def _describe_phases(ranks: Sequence[RankStamp]) -> str:
    """Describes in which phases ranks are: ``ranks 0-3 are in data``."""
    phases: dict[str, list[int]] = {}
    for stamp in ranks:
        phases.setdefault(stamp.phase, []).append(stamp.rank)
    return ", ".join(
        f"rank {phase_ranks[0]} is in {phase}"
        if len(phase_ranks) == 1
        else f"ranks {spans(phase_ranks)} are in {phase}"
        for phase, phase_ranks in phases.items()
    )


def ordinal(number: int) -> str:
    """Returns ``1st``, ``2nd``, ``3rd``, ``4th``, ``11th``."""
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{suffix}"


def spans(ranks: Sequence[int]) -> str:
    """Returns ``0-3, 7`` for 0, 1, 2, 3 and 7."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ", ".join(str(start) if start == stop else f"{start}-{stop}" for start, stop in ranges)
