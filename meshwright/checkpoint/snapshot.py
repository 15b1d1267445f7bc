"""Snapshots of a rank's state in shared memory that outlive the rank, held by the process that forked it.

A segment is anonymous shared memory: it has no name that could leak, and goes with the last process that holds it.
Each rank alternates between two segments, so that one complete snapshot exists at any moment. A snapshot is complete
when its header is written, which happens last. The header's checksum covers the table of shards, their checksums and
the trainer's own values.

    header | table of shards (JSON) | crc32 of each shard | the trainer's values (JSON) | data of the shards
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from meshwright.checkpoint.tensor_shards import TensorShard, check_covered, digest, fill
from meshwright.errors import CheckpointError
from meshwright.json_types import JsonObject
from meshwright.parallel.dcp_shards import StateTensor
from meshwright.records import parse_json

_HEADER = struct.Struct("<8sqqqqqqI")
_MAGIC = b"meshsnap"
HEADER_BYTES = 64
"""Bytes of the header, which is written last: a snapshot is complete once it is there."""
META_BYTES = 64 * 1024
"""Bytes reserved for the trainer's own values, up front since data must not move."""
_ALIGN = 64
"""Bytes to a multiple of which each shard's data is aligned."""
PIECE_BYTES = 1 << 28
"""Bytes of a segment that are allocated at a time, and that a GPU's driver is told of at a time."""


class Segment:
    """Anonymous shared memory of a node, shared by forked processes and freed when the last of them ends."""

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

    def allocate(self, size: int) -> None:
        """Resizes the segment and has its pages allocated, piece by piece and without Python's lock: for a thread.

        Raises:
            CheckpointError: when there is no memory for it.
        """
        try:
            os.ftruncate(self.fd, size)
            for start in range(0, size, PIECE_BYTES):
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(self.fd, start, min(PIECE_BYTES, size - start))
        except OSError as error:
            raise _no_memory(size, error) from error

    def map(self, size: int, populates: bool = True) -> mmap.mmap:
        """Resizes the segment and returns its memory, with all pages allocated at once.

        Args:
            size: bytes.
            populates: False leaves the pages to whoever touches them, where `allocate` has made room for them.

        Raises:
            CheckpointError: when there is no memory for it.
        """
        try:
            # MAP_POPULATE allocates now: a full memory shows here as an error, not later as a bus error in a copy.
            os.ftruncate(self.fd, size)
            populate = getattr(mmap, "MAP_POPULATE", 0) if populates else 0
            return mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED | populate)
        except OSError as error:
            raise _no_memory(size, error) from error

    def close(self) -> None:
        """Closes the segment; a second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _no_memory(size: int, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"no memory for a snapshot of {size} bytes: {error.strerror}; give recovery.snapshot_every = 0"
    )


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A tensor shard inside a snapshot."""

    shard: TensorShard
    """Tensor, box and dtype."""
    offset: int
    """Bytes from the segment's start to its data."""
    checksum: int
    """crc32 of its data."""


class Snapshot:
    """A complete snapshot in one segment: the shards that a rank saves after a step."""

    def __init__(self, memory: memoryview, size: int | None = None) -> None:
        """Reads the header and the tables.

        Args:
            memory: the segment, or a prefix that holds the header and the tables.
            size: bytes of the whole snapshot, where ``memory`` is a prefix.

        Raises:
            CheckpointError: when the memory holds no complete snapshot.
        """
        self._memory, size = memory, len(memory) if size is None else size
        try:
            fields = _HEADER.unpack_from(memory, 0)
        except struct.error as error:
            raise CheckpointError("an empty segment") from error
        magic, self.generation, self.step, table_bytes, shard_count, meta_bytes, data_at, header_crc = fields
        # Starts of header, table of shards, checksums and the trainer's values.
        section_offsets = [0, HEADER_BYTES, HEADER_BYTES + table_bytes, HEADER_BYTES + table_bytes + 4 * shard_count]
        meta_end = section_offsets[-1] + meta_bytes
        # Every length is checked before any section is read: a damaged header must not cause a read out of bounds.
        if (
            magic != _MAGIC
            or min(table_bytes, shard_count, meta_bytes) < 0
            or not meta_end <= data_at <= size
            or meta_end > len(memory)
        ):
            raise CheckpointError("no whole snapshot")
        # One checksum over header (without its own field) and tables: an overwritten or torn table never passes.
        if zlib.crc32(memory[HEADER_BYTES:meta_end], zlib.crc32(memory[: _HEADER.size - 4])) != header_crc:
            raise CheckpointError("a snapshot whose header is damaged")
        table_fields = parse_json(bytes(memory[section_offsets[1] : section_offsets[2]]))
        checksums = struct.unpack_from(f"<{shard_count}I", memory, section_offsets[2])
        self.meta: JsonObject = parse_json(bytes(memory[section_offsets[3] : meta_end]))
        """The trainer's own values."""
        self.tensors = str(table_fields["tensors"])
        """Fingerprint of the whole state's tensors (`tensor_shards.digest`)."""
        self.rank = int(table_fields["rank"])
        """Which rank wrote it."""
        self.ranks = int(table_fields.get("ranks", 0))
        """How many ranks wrote snapshots of this step; 0 where the writer didn't record it."""
        self.stored_shards: list[StoredShard] = []
        """Its shards, by ascending offset."""
        offset, align = data_at, int(table_fields.get("align", _ALIGN))
        if not 1 <= align <= META_BYTES:
            raise CheckpointError(f"a snapshot whose shards begin at multiples of {align} bytes")
        for shard_fields, checksum in zip(table_fields["parts"], checksums):
            shard = TensorShard.from_json(shard_fields)
            self.stored_shards.append(StoredShard(shard, offset, checksum))
            offset += pad_to_alignment(shard.size_bytes, align)
        if offset > size:
            raise CheckpointError("a snapshot that is cut short")

    @property
    def size(self) -> int:
        """Bytes of the snapshot in this process's memory."""
        return len(self._memory)

    def read(self, offset: int, size: int) -> memoryview:
        """Returns ``size`` bytes of the segment from ``offset`` on."""
        return self._memory[offset : offset + size]

    def values(self, stored: StoredShard) -> Tensor:
        """Returns a shard's verified values: a CPU tensor of its box's shape and dtype, a view of the segment.

        Raises:
            CheckpointError: when their checksum doesn't match.
        """
        dtype = getattr(torch, stored.shard.dtype)
        return torch.frombuffer(self.data(stored), dtype=dtype).view(stored.shard.sizes)

    def data(self, stored: StoredShard) -> memoryview:
        """Returns a shard's verified bytes.

        Raises:
            CheckpointError: when their checksum doesn't match.
        """
        shard = stored.shard
        # The checksum is verified at every read: memory may decay between snapshot and recovery.
        data = self.read(stored.offset, shard.size_bytes)
        if zlib.crc32(data) != stored.checksum:
            snapshot_label = f"rank {self.rank}'s snapshot of step {self.step}"
            raise CheckpointError(f"'{shard.name}' {shard.box} in {snapshot_label} is damaged")
        return data


def read_step(segment: Segment) -> tuple[int, int] | None:
    """Reads (generation, step) of a segment's snapshot; None while it is being written."""
    header_fields = parse_header(os.pread(segment.fd, HEADER_BYTES, 0))
    return header_fields[:2] if header_fields is not None else None


def parse_header(memory: bytes | memoryview | mmap.mmap) -> tuple[int, int, int] | None:
    """Parses (generation, step, offset of the data in bytes) from a segment's header; None when it is blank."""
    if len(memory) < HEADER_BYTES:
        return None
    magic, generation, step, _, _, _, data_at, _ = _HEADER.unpack_from(memory, 0)
    return (generation, step, data_at) if magic == _MAGIC else None


def read_snapshots(segments: Iterable[Segment]) -> list[Snapshot]:
    """Returns the complete snapshots of some segments; skips those that a dying rank left half-written."""
    snapshots = []
    for segment in segments:
        if segment.size:
            # A private mapping: whoever reads can't change the snapshot.
            memory = memoryview(mmap.mmap(segment.fd, segment.size, access=mmap.ACCESS_COPY))
            try:
                snapshots.append(Snapshot(memory))
            except CheckpointError:
                continue
    return snapshots


class State:
    """The full training state after one step, from the snapshots of all ranks.

    Args:
        step: optimizer steps done.
        snapshots: of all ranks; a remote one as a function that opens it, called at first use.
        tier: ``memory``, or ``peer`` where some are copies in other nodes' memory.
    """

    def __init__(self, step: int, snapshots: Sequence[Snapshot | Callable[[], Snapshot]], tier: str = "memory") -> None:
        self.step, self.tier = step, tier
        self._sources = tuple(snapshots)

    @cached_property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """The snapshots of all ranks, opened."""
        return tuple(source if isinstance(source, Snapshot) else source() for source in self._sources)

    @property
    def meta(self) -> JsonObject:
        """The trainer's own values."""
        return self.snapshots[0].meta

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return {stored.shard.name for snapshot in self.snapshots for stored in snapshot.stored_shards}

    @property
    def size_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(stored.shard.size_bytes for snapshot in self.snapshots for stored in snapshot.stored_shards)

    def tensors(self) -> dict[str, Tensor]:
        """Returns every full tensor by name, on the CPU, in its global shape and saved dtype.

        Raises:
            CheckpointError: when a shard is damaged.
        """
        full_tensors: dict[str, Tensor] = {}
        for snapshot in self.snapshots:
            for shard in (stored.shard for stored in snapshot.stored_shards):
                if shard.name not in full_tensors:
                    full_tensors[shard.name] = torch.empty(shard.shape, dtype=getattr(torch, shard.dtype))
        self.fill(full_tensors)
        return full_tensors

    def fill(self, targets: Mapping[str, StateTensor]) -> None:
        """Fills this rank's tensors, of any layout, in place.

        Raises:
            CheckpointError: when the state is another model's, or damaged; see `tensor_shards.fill`.
        """
        names = self.names
        if missing := [name for name in targets if name not in names]:
            raise CheckpointError(f"the snapshot of step {self.step} has no {', '.join(missing[:4])}")
        sources: dict[TensorShard, Callable[[], Tensor]] = {
            stored.shard: (lambda snapshot=snapshot, stored=stored: snapshot.values(stored))  # type: ignore[misc]
            for snapshot in self.snapshots
            for stored in snapshot.stored_shards
        }
        fill(targets, sources)


def find_complete_states(snapshots: Iterable[Snapshot]) -> list[State]:
    """Returns the states whose snapshots hold every element exactly once, newest first."""
    by_step: dict[tuple[int, int], list[Snapshot]] = {}
    for snapshot in snapshots:
        # Ranks of different generations may have snapshots of the same step under different layouts.
        by_step.setdefault((snapshot.step, snapshot.generation), []).append(snapshot)
    states = []
    for (step, _), step_snapshots in sorted(by_step.items(), reverse=True):
        shards = [stored.shard for snapshot in step_snapshots for stored in snapshot.stored_shards]
        try:
            check_covered(shards)
        except CheckpointError:
            continue
        # Covered tensors may still be a subset of the model: the fingerprint shows that none is missing.
        if all(snapshot.tensors == digest(shards) for snapshot in step_snapshots):
            states.append(State(step, tuple(step_snapshots)))
    return states


def encode_image_header(rank: int, shards: Sequence[TensorShard], data: Sequence[memoryview], tensors: str) -> bytes:
    """Encodes the front of an image file, before the shards' data: header, table and checksums, padded."""
    checksums = [zlib.crc32(shard_bytes) for shard_bytes in data]
    table = encode_table(rank, shards, tensors)
    # 2 bytes for the empty JSON object of the trainer's values.
    data_at = pad_to_alignment(HEADER_BYTES + len(table) + 4 * len(checksums) + 2)
    header_bytes, tables = pack_header(0, 0, table, checksums, b"{}", data_at)
    return (header_bytes + tables).ljust(data_at, b"\0")


def encode_table(
    rank: int, shards: Sequence[TensorShard], tensors: str, ranks: int = 0, align: int | None = None
) -> bytes:
    """Encodes the table of a rank's shards.

    Args:
        rank: that saves them.
        shards: in the order of their data.
        tensors: fingerprint of the whole state's tensors.
        ranks: how many ranks save some; 0 where that is unknown.
        align: bytes to a multiple of which each shard's data is aligned; None for the usual 64.
    """
    table_fields = {"rank": rank, "ranks": ranks, "tensors": tensors, "parts": [shard.to_json() for shard in shards]}
    table_fields |= {} if align is None else {"align": align}
    return json.dumps(table_fields, separators=(",", ":")).encode()


def pack_header(
    generation: int, step: int, table: bytes, checksums: Sequence[int], meta: bytes, data_at: int
) -> tuple[bytes, bytes]:
    """Packs the header; returns it and the tables that follow it."""
    tables = table + struct.pack(f"<{len(checksums)}I", *checksums) + meta
    header_bytes = _HEADER.pack(_MAGIC, generation, step, len(table), len(checksums), len(meta), data_at, 0)[:-4]
    return (header_bytes + struct.pack("<I", zlib.crc32(tables, zlib.crc32(header_bytes)))).ljust(
        HEADER_BYTES, b"\0"
    ), tables


def pad_to_alignment(size: int, align: int | None = None) -> int:
    """Rounds a size in bytes up to a multiple of ``align``, by default 64, where the next shard's data begins."""
    align = align or _ALIGN
    return (size + align - 1) // align * align
