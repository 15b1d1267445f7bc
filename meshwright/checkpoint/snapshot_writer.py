"""Writes a rank's snapshots into shared memory: copies the state, then its checksums and, last, the header."""

from __future__ import annotations

import json
import mmap
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from meshwright.checkpoint.copier import Copier
from meshwright.checkpoint.snapshot import (
    HEADER_BYTES,
    META_BYTES,
    PIECE_BYTES,
    Segment,
    encode_table,
    pack_header,
    pad_to_alignment,
)
from meshwright.checkpoint.tensor_shards import TensorShard, itemsize
from meshwright.errors import CheckpointError
from meshwright.json_types import JsonObject
from meshwright.parallel.dcp_shards import StateTensor


class SnapshotWriter:
    """Copies a rank's saved shards into its segments in turn.

    Only the copy blocks training; from a GPU it runs on a side stream and blocks only the next update. A thread then
    computes the checksums and writes the header, which completes the snapshot. Of a GPU's state, whose tens of GB take
    the kernel seconds to allocate, threads allocate the segments from the construction on.

    Args:
        segments: two or more, which outlive this process.
        rank: this rank.
        generation: how many times the ranks of this run were started before.
        tensors: fingerprint of the whole state's tensors.
        ranks: how many ranks write snapshots; 0 when unknown.
        local_shards: this rank's shards, in the order of `tensor_shards.collect_local_shards`.
        saved_shards: (index into ``local_shards``, shard) of those that it saves (`tensor_shards.assign_saved_shards`).
        changing: name prefix of the tensors that a forward may change (buffers); empty for none.
        device: the GPU that holds the state, or some of it; None where all of it is in host memory.
        threads: how many make the checksums.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        *,
        rank: int,
        generation: int,
        tensors: str,
        ranks: int = 0,
        local_shards: Sequence[TensorShard],
        saved_shards: Sequence[tuple[int, TensorShard]],
        changing: str = "",
        device: torch.device | None = None,
        threads: int = 1,
    ) -> None:
        self._generation, self._device, self._threads = generation, device, threads
        self._saved_shards = [shard for _, shard in saved_shards]
        # Of whole pages each, so that a GPU's driver can be told of some without the others.
        self._align = mmap.PAGESIZE if device is not None else None
        self._table = encode_table(rank, self._saved_shards, tensors, ranks, self._align)
        table_end = HEADER_BYTES + len(self._table) + 4 * len(self._saved_shards) + META_BYTES
        # Data starts on a page boundary, behind the room reserved for the trainer's values.
        self._data_at = (table_end + mmap.PAGESIZE - 1) // mmap.PAGESIZE * mmap.PAGESIZE
        size = self._data_at + sum(pad_to_alignment(shard.size_bytes, self._align) for shard in self._saved_shards)
        self.copier = Copier(local_shards, saved_shards, changing)
        """Copies the state; the next update waits for its event."""
        self._next_segment = 0
        self._thread: threading.Thread | None = None
        self.size_bytes = size
        """Bytes of one snapshot of this rank."""
        self.mapped_bytes = max(size, mmap.PAGESIZE) * len(segments)
        """Bytes of all its segments, resident in this process once they are allocated."""
        self._memories: list[mmap.mmap] = []
        self._views: list[list[Tensor]] = []
        self._registering = threading.Lock()
        self._mapping: list[Future[mmap.mmap]] = [Future() for _ in segments]
        for segment, future in zip(segments, self._mapping):
            if device is None:
                _settle(future, self._map, segment)
            else:
                arguments = (future, self._map, segment)
                threading.Thread(target=_settle, args=arguments, name="snapshot memory", daemon=True).start()
        if device is None:
            self._wait_for_memory()

    def _map(self, segment: Segment) -> mmap.mmap:
        """Maps a segment, and has the GPU know its memory."""
        size = self.mapped_bytes // len(self._mapping)
        if self._device is None:
            return segment.map(size)
        segment.allocate(size)
        memory = segment.map(size, populates=False)
        pages = torch.frombuffer(memory, dtype=torch.uint8)[:: mmap.PAGESIZE]
        for piece in pages.split(PIECE_BYTES // mmap.PAGESIZE):
            # Has the page in this process's table: else the driver finds each, and lets nobody launch meanwhile.
            piece.add_(0)
        with self._registering:
            self.copier.register(memory, self._device, self._pieces())
        return memory

    def _pieces(self) -> list[slice]:
        """Returns the bytes of some shards after the others, in pieces of about `PIECE_BYTES`."""
        pieces, start, offset = [], self._data_at, self._data_at
        for shard in self._saved_shards:
            offset += pad_to_alignment(shard.size_bytes, self._align)
            if offset - start >= PIECE_BYTES:
                pieces.append(slice(start, offset))
                start = offset
        return [*pieces, *([slice(start, offset)] if offset > start else [])]

    def _wait_for_memory(self) -> None:
        """Waits until all segments are allocated.

        Raises:
            CheckpointError: when there is no memory for them.
        """
        if not self._memories:
            memories = [future.result() for future in self._mapping]
            self._views = [self._map_views(memory) for memory in memories]
            self._memories = memories

    def _map_views(self, memory: mmap.mmap) -> list[Tensor]:
        """Returns a tensor view of each saved shard in a segment: its box's shape and dtype, on the CPU."""
        views, offset = [], self._data_at
        for shard in self._saved_shards:
            flat_view = torch.frombuffer(
                memory,
                dtype=getattr(torch, shard.dtype),
                offset=offset,
                count=shard.size_bytes // itemsize(shard.dtype),
            )
            views.append(flat_view.view(shard.sizes))
            offset += pad_to_alignment(shard.size_bytes, self._align)
        return views

    def save(self, step: int, tensors: Mapping[str, StateTensor] | None, meta: JsonObject) -> float:
        """Copies the state after ``step`` steps; the snapshot is complete moments later, with its checksums.

        Args:
            step: optimizer steps done.
            tensors: name to tensor, as for `tensor_shards.collect_local_shards`; None for the memory of the last call.
            meta: plain values of the trainer, of which those of rank 0 are read; an island's own are in its tensors.

        Returns:
            Seconds that training was blocked.

        Raises:
            CheckpointError: when ``meta`` is too long, or the state has other shards than the writer.
        """
        began = time.perf_counter()
        meta_json = json.dumps(dict(meta), separators=(",", ":")).encode()
        if len(meta_json) > META_BYTES:
            raise CheckpointError(
                f"a snapshot takes {META_BYTES} bytes of the trainer's own values, not {len(meta_json)}"
            )
        if tensors is not None:
            self.copier.aim(tensors)
        self._wait_for_memory()
        self.wait()
        memory, views = self._memories[self._next_segment], self._views[self._next_segment]
        self._next_segment = (self._next_segment + 1) % len(self._memories)
        # A blank header invalidates the older snapshot in this segment before its data is overwritten.
        memory[:HEADER_BYTES] = bytes(HEADER_BYTES)
        # From a GPU this returns while the copy runs; the thread waits for its event.
        self.copier.copy(views, memory)
        self._thread = threading.Thread(
            target=self._commit_snapshot, args=(memory, step, meta_json), name="snapshot", daemon=True
        )
        self._thread.start()
        return time.perf_counter() - began

    def wait(self) -> None:
        """Waits until the last snapshot is complete."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _commit_snapshot(self, memory: mmap.mmap, step: int, meta: bytes) -> None:
        """Computes checksums and writes tables, then the header.

        Args:
            memory: a segment's, with the shards' data in place once the copier is done.
            step: optimizer steps done.
            meta: the trainer's values as JSON.
        """
        self.copier.wait()
        segment, shards, offset = memoryview(memory), [], self._data_at
        for shard in self._saved_shards:
            shards.append(segment[offset : offset + shard.size_bytes])
            offset += pad_to_alignment(shard.size_bytes, self._align)
        if self._threads == 1:
            checksums = [zlib.crc32(shard_bytes) for shard_bytes in shards]
        else:
            with ThreadPoolExecutor(self._threads, "snapshot checksum") as pool:
                checksums = list(pool.map(zlib.crc32, shards))
        header_bytes, tables = pack_header(self._generation, step, self._table, checksums, meta, self._data_at)
        memory[HEADER_BYTES : HEADER_BYTES + len(tables)] = tables
        # The header comes last: whoever reads the segment before sees no snapshot.
        memory[:HEADER_BYTES] = header_bytes


def _settle(future: Future[mmap.mmap], work: Callable[[Segment], mmap.mmap], segment: Segment) -> None:
    """Does the work and gives the future its result or its error."""
    try:
        future.set_result(work(segment))
    except Exception as error:
        future.set_exception(error)
