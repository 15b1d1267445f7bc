"""The `image` backend: one file a rank, with the same bytes as its snapshot in memory (tables, checksums, shards).

Nothing is pickled, no rank plans for all, and each shard has a checksum of its own beside the file's. A process without
a group can write the file of a dead rank from its snapshot in memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from meshwright.checkpoint.agreement import Agreement
from meshwright.checkpoint.contract import FileRecord, TensorRecord
from meshwright.checkpoint.files import ChecksumWriter
from meshwright.checkpoint.snapshot import Snapshot, State, encode_image_header, find_complete_states, pad_to_alignment
from meshwright.checkpoint.tensor_shards import (
    TensorShard,
    assign_saved_shards,
    collect_local_shards,
    digest,
    view_within,
)
from meshwright.errors import CheckpointError
from meshwright.parallel.dcp_shards import StateTensor

_SUFFIX = ".image"


class ImageBackend:
    """Files that are images of snapshots; see `Backend` for when each method is called."""

    def write(
        self, folder: Path, tensors: Mapping[str, StateTensor], group: ProcessGroup | None
    ) -> dict[str, FileRecord]:
        """Writes this rank's shards; a replicated one is written once, balanced over the ranks that hold it."""
        agreement = Agreement(group)
        local_shards = collect_local_shards(tensors)
        # Every rank computes the same assignment from all tables; no rank plans for others.
        tables = agreement.gather([shard for shard, _ in local_shards])
        saved_shards = [(shard, local_shards[index]) for index, shard in assign_saved_shards(tables)[agreement.rank]]
        if not saved_shards:
            return {}
        # A saved shard may be a cell of the local one; only its elements are copied to the host.
        values = [
            view_within(view, source_shard.box, shard.box).detach().cpu().contiguous()
            for shard, (source_shard, view) in saved_shards
        ]
        data = [memoryview(value.reshape(-1).view(torch.uint8).numpy()) for value in values]
        fingerprint = digest(shard for table in tables for shard in table)
        return write_image(folder, agreement.rank, [shard for shard, _ in saved_shards], data, fingerprint)

    def describe(self, folder: Path) -> dict[str, TensorRecord]:
        """Reads the tables of all files and checks that their shards cover each tensor exactly once."""
        state = _open_state(folder)
        shards = (stored.shard for snapshot in state.snapshots for stored in snapshot.stored_shards)
        return {shard.name: TensorRecord(shard.shape, shard.dtype) for shard in shards}

    def read(self, folder: Path, targets: Mapping[str, StateTensor], group: ProcessGroup | None) -> None:
        """Reads the shards that overlap this rank's."""
        _open_state(folder).fill(targets)

    def read_full(self, folder: Path, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yields full tensors in their global shapes, one at a time."""
        state = _open_state(folder)
        shards_by_name = {
            stored.shard.name: stored.shard for snapshot in state.snapshots for stored in snapshot.stored_shards
        }
        if missing := [name for name in names if name not in shards_by_name]:
            raise CheckpointError(f"{folder.name} has no {', '.join(missing[:8])}")
        for name in names:
            shard = shards_by_name[name]
            full_tensor = torch.empty(shard.shape, dtype=getattr(torch, shard.dtype))
            state.fill({name: full_tensor})
            yield name, full_tensor


def write_image(
    folder: Path, rank: int, shards: Sequence[TensorShard], data: Sequence[memoryview], tensors: str
) -> dict[str, FileRecord]:
    """Writes a rank's file.

    Args:
        folder: of the checkpoint.
        rank: that the shards belong to.
        shards: those that it saves.
        data: for each shard a contiguous buffer of its bytes.
        tensors: fingerprint of the whole state's tensors.

    Returns:
        The file's name and record.

    Raises:
        CheckpointError: when the disk is full or can't be written.
    """
    path = folder / f"rank-{rank:05d}{_SUFFIX}"
    try:
        with ChecksumWriter(path, "crc32") as stream:
            stream.write(encode_image_header(rank, shards, data, tensors))
            for shard_bytes in data:
                stream.write(shard_bytes)
                # Padding as in memory: file and segment have the same offsets.
                stream.write(bytes(pad_to_alignment(shard_bytes.nbytes) - shard_bytes.nbytes))
    except OSError as error:
        raise CheckpointError(f"{error.strerror or error} ({path})") from None
    return {path.name: stream.record}


def copy_image(folder: Path, snapshot: Snapshot) -> dict[str, FileRecord]:
    """Writes the file of a rank from its snapshot in memory; see `write_image`."""
    shards = [stored.shard for stored in snapshot.stored_shards]
    return write_image(
        folder, snapshot.rank, shards, [snapshot.data(stored) for stored in snapshot.stored_shards], snapshot.tensors
    )


def _open_state(folder: Path) -> State:
    """Maps all files of a folder into memory as one state.

    Raises:
        CheckpointError: when one can't be read, or they don't hold every element of each tensor exactly once.
    """
    snapshots = []
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        try:
            with path.open("rb") as file:
                memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
            snapshots.append(Snapshot(memory))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder.name}: {path.name} can't be read: {error}") from error
        except CheckpointError as error:
            raise CheckpointError(f"{folder.name}: {path.name} is {error}") from error
    if not snapshots:
        raise CheckpointError(f"{folder.name} holds no file of the form rank-00000{_SUFFIX}")
    states = find_complete_states(snapshots)
    # One folder is one state; files of two saves, or a missing rank, are refused.
    if len(states) != 1 or len(states[0].snapshots) != len(snapshots):
        raise CheckpointError(f"{folder.name}: its files don't hold every element of each tensor exactly once")
    return states[0]


BACKEND = ImageBackend()
