"""A second place for checkpoints, any path that fsspec knows: copied there once they stand, and back to a new machine.

A checkpoint is copied file by file, each read back and compared, the manifest last: without it nobody takes it for
one. An object store needs no renaming for that.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.checkpoint.contract import FileRecord
from meshwright.checkpoint.files import Checksum, SummedWriter, remove
from meshwright.checkpoint.folder import Folder, whole
from meshwright.checkpoint.manifest import MANIFEST, Manifest
from meshwright.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_BLOCK_BYTES = 1 << 22
_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")


Order = tuple[int, int]
"""Step and attempt of a checkpoint, by which they follow each other."""
BEFORE_ALL: Order = (-1, 0)


class FetchedCheckpoint(NamedTuple):
    """A checkpoint that was copied back."""

    step: int
    """Optimizer steps done."""
    path: Path
    """Its folder here."""
    size_bytes: int
    """Of all its files."""

    def told(self, mirror: Mirror, seconds: float) -> dict[str, Any]:
        """Returns what its event says."""
        return {
            "step": self.step, "mirror": str(mirror), "path": str(self.path), "bytes": self.size_bytes,
            "seconds": seconds,
        }  # fmt: skip


def check_mirror(url: str) -> None:
    """Refuses a path of a kind that isn't known or installed here; empty is fine. Touches no network.

    Raises:
        ConfigError: with what to install.
    """
    if not url:
        return
    from fsspec import get_filesystem_class
    from fsspec.utils import get_protocol

    protocol = get_protocol(url)
    try:
        get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"checkpoint.mirror = {url}: {error}; give a path that fsspec knows, as s3://bucket/runs, gs://bucket/runs "
            "or file:///mnt/runs"
        ) from None


class Mirror:
    """The checkpoints of one run in another place.

    Args:
        url: a folder by fsspec's path.
        run: name of the run, a folder in it.
    """

    def __init__(self, url: str, run: str) -> None:
        self._url, self._run = url.rstrip("/"), run
        self._files: AbstractFileSystem | None = None
        self._root = ""

    def __str__(self) -> str:
        """Returns where it is."""
        return f"{self._url}/{self._run}"

    def put(self, folder: Path, keep: int, verify: bool = True) -> int:
        """Copies a checkpoint that stands, then removes all but the newest ``keep``; returns the bytes copied.

        Args:
            folder: of the checkpoint.
            keep: how many stay, this one included.
            verify: read each file back and compare its checksum.

        Raises:
            CheckpointError: when it can't be copied, or the name has another checkpoint; what is there stands.
        """
        try:
            return self._put(folder, keep, verify)
        except CheckpointError:
            raise
        except Exception as error:  # each file system has errors of its own
            raise CheckpointError(f"{folder.name} can't be copied to {self}: {_said(error)}") from error

    def fetch(self, root: Path, newer_than: Order = BEFORE_ALL, step: int | None = None) -> FetchedCheckpoint | None:
        """Copies the newest whole checkpoint back, unless there is none later than ``newer_than``.

        What stands here under its name is replaced: the caller knows that it is damaged.

        Args:
            root: folder of checkpoints here.
            newer_than: step and attempt of what is here already.
            step: only checkpoints of this step.

        Raises:
            CheckpointError: when the place can't be read, or none of the newer ones is whole.
        """
        try:
            names = [name for name in reversed(self._names()) if order(name) > newer_than]
            names = [name for name in names if step in (None, order(name)[0])]
            refused = []
            for name in names:
                try:
                    return self._fetch(name, root)
                except CheckpointError as error:
                    refused.append(f"{name}: {error}")
        except Exception as error:
            raise CheckpointError(f"{self} can't be read: {_said(error)}") from error
        if refused:
            raise CheckpointError(f"no checkpoint in {self} is good: {'; '.join(refused)}")
        return None

    def _put(self, folder: Path, keep: int, verify: bool) -> int:
        files, manifest = self._open(), Manifest.read(folder)
        place, rendered = f"{self._root}/{folder.name}", manifest.render()
        if files.exists(f"{place}/{MANIFEST}"):
            if files.cat_file(f"{place}/{MANIFEST}") == rendered:
                return 0
            raise CheckpointError(f"{place} holds another checkpoint of that name; give another run, or remove it")
        files.makedirs(place, exist_ok=True)
        for name, record in manifest.files.items():
            files.put_file(str(folder / name), f"{place}/{name}")
            self._check(f"{place}/{name}", record, verify)
        files.pipe_file(f"{place}/{MANIFEST}", rendered)
        if files.cat_file(f"{place}/{MANIFEST}") != rendered:
            raise CheckpointError(f"{place}/{MANIFEST} reads back otherwise than it was written")
        self._collect(folder.name, keep)
        return manifest.size_bytes

    def _collect(self, new: str, keep: int) -> None:
        """Removes older checkpoints, their manifests first; and later ones, of steps that the run went back behind."""
        files, names = self._open(), self._names()
        older = [name for name in names if order(name) < order(new)]
        gone = older[: max(0, len(older) - keep + 1)] + [name for name in names if order(name) > order(new)]
        for name in gone:
            files.rm_file(f"{self._root}/{name}/{MANIFEST}")
            files.rm(f"{self._root}/{name}", recursive=True)

    def _check(self, path: str, record: FileRecord, verify: bool) -> None:
        """Compares a copied file with what it should be."""
        files = self._open()
        if not verify:
            if (size := files.size(path)) != record.size:
                raise CheckpointError(f"{path} has {size} bytes instead of {record.size}")
            return
        checksum = Checksum(record.checksum.partition(":")[0])
        with files.open(path, "rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                checksum.update(block)
        if checksum.record != record:
            raise CheckpointError(f"{path} is damaged: its checksum is {checksum.record.checksum}")

    def _fetch(self, name: str, root: Path) -> FetchedCheckpoint:
        """Copies one back: beside first, checked, then renamed."""
        files, place = self._open(), Folder(root)
        root.mkdir(parents=True, exist_ok=True)
        step = order(name)[0]
        beside = root / place.begin(step)[0]
        try:
            (beside / MANIFEST).write_bytes(files.cat_file(f"{self._root}/{name}/{MANIFEST}"))
            manifest = Manifest.read(beside, name)
            for file, record in manifest.files.items():
                kind = record.checksum.partition(":")[0]
                with (
                    files.open(f"{self._root}/{name}/{file}", "rb") as source,
                    SummedWriter(beside / file, kind) as target,
                ):
                    shutil.copyfileobj(source, target, _BLOCK_BYTES)
                if target.record != record:
                    raise CheckpointError(f"{file} is damaged: its checksum is {target.record.checksum}")
            if (root / name).exists():
                remove(root / name)
            place.rename(beside, root / name)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        assert whole(root / name)
        return FetchedCheckpoint(step, root / name, manifest.size_bytes)

    def _names(self) -> list[str]:
        """Returns the whole checkpoints, oldest first."""
        files = self._open()
        if not files.exists(self._root):
            return []
        names = (str(path).rstrip("/").rpartition("/")[2] for path in files.ls(self._root, detail=False))
        found = [name for name in names if _NAME.fullmatch(name) and files.exists(f"{self._root}/{name}/{MANIFEST}")]
        return sorted(found, key=order)

    def _open(self) -> Any:
        if self._files is None:
            from fsspec.core import url_to_fs

            # Listings are asked anew: another process writes here.
            self._files, self._root = url_to_fs(f"{self._url}/{self._run}", use_listings_cache=False)
            self._root = self._root.rstrip("/")
        return self._files


def order(name: str) -> Order:
    """Returns step and attempt of a checkpoint by its folder's name."""
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
