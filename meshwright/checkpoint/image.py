"""The `image` backend: one file a rank, the same bytes as its snapshot in memory: tables, checksums, then the parts.

Nothing is pickled, nothing is planned by one rank for all, each part has a checksum of its own beside the file's, and a
process without a group can write the file of a rank that has gone from what it left in memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from meshwright.checkpoint.agreement import Agreement
from meshwright.checkpoint.contract import FileRecord, TensorRecord
from meshwright.checkpoint.files import SummedWriter
from meshwright.checkpoint.snapshot import Snapshot, State, encode, padded, whole_states
from meshwright.checkpoint.tensor_shards import TensorShard, digest, keepers, parts_of, within
from meshwright.errors import CheckpointError

_SUFFIX = ".image"
_BATCH_BYTES = 256 * 2**20


class ImageBackend:
    """Files that are images of snapshots; see `Backend` for when each method is called."""

    def write(self, folder: Path, tensors: Mapping[str, Any], group: ProcessGroup | None) -> dict[str, FileRecord]:
        """Writes what this rank keeps; copies are kept once, balanced over the ranks that hold them."""
        ranks = Agreement(group)
        held = parts_of(tensors)
        tables = ranks.gather([part for part, _ in held])
        kept = [(part, held[index]) for index, part in keepers(tables)[ranks.rank]]
        if not kept:
            return {}
        values = [within(view, whole.box, part.box).detach().cpu().contiguous() for part, (whole, view) in kept]
        data = [memoryview(value.reshape(-1).view(torch.uint8).numpy()) for value in values]
        whole = digest(part for table in tables for part in table)
        return write_image(folder, ranks.rank, [part for part, _ in kept], data, whole)

    def describe(self, folder: Path) -> dict[str, TensorRecord]:
        """Reads the tables of all files and checks that their parts cover each tensor exactly once."""
        state = _open(folder)
        parts = (kept.part for snapshot in state.snapshots for kept in snapshot.kept)
        return {part.name: TensorRecord(part.shape, part.dtype) for part in parts}

    def read(self, folder: Path, targets: Mapping[str, Any], group: ProcessGroup | None) -> None:
        """Reads the parts that overlap this rank's."""
        _open(folder).fill(targets)

    def read_full(self, folder: Path, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yields whole tensors."""
        state = _open(folder)
        known = {kept.part.name: kept.part for snapshot in state.snapshots for kept in snapshot.kept}
        if missing := [name for name in names if name not in known]:
            raise CheckpointError(f"{folder.name} has no {', '.join(missing[:8])}")
        for name in names:
            part = known[name]
            whole = torch.empty(part.shape, dtype=getattr(torch, part.dtype))
            state.fill({name: whole})
            yield name, whole


def write_image(
    folder: Path, rank: int, parts: Sequence[TensorShard], data: Sequence[Any], tensors: str
) -> dict[str, FileRecord]:
    """Writes a rank's file.

    Args:
        folder: where.
        rank: whose.
        parts: what it keeps.
        data: the bytes of each.
        tensors: fingerprint of the whole state's tensors.

    Returns:
        The file's name and record.

    Raises:
        CheckpointError: when the disk is full or can't be written.
    """
    path = folder / f"rank-{rank:05d}{_SUFFIX}"
    try:
        with SummedWriter(path, "crc32") as stream:
            stream.write(encode(rank, parts, data, tensors))
            for one in data:
                stream.write(one)
                stream.write(bytes(padded(one.nbytes) - one.nbytes))
    except OSError as error:
        raise CheckpointError(f"{error.strerror or error} ({path})") from None
    return {path.name: stream.record}


def copy_image(folder: Path, snapshot: Snapshot) -> dict[str, FileRecord]:
    """Writes the file of a rank from its snapshot in memory; see `write_image`."""
    parts = [kept.part for kept in snapshot.kept]
    return write_image(folder, snapshot.rank, parts, [snapshot.data(kept) for kept in snapshot.kept], snapshot.tensors)


def _open(folder: Path) -> State:
    """Maps all files of a folder.

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
    states = whole_states(snapshots)
    if len(states) != 1 or len(states[0].snapshots) != len(snapshots):
        raise CheckpointError(f"{folder.name}: its files don't hold every element of each tensor exactly once")
    return states[0]


BACKEND = ImageBackend()
