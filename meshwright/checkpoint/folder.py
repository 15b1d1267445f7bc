"""The folder of a run's checkpoints on one machine's view: what stands in it, what is left over, what may go."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from meshwright.checkpoint.files import damage, remove, sync_folder
from meshwright.checkpoint.manifest import Manifest
from meshwright.errors import CheckpointError

_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_WITHDRAWN = ".withdrawn-"
_LEFTOVERS = (".writing-*", ".removed-*", f"{_WITHDRAWN}*")


class CheckpointEntry(NamedTuple):
    """A checkpoint's folder; entries sort from oldest to newest."""

    step: int
    """Optimizer steps done."""
    attempt: int
    """0, or how many checkpoints of this step stood before it."""
    path: Path
    """The folder."""


class RefusedCheckpoint(NamedTuple):
    """A checkpoint that wasn't loaded or couldn't be removed."""

    path: Path
    """Its folder."""
    reason: str
    """What is wrong."""


class Folder:
    """Names, renames and removals below one root; nothing here talks to other ranks."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def entries(self) -> list[CheckpointEntry]:
        """Returns every checkpoint from oldest to newest, unverified."""
        found = []
        for path in self.root.iterdir() if self.root.is_dir() else ():
            if match := _NAME.fullmatch(path.name):
                found.append(CheckpointEntry(int(match[1]), int(match[2] or 0), path))
        return sorted(found)

    def clean(self) -> None:
        """Removes what dead saves and removals left behind; a save that is alive looks the same."""
        for pattern in _LEFTOVERS:
            for path in self.root.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)

    def withdraw(self, after: int) -> list[Path]:
        """Takes their names from checkpoints of later steps, so that nobody begins from them; returns these names.

        Raises:
            CheckpointError: when the folder can't be written.
        """
        found = [entry.path for entry in self.entries() if entry.step > after]
        try:
            for path in found:
                os.rename(path, path.with_name(f"{_WITHDRAWN}{path.name}-{uuid.uuid4().hex[:8]}"))
            if found:
                sync_folder(self.root)
        except OSError as error:
            raise CheckpointError(f"damaged checkpoints in {self.root} can't be renamed: {error.strerror}") from error
        return found

    def begin(self, step: int) -> tuple[str, str]:
        """Makes a folder to write in.

        Returns:
            Its name, and the name that it will get: ``step-00000500``, or ``step-00000500-1`` when that is taken.
        """
        attempts = [entry.attempt for entry in self.entries() if entry.step == step]
        target = f"step-{step:08d}" + (f"-{max(attempts) + 1}" if attempts else "")
        folder = self.root / f".writing-{target}-{uuid.uuid4().hex[:8]}"
        folder.mkdir()
        return folder.name, target

    def rename(self, folder: Path, target: Path) -> None:
        """Gives a finished folder its name, durably.

        Raises:
            CheckpointError: when the name has been taken meanwhile.
        """
        sync_folder(folder)
        if target.exists():
            raise CheckpointError(f"{target} appeared while it was being written: another process writes here")
        os.rename(folder, target)
        sync_folder(self.root)

    def collect(
        self, new: Path, keep: int, refused: Collection[Path]
    ) -> tuple[tuple[Path, ...], tuple[RefusedCheckpoint, ...]]:
        """Removes all but the newest good checkpoints up to ``new``, and those of steps that the run went back behind.

        Args:
            new: the checkpoint that now stands.
            keep: how many stay, ``new`` included; damaged ones don't count.
            refused: checkpoints known to be damaged.

        Returns:
            What was removed, and what couldn't be and why.
        """
        entries = self.entries()
        place = next(index for index, entry in enumerate(entries) if entry.path == new)
        good = [entry.path for entry in entries[:place] if entry.path not in refused and whole(entry.path)]
        kept = {new, *(good[1 - keep :] if keep > 1 else ())}
        removed, left = [], []
        for path in (entry.path for entry in entries if entry.path not in kept):
            try:
                remove(path)
                removed.append(path)
            except OSError as error:
                left.append(RefusedCheckpoint(path, error.strerror or str(error)))
        return tuple(removed), tuple(left)


def whole(path: Path) -> bool:
    """Returns whether a checkpoint's manifest holds and its files have the right sizes; contents aren't read."""
    try:
        manifest = Manifest.read(path)
    except CheckpointError:
        return False
    return not any(damage(path / name, record, contents=False) for name, record in manifest.files.items())
