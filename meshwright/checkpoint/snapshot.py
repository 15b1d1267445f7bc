"""A copy of a rank's state in memory that outlives the rank: segments held by the process that forked it.

A segment is anonymous shared memory: no name, so that nothing can leak, and gone with the last process that holds it.
Each rank has two and writes them in turn, so that one whole snapshot stands at any moment. What makes a snapshot whole
is its header, written last, whose checksum covers the table of parts, their checksums and the trainer's own values.

    header | table of parts (JSON) | crc32 of each part | the trainer's values (JSON) | data of the parts
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from meshwright.checkpoint.copier import Copier
from meshwright.checkpoint.tensor_shards import TensorShard, check_covered, digest, fill, itemsize
from meshwright.errors import CheckpointError
from meshwright.records import parse_json

if TYPE_CHECKING:
    from torch import Tensor

_HEADER = struct.Struct("<8sqqqqqqI")
_MAGIC = b"meshsnap"
_HEADER_BYTES = HEADER_BYTES = 64
"""Bytes of the header, which is written last: what it says of generation and step counts."""
_META_BYTES, _ALIGN = 64 * 1024, 64


class Segment:
    """Anonymous shared memory of a node; forked processes share it, and it goes when the last of them has gone."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("meshwright-snapshot", os.MFD_CLOEXEC)
        else:  # macOS: a file without a name
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())

    @property
    def size(self) -> int:
        """Bytes of the segment; 0 before anything was written."""
        return os.fstat(self.fd).st_size

    def map(self, size: int) -> mmap.mmap:
        """Makes the segment that long and returns its memory, present from the start.

        Raises:
            CheckpointError: when there is no memory for it.
        """
        try:
            os.ftruncate(self.fd, size)
            return mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        except OSError as error:
            raise CheckpointError(
                f"no memory for a snapshot of {size} bytes: {error.strerror}; give recovery.snapshot_every = 0"
            ) from error

    def close(self) -> None:
        """Lets go of the memory; a second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A part inside a snapshot."""

    part: TensorShard
    at: int
    """Where its data begins, in bytes from the segment's start."""
    checksum: int
    """crc32 of its data."""


class Snapshot:
    """What one segment holds: a rank's kept parts after a step."""

    def __init__(self, memory: memoryview, size: int | None = None) -> None:
        """Reads the header and the tables.

        Args:
            memory: of the segment, or its beginning.
            size: of the whole, where that is more.

        Raises:
            CheckpointError: when no whole snapshot is there.
        """
        self._memory, size = memory, len(memory) if size is None else size
        try:
            values = _HEADER.unpack_from(memory, 0)
        except struct.error as error:
            raise CheckpointError("an empty segment") from error
        magic, self.generation, self.step, table, parts, meta, data_at, crc = values
        spans = [0, _HEADER_BYTES, _HEADER_BYTES + table, _HEADER_BYTES + table + 4 * parts]
        end = spans[-1] + meta
        if magic != _MAGIC or min(table, parts, meta) < 0 or not end <= data_at <= size or end > len(memory):
            raise CheckpointError("no whole snapshot")
        if zlib.crc32(memory[_HEADER_BYTES:end], zlib.crc32(memory[: _HEADER.size - 4])) != crc:
            raise CheckpointError("a snapshot whose header is damaged")
        known = parse_json(bytes(memory[spans[1] : spans[2]]))
        sums = struct.unpack_from(f"<{parts}I", memory, spans[2])
        self.meta: dict[str, Any] = parse_json(bytes(memory[spans[3] : end]))
        """The trainer's own values."""
        self.tensors = str(known["tensors"])
        """Fingerprint of the whole state's tensors (`parts.digest`)."""
        self.rank = int(known["rank"])
        """Which rank wrote it."""
        self.ranks = int(known.get("ranks", 0))
        """How many ranks wrote snapshots of this step; 0 where that wasn't told."""
        self.kept: list[StoredShard] = []
        """Its parts."""
        at = data_at
        for values, checksum in zip(known["parts"], sums):
            part = TensorShard.from_json(values)
            self.kept.append(StoredShard(part, at, checksum))
            at += padded(part.size_bytes)
        if at > size:
            raise CheckpointError("a snapshot that is cut short")

    @property
    def size(self) -> int:
        """Bytes of the whole snapshot, as far as they lie here."""
        return len(self._memory)

    def read(self, at: int, size: int) -> memoryview:
        """Returns bytes of the segment."""
        return self._memory[at : at + size]

    def values(self, kept: StoredShard) -> Tensor:
        """Returns a part's values as a view of the segment, checked.

        Raises:
            CheckpointError: when they aren't what was written.
        """
        import torch

        dtype = getattr(torch, kept.part.dtype)
        return torch.frombuffer(self.data(kept), dtype=dtype).view(kept.part.sizes)

    def data(self, kept: StoredShard) -> memoryview:
        """Returns a part's bytes, checked.

        Raises:
            CheckpointError: when they aren't what was written.
        """
        part = kept.part
        data = self.read(kept.at, part.size_bytes)
        if zlib.crc32(data) != kept.checksum:
            where = f"rank {self.rank}'s snapshot of step {self.step}"
            raise CheckpointError(f"'{part.name}' {part.box} in {where} is damaged")
        return data


def peek(segment: Segment) -> tuple[int, int] | None:
    """Returns (generation, step) of the snapshot that a segment holds; None while it is being written."""
    found = header(os.pread(segment.fd, _HEADER_BYTES, 0))
    return found[:2] if found is not None else None


def header(memory: Any) -> tuple[int, int, int] | None:
    """Returns generation, step and where the data begins, as a segment's header says; None when it says nothing."""
    if len(memory) < _HEADER_BYTES:
        return None
    magic, generation, step, _, _, _, data_at, _ = _HEADER.unpack_from(memory, 0)
    return (generation, step, data_at) if magic == _MAGIC else None


def read_snapshots(segments: Iterable[Segment]) -> list[Snapshot]:
    """Returns the whole snapshots of some segments; what was being written when its rank died isn't one."""
    found = []
    for segment in segments:
        if segment.size:
            memory = memoryview(mmap.mmap(segment.fd, segment.size, access=mmap.ACCESS_COPY))
            try:
                found.append(Snapshot(memory))
            except CheckpointError:
                continue
    return found


class State:
    """The whole state after one step, from the snapshots of all ranks.

    Args:
        step: optimizer steps done.
        snapshots: of all ranks; those that lie elsewhere as functions that open them, called when they are needed.
        tier: where they lie: ``memory``, or ``peer`` where some are copies that other nodes kept.
    """

    def __init__(self, step: int, snapshots: Sequence[Snapshot | Callable[[], Snapshot]], tier: str = "memory") -> None:
        self.step, self.tier = step, tier
        self._given = tuple(snapshots)

    @cached_property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """All of them, open."""
        return tuple(one if isinstance(one, Snapshot) else one() for one in self._given)

    @property
    def meta(self) -> Mapping[str, Any]:
        """The trainer's own values."""
        return self.snapshots[0].meta

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(kept.part.size_bytes for snapshot in self.snapshots for kept in snapshot.kept)

    def tensors(self) -> dict[str, Tensor]:
        """Returns every tensor whole.

        Raises:
            CheckpointError: when a part is damaged.
        """
        import torch

        found: dict[str, Tensor] = {}
        for snapshot in self.snapshots:
            for part in (kept.part for kept in snapshot.kept):
                if part.name not in found:
                    found[part.name] = torch.empty(part.shape, dtype=getattr(torch, part.dtype))
        self.fill(found)
        return found

    def fill(self, targets: Mapping[str, Any]) -> None:
        """Fills this rank's tensors, of any layout, in place.

        Raises:
            CheckpointError: when the state is another model's, or damaged; see `parts.fill`.
        """
        names = {kept.part.name for snapshot in self.snapshots for kept in snapshot.kept}
        if missing := [name for name in targets if name not in names]:
            raise CheckpointError(f"the snapshot of step {self.step} has no {', '.join(missing[:4])}")
        sources: dict[TensorShard, Callable[[], Tensor]] = {
            kept.part: (lambda snapshot=snapshot, kept=kept: snapshot.values(kept))  # type: ignore[misc]
            for snapshot in self.snapshots
            for kept in snapshot.kept
        }
        fill(targets, sources)


def whole_states(snapshots: Iterable[Snapshot]) -> list[State]:
    """Returns every step of which each element is there exactly once, newest first."""
    by_step: dict[tuple[int, int], list[Snapshot]] = {}
    for one in snapshots:
        by_step.setdefault((one.step, one.generation), []).append(one)
    found = []
    for (step, _), held in sorted(by_step.items(), reverse=True):
        parts = [kept.part for one in held for kept in one.kept]
        try:
            check_covered(parts)
        except CheckpointError:
            continue
        if all(one.tensors == digest(parts) for one in held):
            found.append(State(step, tuple(held)))
    return found


class SnapshotWriter:
    """Copies a rank's kept parts into its segments, in turn; the copy alone holds up training, on a GPU not even that.

    Checksums are made by a thread once the copy is done, and the snapshot counts from then on.

    Args:
        segments: two or more, which outlive this process.
        rank: this rank.
        generation: how many times the ranks of this run were started before.
        tensors: fingerprint of the whole state's tensors.
        ranks: how many ranks write snapshots; 0 to leave that open.
        held: this rank's parts, in the order of `parts.parts_of`.
        kept: which of them it keeps (`parts.keepers`).
        changing: how the names of tensors begin that a forward may change, not updates alone; empty for none.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        *,
        rank: int,
        generation: int,
        tensors: str,
        ranks: int = 0,
        held: Sequence[TensorShard],
        kept: Sequence[tuple[int, TensorShard]],
        changing: str = "",
    ) -> None:
        self._generation = generation
        self._kept = [part for _, part in kept]
        self._table = _table(rank, self._kept, tensors, ranks)
        end = _HEADER_BYTES + len(self._table) + 4 * len(self._kept) + _META_BYTES
        self._data_at = (end + mmap.PAGESIZE - 1) // mmap.PAGESIZE * mmap.PAGESIZE
        size = self._data_at + sum(padded(part.size_bytes) for part in self._kept)
        self._maps = [segment.map(max(size, mmap.PAGESIZE)) for segment in segments]
        self._views = [self._open(memory) for memory in self._maps]
        self.copier = Copier(held, kept, changing)
        """Copies the state; its event is what the next update waits for."""
        self._turn = 0
        self._thread: threading.Thread | None = None
        self.size_bytes = size
        """Bytes of one snapshot of this rank."""

    def _open(self, memory: mmap.mmap) -> list[Tensor]:
        import torch

        views, at = [], self._data_at
        for part in self._kept:
            flat = torch.frombuffer(
                memory, dtype=getattr(torch, part.dtype), offset=at, count=part.size_bytes // itemsize(part.dtype)
            )
            views.append(flat.view(part.sizes))
            at += padded(part.size_bytes)
        return views

    def take(self, step: int, tensors: Mapping[str, Any] | None, meta: Mapping[str, Any]) -> float:
        """Copies the state after ``step`` steps; it counts once its checksums are made, moments later.

        Args:
            step: optimizer steps done.
            tensors: the state, as `parts.parts_of` takes it; None for the same memory as the last time.
            meta: plain values of the trainer, the same on every rank.

        Returns:
            Seconds that training was held up.

        Raises:
            CheckpointError: when ``meta`` is too long, or the state isn't what the writer was made for.
        """
        began = time.perf_counter()
        told = json.dumps(dict(meta), separators=(",", ":")).encode()
        if len(told) > _META_BYTES:
            raise CheckpointError(f"a snapshot takes {_META_BYTES} bytes of the trainer's own values, not {len(told)}")
        if tensors is not None:
            self.copier.aim(tensors)
        self.wait()
        memory, views = self._maps[self._turn], self._views[self._turn]
        self._turn = (self._turn + 1) % len(self._maps)
        memory[:_HEADER_BYTES] = bytes(_HEADER_BYTES)
        self.copier.copy(views, memory)
        self._thread = threading.Thread(target=self._seal, args=(memory, step, told), name="snapshot", daemon=True)
        self._thread.start()
        return time.perf_counter() - began

    def wait(self) -> None:
        """Waits until the last snapshot counts."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _seal(self, memory: mmap.mmap, step: int, meta: bytes) -> None:
        self.copier.wait()
        data = memoryview(memory)
        sums, at = [], self._data_at
        for part in self._kept:
            sums.append(zlib.crc32(data[at : at + part.size_bytes]))
            at += padded(part.size_bytes)
        head, told = _front(self._generation, step, self._table, sums, meta, self._data_at)
        memory[_HEADER_BYTES : _HEADER_BYTES + len(told)] = told
        memory[:_HEADER_BYTES] = head


def encode(rank: int, parts: Sequence[TensorShard], data: Sequence[Any], tensors: str) -> bytes:
    """Returns what stands in a file before the data of a rank's parts: header, table and checksums, padded."""
    sums = [zlib.crc32(one) for one in data]
    table = _table(rank, parts, tensors)
    data_at = padded(_HEADER_BYTES + len(table) + 4 * len(sums) + 2)
    head, told = _front(0, 0, table, sums, b"{}", data_at)
    return (head + told).ljust(data_at, b"\0")


def _table(rank: int, parts: Sequence[TensorShard], tensors: str, ranks: int = 0) -> bytes:
    told = {"rank": rank, "ranks": ranks, "tensors": tensors, "parts": [part.to_json() for part in parts]}
    return json.dumps(told, separators=(",", ":")).encode()


def _front(
    generation: int, step: int, table: bytes, sums: Sequence[int], meta: bytes, data_at: int
) -> tuple[bytes, bytes]:
    """Returns the header, and what follows it."""
    told = table + struct.pack(f"<{len(sums)}I", *sums) + meta
    head = _HEADER.pack(_MAGIC, generation, step, len(table), len(sums), len(meta), data_at, 0)[:-4]
    return (head + struct.pack("<I", zlib.crc32(told, zlib.crc32(head)))).ljust(_HEADER_BYTES, b"\0"), told


def padded(size: int) -> int:
    """Returns the bytes that data of this size takes: parts begin at multiples of 64."""
    return (size + _ALIGN - 1) // _ALIGN * _ALIGN
