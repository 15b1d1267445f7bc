"""Where every rank stands and what it waits for: one small memory-mapped file, a fixed record for each rank.

A rank stamps its record at every change of phase and of layer, which costs about half a microsecond and no system call;
the stamps outlive a killed or hanging rank, also one that hangs with the interpreter's lock in its hand. Readers on the
same host see them at once. Times are CLOCK_MONOTONIC, which all processes of a host share: ranks of several hosts need
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
    "snapshot", "record", "restore", "compare",
)  # fmt: skip
"""Phases by code; new ones go to the end."""

# Version, pid, generation, micro-batch, step, time, phase, layer, number, bytes, waits for, version: 128 bytes. Each
# rank has two of these slots and writes them in turn, so that a rank killed within a stamp leaves the one before.
# Packing stores the first version first and the last one last; a reader takes the last, then the slot, then the first,
# and trusts it when they agree.
_WORDS = 77
_SLOT = struct.Struct(f"<IiiiqdBhiq{_WORDS}sI")
_VERSION = struct.Struct("<I")
_RANK_BYTES = 2 * _SLOT.size
_CODES = {name: code for code, name in enumerate(PHASES)}
_READS = 64
NO_LAYER = -1
"""Stands for no layer: what comes before the first one, after the last one, and between steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStamp:
    """The last stamp of one rank."""

    rank: int
    """Global rank."""
    pid: int
    """Process that stamped."""
    generation: int
    """How often the run was restarted before this process."""
    step: int
    """Step under way, counted from 1; 0 before the first."""
    micro: int
    """Micro-batch under way."""
    phase: str
    """One of `PHASES`."""
    waits_for: str
    """What the rank waits for, as ``all_reduce over replicate``; empty when it computes."""
    since: float
    """time.monotonic() of the stamp."""
    number: int = 0
    """Which collective of the step it waits for, or waited for last, counted from 1; 0 before the first."""
    layer: int = NO_LAYER
    """Which of the model's layers it runs, counted from 0 as in their names; `NO_LAYER` for none."""
    size_bytes: int = 0
    """Bytes that it puts on the wire for what it waits for; 0 where that isn't known."""

    @property
    def collective(self) -> str:
        """What it waits for, how large that is, and which of the step's collectives."""
        size = f", {format_bytes(self.size_bytes)}" if self.size_bytes else ""
        return f"{self.waits_for}{size}" + (f" ({ordinal(self.number)} of the step)" if self.number else "")

    @property
    def place(self) -> str:
        """Where it stands: ``backward of step 12, layer 3,`` or ``data of step 12``."""
        return f"{self.phase} of step {self.step}" + (f", layer {self.layer}," if self.layer >= 0 else "")

    def age_s(self, now: float | None = None) -> float:
        """Returns the seconds since the stamp."""
        return max(0.0, (time.monotonic() if now is None else now) - self.since)


class ProgressWriter:
    """Stamps one rank's record."""

    def __init__(self, path: Path, rank: int, generation: int = 0) -> None:
        """Maps the file, made longer where needed; several ranks may do so at once.

        Args:
            path: the progress file.
            rank: global rank, which is the record's place in the file.
            generation: how often the run was restarted before.

        Raises:
            RankError: when the file can't be written.
        """
        self._offset = rank * _RANK_BYTES
        self._generation = generation
        self._pid = os.getpid()
        self._version = 0
        self._place = (0, 0, _CODES["start"], 0)
        self._words: dict[str, bytes] = {"": b""}
        fd = -1
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            # A write at the own place extends the file and never shrinks it, as setting its length could.
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
        """Says where the rank stands now.

        Args:
            phase: one of `PHASES`.
            step: step under way, counted from 1.
            micro: micro-batch under way.
            waits_for: operation and axis that the rank is about to wait for, as ``all_reduce over replicate``.
            number: which collective of the step that is, or was the last that it waited for.
            layer: which of the model's layers runs.
            size_bytes: what the rank puts on the wire for what it waits for.
        """
        words = self._words.get(waits_for)
        if words is None:
            words = self._words[waits_for] = waits_for.encode()[:_WORDS]
        version = self._version = self._version % 0xFFFFFFFF + 1
        code = _CODES[phase]
        self._place = (micro, step, code, number)
        _SLOT.pack_into(
            self._map, self._offset + (version & 1) * _SLOT.size, version, self._pid, self._generation, micro, step,
            time.monotonic(), code, layer, number, size_bytes, words, version,
        )  # fmt: skip

    def enter(self, layer: int) -> None:
        """Says which of the model's layers runs now, the rest being as it was stamped last; it waits for nothing."""
        version = self._version = self._version % 0xFFFFFFFF + 1
        micro, step, code, number = self._place
        _SLOT.pack_into(
            self._map, self._offset + (version & 1) * _SLOT.size, version, self._pid, self._generation, micro, step,
            time.monotonic(), code, layer, number, 0, b"", version,
        )  # fmt: skip

    def close(self) -> None:
        """Stamps ``done`` and unmaps the file; a second call does nothing."""
        if not self._map.closed:
            self.stamp("done")
            self._map.close()


def node_progress(node: int) -> str:
    """Returns the name of the file of a node's ranks, where several nodes share a run directory."""
    return f"node-{node}-{PROGRESS}"


def reset_progress(path: Path, ranks: int) -> None:
    """Makes an empty progress file for this many ranks, before any of them starts; an older one is replaced."""
    beside = path.with_name(path.name + ".new")
    beside.write_bytes(bytes(ranks * _RANK_BYTES))
    beside.replace(path)


def read_progress(path: Path) -> list[RankStamp]:
    """Returns the last stamp of every rank that has stamped, in order of ranks; none when there is no file."""
    try:
        with path.open("rb") as file:
            ranks = os.fstat(file.fileno()).st_size // _RANK_BYTES
            if not ranks:
                return []
            with mmap.mmap(file.fileno(), ranks * _RANK_BYTES, access=mmap.ACCESS_READ) as view:
                found = [_read_rank(view, rank) for rank in range(ranks)]
    except FileNotFoundError:
        return []
    return [progress for progress in found if progress is not None]


def _read_rank(view: mmap.mmap, rank: int) -> RankStamp | None:
    """Returns the newer whole slot of a rank; None when it never stamped."""
    base = rank * _RANK_BYTES
    for _ in range(_READS):
        slots = [slot for slot in (_read_slot(view, base), _read_slot(view, base + _SLOT.size)) if slot is not None]
        if slots:
            newest = max(slots, key=lambda slot: slot[5])
            _, pid, generation, micro, step, since, code, layer, number, size, words, _ = newest
            text = words.rstrip(b"\0").decode("utf-8", "replace")
            return RankStamp(
                rank=rank, pid=pid, generation=generation, step=step, micro=micro, phase=PHASES[code], waits_for=text,
                since=since, number=number, layer=layer, size_bytes=size,
            )  # fmt: skip
        if not any(view[base : base + _RANK_BYTES]):
            return None
    return None


def _read_slot(view: mmap.mmap, offset: int) -> tuple[Any, ...] | None:
    (last,) = _VERSION.unpack_from(view, offset + _SLOT.size - _VERSION.size)
    slot = _SLOT.unpack_from(view, offset)
    (first,) = _VERSION.unpack_from(view, offset)
    return slot if last and first == last == slot[0] == slot[-1] and slot[6] < len(PHASES) else None


def waiting_sentences(
    ranks: Sequence[RankStamp],
    after_s: float = 1.0,
    describe: Callable[[int], str] | None = None,
    now: float | None = None,
    limit: int = 8,
) -> list[str]:
    """Says which ranks wait and where the others stand, one sentence for each group that waits for the same.

    Args:
        ranks: the last stamps.
        after_s: seconds of waiting that are not worth a word.
        describe: turns a rank into ``rank 1: replicate 1``, as `Layout.describe_rank` does.
        now: time.monotonic() to measure against; the present by default.
        limit: most sentences; what is left is counted in one more.

    Returns:
        Sentences such as ``rank 1 [replicate 1] waits in backward of step 12 for all_reduce over replicate since
        4.2 s; rank 0 is in data``; none when nobody waits.
    """
    groups: dict[tuple[str, str], list[RankStamp]] = {}
    for one in ranks:
        if one.waits_for and one.age_s(now) >= after_s:
            groups.setdefault((one.place, one.collective), []).append(one)
    waiting = {one.rank for group in groups.values() for one in group}
    standing = _standing([one for one in ranks if one.rank not in waiting])
    sentences = []
    for (place, words), group in groups.items():
        longest = max(one.age_s(now) for one in group)
        verb = "waits" if len(group) == 1 else "wait"
        who = f"{_names(group, describe)} {verb}"
        sentences.append(f"{who} in {place} for {words} since {longest:.1f} s")
    if len(sentences) > limit:
        sentences[limit:] = [f"{len(sentences) - limit} more groups wait"]
    if sentences and standing:
        sentences[0] += f"; {standing}"
    return sentences


def _names(group: Sequence[RankStamp], describe: Callable[[int], str] | None) -> str:
    if len(group) == 1:
        rank = group[0].rank
        place = describe(rank).partition(": ")[2] if describe is not None else ""
        return f"rank {rank}" + (f" [{place}]" if place else "")
    return f"ranks {spans([one.rank for one in group])}"


def _standing(ranks: Sequence[RankStamp]) -> str:
    phases: dict[str, list[int]] = {}
    for one in ranks:
        phases.setdefault(one.phase, []).append(one.rank)
    return ", ".join(
        f"rank {found[0]} is in {phase}" if len(found) == 1 else f"ranks {spans(found)} are in {phase}"
        for phase, found in phases.items()
    )


def ordinal(number: int) -> str:
    """Returns ``1st``, ``2nd``, ``3rd``, ``4th``, ``11th``."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{ending}"


def spans(ranks: Sequence[int]) -> str:
    """Returns ``0-3, 7`` for 0, 1, 2, 3 and 7."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in found)
