"""A mirror of a run's checkpoints under any path of fsspec: copies checkpoints there, and back to a new machine.

A checkpoint is copied file by file, each read back and compared, the manifest last. A folder without a manifest counts
as no checkpoint, so that an object store needs no atomic rename.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from fsspec import AbstractFileSystem, get_filesystem_class
from fsspec.core import url_to_fs
from fsspec.utils import get_protocol

from meshwright.checkpoint.contract import FileRecord
from meshwright.checkpoint.files import Checksum, ChecksumWriter, remove
from meshwright.checkpoint.folder import Folder, is_complete
from meshwright.checkpoint.manifest import MANIFEST, Manifest
from meshwright.errors import CheckpointError, ConfigError

_BLOCK_BYTES = 1 << 22
_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")


Order = tuple[int, int]
"""(step, attempt) of a checkpoint; checkpoints sort by it."""
BEFORE_ALL: Order = (-1, 0)


class FetchedCheckpoint(NamedTuple):
    """A checkpoint that was copied back from the mirror."""

    step: int
    """Optimizer steps done."""
    path: Path
    """Its local folder."""
    size_bytes: int
    """Bytes of all its files."""

    def event_fields(self, mirror: Mirror, seconds: float) -> dict[str, object]:
        """Returns the fields of its event."""
        return {
            "step": self.step, "mirror": str(mirror), "path": str(self.path), "bytes": self.size_bytes,
            "seconds": seconds,
        }  # fmt: skip


def check_mirror(url: str) -> None:
    """Refuses an unknown or missing protocol, and a local path that can't be written; asks no network. Empty is fine.

    Raises:
        ConfigError: with the missing package or valid forms.
    """
    if not url:
        return
    protocol = get_protocol(url)
    try:
        get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"checkpoint.mirror = {url}: {error}; give a path that fsspec knows, as s3://bucket/runs, gs://bucket/runs "
            "or file:///mnt/runs"
        ) from None
    if protocol in ("file", "local"):
        folder = Path(url_to_fs(url)[1])
        for folder_or_parent in (folder, *folder.parents):
            if folder_or_parent.exists() and not folder_or_parent.is_dir():
                raise ConfigError(
                    f"checkpoint.mirror = {url}: {folder_or_parent} is a file, and copies need a folder; give another "
                    "path"
                )
        nearest_folder = next(path for path in (folder, *folder.parents) if path.is_dir())
        if not os.access(nearest_folder, os.W_OK):
            raise ConfigError(
                f"checkpoint.mirror = {url}: {nearest_folder} can't be written, and each checkpoint is copied there; "
                "give another path, or leave it out"
            )


class Mirror:
    """The checkpoints of one run under another path.

    Args:
        url: a folder by fsspec's path.
        run: name of the run, a folder in it.
    """

    def __init__(self, url: str, run: str) -> None:
        self._url, self._run = url.rstrip("/"), run
        self._file_system: AbstractFileSystem | None = None
        self._root = ""

    def __str__(self) -> str:
        """Returns the path of the run's folder in the mirror."""
        return f"{self._url}/{self._run}"

    def put(self, folder: Path, keep: int, verify: bool = True) -> int:
        """Copies a complete checkpoint, then removes all but the newest ``keep``; returns the bytes copied.

        Args:
            folder: of the checkpoint.
            keep: how many stay, this one included.
            verify: read each file back and compare its checksum.

        Raises:
            CheckpointError: when it can't be copied, or the name belongs to another checkpoint, which is left as it is.
        """
        try:
            return self._put(folder, keep, verify)
        except CheckpointError:
            raise
        except Exception as error:  # each file system has errors of its own
            raise CheckpointError(f"{folder.name} can't be copied to {self}: {_error_text(error)}") from error

    def fetch(self, root: Path, newer_than: Order = BEFORE_ALL, step: int | None = None) -> FetchedCheckpoint | None:
        """Copies the newest complete checkpoint back, unless there is none later than ``newer_than``.

        A local checkpoint of the same name is replaced: the caller knows that it is damaged.

        Args:
            root: local folder of checkpoints.
            newer_than: (step, attempt) of the newest local checkpoint.
            step: only checkpoints of this step.

        Raises:
            CheckpointError: when the mirror can't be read, or none of the newer checkpoints is good.
        """
        try:
            names = [name for name in reversed(self._list_complete()) if order_of(name) > newer_than]
            # Newest first; the first one that verifies is returned.
            names = [name for name in names if step in (None, order_of(name)[0])]
            refused = []
            for name in names:
                try:
                    return self._fetch(name, root)
                except CheckpointError as error:
                    refused.append(f"{name}: {error}")
        except Exception as error:
            raise CheckpointError(f"{self} can't be read: {_error_text(error)}") from error
        if refused:
            raise CheckpointError(f"no checkpoint in {self} is good: {'; '.join(refused)}")
        return None

    def _put(self, folder: Path, keep: int, verify: bool) -> int:
        """Copies files, then the manifest, then applies retention; returns the bytes copied, 0 when it was there."""
        file_system, manifest = self._connect(), Manifest.read(folder)
        remote_folder, rendered = f"{self._root}/{folder.name}", manifest.render()
        if file_system.exists(f"{remote_folder}/{MANIFEST}"):
            # An equal manifest means the same checkpoint: an earlier call has copied it.
            if file_system.cat_file(f"{remote_folder}/{MANIFEST}") == rendered:
                return 0
            raise CheckpointError(
                f"{remote_folder} holds another checkpoint of that name; give another run, or remove it"
            )
        file_system.makedirs(remote_folder, exist_ok=True)
        for name, record in manifest.files.items():
            file_system.put_file(str(folder / name), f"{remote_folder}/{name}")
            self._verify_copy(f"{remote_folder}/{name}", record, verify)
        # The manifest comes last: only now does the copy count as a checkpoint.
        file_system.pipe_file(f"{remote_folder}/{MANIFEST}", rendered)
        if file_system.cat_file(f"{remote_folder}/{MANIFEST}") != rendered:
            raise CheckpointError(f"{remote_folder}/{MANIFEST} reads back otherwise than it was written")
        self._collect(folder.name, keep)
        return manifest.size_bytes

    def _collect(self, new: str, keep: int) -> None:
        """Removes surplus older checkpoints, and later ones from before a rewind; of each the manifest first."""
        file_system, names = self._connect(), self._list_complete()
        older = [name for name in names if order_of(name) < order_of(new)]
        # Later checkpoints than the new one are from before a rewind and would else be resumed from.
        doomed = older[: max(0, len(older) - keep + 1)] + [name for name in names if order_of(name) > order_of(new)]
        for name in doomed:
            # Without its manifest a half-removed checkpoint is none.
            file_system.rm_file(f"{self._root}/{name}/{MANIFEST}")
            file_system.rm(f"{self._root}/{name}", recursive=True)

    def _verify_copy(self, path: str, record: FileRecord, verify: bool) -> None:
        """Compares a copied file with its record: by checksum, or by size alone without ``verify``."""
        file_system = self._connect()
        if not verify:
            if (size := file_system.size(path)) != record.size:
                raise CheckpointError(f"{path} has {size} bytes instead of {record.size}")
            return
        checksum = Checksum(record.checksum.partition(":")[0])
        with file_system.open(path, "rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                checksum.update(block)
        if checksum.record != record:
            raise CheckpointError(f"{path} is damaged: its checksum is {checksum.record.checksum}")

    def _fetch(self, name: str, root: Path) -> FetchedCheckpoint:
        """Copies one checkpoint back to a temporary folder, verifies it on the way, and renames it."""
        file_system, local_folder = self._connect(), Folder(root)
        root.mkdir(parents=True, exist_ok=True)
        step = order_of(name)[0]
        temporary = root / local_folder.create_temporary(step)[0]
        try:
            (temporary / MANIFEST).write_bytes(file_system.cat_file(f"{self._root}/{name}/{MANIFEST}"))
            manifest = Manifest.read(temporary, name)
            for file_name, record in manifest.files.items():
                kind = record.checksum.partition(":")[0]
                with (
                    file_system.open(f"{self._root}/{name}/{file_name}", "rb") as source,
                    ChecksumWriter(temporary / file_name, kind) as target,
                ):
                    # The writer sums on the way, so that a file is read once.
                    shutil.copyfileobj(source, target, _BLOCK_BYTES)
                if target.record != record:
                    raise CheckpointError(f"{file_name} is damaged: its checksum is {target.record.checksum}")
            # A damaged local checkpoint has this name; it makes way only after the copy verified.
            if (root / name).exists():
                remove(root / name)
            local_folder.rename(temporary, root / name)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        assert is_complete(root / name)
        return FetchedCheckpoint(step, root / name, manifest.size_bytes)

    def _list_complete(self) -> list[str]:
        """Lists the names of complete checkpoints, oldest first."""
        file_system = self._connect()
        if not file_system.exists(self._root):
            return []
        names = (str(path).rstrip("/").rpartition("/")[2] for path in file_system.ls(self._root, detail=False))
        complete_names = [
            name for name in names if _NAME.fullmatch(name) and file_system.exists(f"{self._root}/{name}/{MANIFEST}")
        ]
        return sorted(complete_names, key=order_of)

    def _connect(self) -> AbstractFileSystem:
        """Opens the file system at first use."""
        if self._file_system is None:
            # No cache of listings: another process writes to the same path.
            self._file_system, self._root = url_to_fs(f"{self._url}/{self._run}", use_listings_cache=False)
            self._root = self._root.rstrip("/")
        return self._file_system


def order_of(name: str) -> Order:
    """Parses (step, attempt) from the name of a checkpoint's folder."""
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
