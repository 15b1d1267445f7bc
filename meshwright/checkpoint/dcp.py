"""The `dcp` backend: torch.distributed.checkpoint, with the checks that it lacks.

Each rank writes one file by one thread (a second would swallow its errors), with a checksum of the bytes on their way
out. ``.metadata`` is a pickle, read by an unpickler that knows a closed list of classes. Coverage is checked on both
sides. A rank's error is reduced to text, since one that can't be pickled would leave the others waiting
(pytorch#191391).
"""

from __future__ import annotations

import math
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from meshwright.checkpoint.contract import FileRecord, TensorRecord
from meshwright.checkpoint.files import ChecksumWriter
from meshwright.errors import CheckpointError
from meshwright.names import plain_name
from meshwright.parallel.dcp_shards import StateTensor
from meshwright.torch_compat.checkpoints import MemoryFormatCode, StorageInfo
from meshwright.torch_compat.tensors import storage_layout

_BATCH_BYTES = 256 * 2**20
_METADATA = ".metadata"


class DcpBackend:
    """Files of torch.distributed.checkpoint; see `Backend` for when each method is called."""

    def write(self, folder: Path, tensors: Mapping[str, Tensor], group: ProcessGroup | None) -> dict[str, FileRecord]:
        """Writes one file a rank, of tensors of any shapes; a replicated shard is written once, by one of its ranks."""
        writer = _Writer(folder)
        planner = _SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with _as_checkpoint_error(), _silence_single_process_warning(group):
            dcp.save(dict(tensors), storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
        return writer.records

    def describe(self, folder: Path) -> dict[str, TensorRecord]:
        """Reads ``.metadata`` and checks that its chunks cover each tensor exactly once."""
        metadata = _read_metadata(folder)
        table = {}
        for name, item in metadata.state_dict_metadata.items():
            if not isinstance(item, TensorStorageMetadata):
                raise CheckpointError(f"{folder.name}: '{name}' isn't a tensor")
            # DCP doesn't check coverage; uncovered elements would keep what the memory held.
            if fault := _uncovered(name, item, metadata.storage_data):
                raise CheckpointError(f"{folder.name}: '{name}' {fault}")
            table[name] = TensorRecord(tuple(item.size), str(item.properties.dtype).removeprefix("torch."))
        return table

    def read(self, folder: Path, targets: Mapping[str, Tensor], group: ProcessGroup | None) -> None:
        """Reads into targets of any shapes the overlaps of this rank's shards with the chunks on disk."""
        _load(targets, _Reader(folder), group)

    def read_full(self, folder: Path, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yields full tensors in their global shapes, read in batches of about 256 MiB."""
        table = self.describe(folder)
        if missing := [name for name in names if name not in table]:
            raise CheckpointError(f"{folder.name} has no {', '.join(missing[:8])}")
        reader = _Reader(folder)
        for batch in _batches(names, table):
            tensors = {name: torch.empty(table[name].shape, dtype=getattr(torch, table[name].dtype)) for name in batch}
            _load(tensors, reader, None)
            for name in batch:
                yield name, tensors.pop(name)


T = TypeVar("T")


class _SummedFiles(FileSystem):
    """DCP's file system; it syncs each new file and records its checksum under its final name."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[BinaryIO]:
        if mode != "wb":
            raise CheckpointError(f"{path} is opened with '{mode}'; a checkpoint's files are only written new")
        path = Path(path)
        with ChecksumWriter(path, "sha256" if path.name.startswith(_METADATA) else "crc32") as stream:
            yield stream
        self.records[path.name] = stream.record

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class _Writer(FileSystemWriter):
    """DCP's writer: one file, one thread; the stream syncs, since it flushes first and DCP's own sync doesn't."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=False, thread_count=1, overwrite=False)
        # FileSystemWriter has no argument for its file system.
        self.fs = _SummedFiles()

    @property
    def records(self) -> dict[str, FileRecord]:
        return self.fs.records  # type: ignore[attr-defined]

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return _with_plain_errors(lambda: super(_Writer, self).prepare_local_plan(plan))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> object:
        return _with_plain_errors(lambda: super(_Writer, self).write_data(plan, planner))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        _with_plain_errors(lambda: super(_Writer, self).finish(metadata, results))

    def storage_meta(self) -> StorageMeta:
        """Stores no path: the folder is renamed when it is complete."""
        return StorageMeta(save_id=self.save_id)


class _SavePlanner(DefaultSavePlanner):
    """DCP's planner for a flat mapping."""

    def create_local_plan(self) -> SavePlan:
        return _with_plain_errors(super().create_local_plan)

    def create_global_plan(self, all_plans: list[SavePlan]) -> object:
        return _with_plain_errors(lambda: super(_SavePlanner, self).create_global_plan(all_plans))

    def lookup_object(self, index: MetadataIndex) -> object:
        return _look_up_memory(self.state_dict, index, super().lookup_object)


class _Reader(FileSystemReader):
    """DCP's reader with a safe unpickler; it reads the global metadata once, never a file of one rank."""

    _metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:  # type: ignore[override]
        if self._metadata is None:
            self._metadata = _with_plain_errors(lambda: _read_metadata(Path(self.path)))
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> object:
        return _with_plain_errors(lambda: super(_Reader, self).read_data(plan, planner))


class _LoadPlanner(DefaultLoadPlanner):
    """DCP's planner for a flat mapping; it refuses a plan that leaves elements of this rank's shards unfilled."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        full_state_dict = dict(state_dict)
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict = full_state_dict  # DCP drops what is neither a tensor nor a plain value

    def create_local_plan(self) -> LoadPlan:
        plan: LoadPlan = _with_plain_errors(super().create_local_plan)
        # DCP skips what the file lacks; counting elements by name shows it.
        filled: dict[str, int] = {}
        for item in plan.items:
            filled[item.dest_index.fqn] = filled.get(item.dest_index.fqn, 0) + math.prod(item.lengths)
        for name, tensor in self.state_dict.items():
            # A DTensor counts the elements of this rank alone.
            local_elements = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel()
            if filled.get(name, 0) != local_elements:
                raise CheckpointError(f"'{name}': {filled.get(name, 0)} of {local_elements} elements would be filled")
        return plan

    def load_bytes(self, read_item: ReadItem, value: object) -> None:
        """Refuses items that DCP's planner would unpickle."""
        raise CheckpointError(f"'{read_item.dest_index.fqn}' isn't a tensor in the file")

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return _look_up_memory(self.state_dict, index, super().lookup_tensor)


def _look_up_memory(
    state: Mapping[str, StateTensor], index: MetadataIndex, look_up: Callable[[MetadataIndex], T]
) -> T | Tensor:
    """Returns the memory behind an index; DCP's own look-up knows shards of Tensors only, not `LocalBoxes`."""
    target = state[index.fqn]
    return look_up(index) if isinstance(target, Tensor) else target.__get_tensor_shard__(index)


_METADATA_CLASSES = {
    **{("torch.distributed.checkpoint.metadata", kind.__name__): kind for kind in (
        ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties, TensorStorageMetadata,
        MemoryFormatCode,
    )},
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): storage_layout,
    # The path at which the checkpoint was written; it is never opened.
    **{("pathlib", kind): PurePosixPath for kind in ("PosixPath", "PurePosixPath")},
}  # fmt: skip
"""Every class in DCP's pickled metadata, by (module, name): any other name could run code."""


# The unpickler in Python: the C one allocates as many memo entries as a few bytes of a forged file ask for.
class _Unpickler(pickle._Unpickler):  # type: ignore[name-defined, misc]
    """Unpickles the classes of DCP's metadata alone: a pickle could otherwise run any code."""

    def find_class(self, module: str, name: str) -> object:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        # torch's dtypes are attributes of torch; everything else needs an entry of the list.
        if (module, name) not in _METADATA_CLASSES:
            raise pickle.UnpicklingError(f"{module}.{name} doesn't belong into a checkpoint's metadata")
        return _METADATA_CLASSES[module, name]


def _read_metadata(folder: Path) -> Metadata:
    """Unpickles ``.metadata`` by the closed list of classes, and checks the file names in it."""
    try:
        with open(folder / _METADATA, "rb") as stream:
            metadata = _Unpickler(stream).load()
    except Exception as error:
        raise CheckpointError(f"{folder.name}: {_METADATA} can't be read: {type(error).__name__}: {error}") from error
    storage_data = getattr(metadata, "storage_data", None)
    if not isinstance(metadata, Metadata) or not isinstance(storage_data, dict):
        raise CheckpointError(f"{folder.name}: {_METADATA} holds no metadata")
    for storage_info in storage_data.values():
        if not isinstance(storage_info, StorageInfo):
            raise CheckpointError(f"{folder.name}: {_METADATA} holds no metadata")
        # A name such as ../../x would make the reader open files outside the checkpoint.
        plain_name(storage_info.relative_path, f"{folder.name}: {_METADATA}", CheckpointError)
    return metadata


def _uncovered(name: str, item: TensorStorageMetadata, stored: Mapping[MetadataIndex, Any]) -> str | None:
    """Returns the reason why the chunks aren't a partition of the tensor, or None."""
    chunks = [chunk for chunk in item.chunks if math.prod(chunk.sizes)]
    for chunk in chunks:
        if MetadataIndex(name, chunk.offsets) not in stored:
            return f"has a chunk at {tuple(chunk.offsets)} that no file holds"
        if any(
            start < 0 or start + size > dim_size for start, size, dim_size in zip(chunk.offsets, chunk.sizes, item.size)
        ):
            return f"has a chunk at {tuple(chunk.offsets)} outside its shape {tuple(item.size)}"
    chunk_elements, tensor_elements = sum(math.prod(chunk.sizes) for chunk in chunks), math.prod(item.size)
    if chunk_elements != tensor_elements:
        return f"has {chunk_elements} of {tensor_elements} elements"
    # Sorted by offset in dim 0: the inner loop ends at the first chunk that starts behind this one's end.
    chunks.sort(key=lambda chunk: tuple(chunk.offsets))
    for index, chunk in enumerate(chunks):
        for later_chunk in chunks[index + 1 :]:
            if later_chunk.offsets[0] >= chunk.offsets[0] + chunk.sizes[0]:
                break
            if _overlap(chunk, later_chunk):
                return f"has two chunks at {tuple(later_chunk.offsets)}"
    return None


def _overlap(first_chunk: ChunkStorageMetadata, second_chunk: ChunkStorageMetadata) -> bool:
    return all(
        start_1 < start_2 + size_2 and start_2 < start_1 + size_1
        for start_1, size_1, start_2, size_2 in zip(
            first_chunk.offsets, first_chunk.sizes, second_chunk.offsets, second_chunk.sizes
        )
    )


def _batches(names: Sequence[str], table: Mapping[str, TensorRecord]) -> Iterator[list[str]]:
    """Groups names in order into batches of at most `_BATCH_BYTES`; a larger tensor is a batch by itself."""
    batch: list[str] = []
    batch_bytes = 0
    for name in names:
        size = math.prod(table[name].shape) * getattr(torch, table[name].dtype).itemsize
        if batch and batch_bytes + size > _BATCH_BYTES:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(name)
        batch_bytes += size
    if batch:
        yield batch


def _load(targets: Mapping[str, Tensor], reader: _Reader, group: ProcessGroup | None) -> None:
    planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _as_checkpoint_error(), _silence_single_process_warning(group), torch.no_grad():
        dcp.load(dict(targets), storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)


def _with_plain_errors(action: Callable[[], T]) -> T:
    """Runs an action and turns any error into a `CheckpointError`, which can be sent to the other ranks."""
    try:
        return action()
    except CheckpointError:
        raise
    except Exception as error:
        system_error = _system_error(error)
        if system_error is None:
            raise CheckpointError(f"{type(error).__name__}: {error}") from error
        path_suffix = f" ({system_error.filename})" if system_error.filename else ""
        raise CheckpointError(f"{system_error.strerror or system_error}{path_suffix}") from None


def _system_error(error: BaseException | None) -> OSError | None:
    """Finds the operating system's error behind another one: torch's writers hide a full disk behind their own."""
    for _ in range(8):
        if error is None or isinstance(error, OSError):
            return error
        # At most eight links, since a chain may be a cycle.
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def _as_checkpoint_error() -> Iterator[None]:
    """Turns DCP's collected failures, which aren't even an `Exception`, into one `CheckpointError`."""
    try:
        yield
    except CheckpointException as error:
        failures = sorted(error.failures.items())[:4]
        texts = [f"rank {rank}: {str(cause) or repr(cause)}" for rank, (cause, _) in failures]
        raise CheckpointError("; ".join(texts)) from None


@contextmanager
def _silence_single_process_warning(group: ProcessGroup | None) -> Iterator[None]:
    """Silences DCP's warning about a missing process group where there is none on purpose."""
    with warnings.catch_warnings():
        if group is None:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


BACKEND = DcpBackend()
