"""The folder of a run's checkpoints as one machine sees it: entries, leftovers, retention."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from meshwright.checkpoint.files import find_damage, remove, sync_folder
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
    """0, or the number of earlier checkpoints of the same step."""
    path: Path
    """The folder."""


class RefusedCheckpoint(NamedTuple):
    """A checkpoint that wasn't loaded or couldn't be removed."""

    path: Path
    """Its folder."""
    reason: str
    """The fault, as a sentence."""


class Folder:
    """Names, renames and removals below one root, by one process alone."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def entries(self) -> list[CheckpointEntry]:
        """Returns every checkpoint from oldest to newest, unverified."""
        entries = []
        for path in self.root.iterdir() if self.root.is_dir() else ():
            if match := _NAME.fullmatch(path.name):
                entries.append(CheckpointEntry(int(match[1]), int(match[2] or 0), path))
        return sorted(entries)

    def clean(self) -> None:
        """Removes leftovers of killed saves and removals; a save in progress looks the same, so call it before one."""
        for path in self.leftovers():
            shutil.rmtree(path, ignore_errors=True)

    def leftovers(self) -> list[Path]:
        """Returns what killed saves and removals have left; a save in progress looks the same."""
        return [path for pattern in _LEFTOVERS for path in self.root.glob(pattern)]

    def withdraw(self, last_good_step: int) -> list[Path]:
        """Renames checkpoints after a step, so that nobody loads them; returns their old paths.

        Raises:
            CheckpointError: when the folder can't be written.
        """
        later_paths = [entry.path for entry in self.entries() if entry.step > last_good_step]
        try:
            for path in later_paths:
                os.rename(path, path.with_name(f"{_WITHDRAWN}{path.name}-{uuid.uuid4().hex[:8]}"))
            if later_paths:
                sync_folder(self.root)
        except OSError as error:
            raise CheckpointError(f"damaged checkpoints in {self.root} can't be renamed: {error.strerror}") from error
        return later_paths

    def create_temporary(self, step: int) -> tuple[str, str]:
        """Creates a temporary folder for a new checkpoint.

        Returns:
            Its name, and its final name: ``step-00000500``, or ``step-00000500-1`` when that exists.
        """
        # A run that went back to an older step saves the same step again under a new attempt.
        attempts = [entry.attempt for entry in self.entries() if entry.step == step]
        target = f"step-{step:08d}" + (f"-{max(attempts) + 1}" if attempts else "")
        folder = self.root / f".writing-{target}-{uuid.uuid4().hex[:8]}"
        folder.mkdir()
        return folder.name, target

    def rename(self, folder: Path, target: Path) -> None:
        """Renames a finished folder to its final name, durably.

        Raises:
            CheckpointError: when that name exists by now.
        """
        # The folder's own entries must be on disk before the rename makes it a checkpoint.
        sync_folder(folder)
        if target.exists():
            raise CheckpointError(f"{target} appeared while it was being written: another process writes here")
        os.rename(folder, target)
        sync_folder(self.root)

    def collect(
        self, new: Path, keep: int, refused: Collection[Path]
    ) -> tuple[tuple[Path, ...], tuple[RefusedCheckpoint, ...]]:
        """Removes all but the newest good checkpoints up to ``new``; later ones, from before a rewind, go too.

        Args:
            new: the checkpoint that was just completed.
            keep: number to keep, ``new`` included; damaged ones don't count.
            refused: checkpoints known to be damaged.

        Returns:
            The removed folders, and those that couldn't be removed with the reason.
        """
        entries = self.entries()
        # Entries are ordered: those before the new one compete for retention.
        new_index = next(index for index, entry in enumerate(entries) if entry.path == new)
        good_older = [
            entry.path for entry in entries[:new_index] if entry.path not in refused and is_complete(entry.path)
        ]
        # Damaged checkpoints don't count, or the last good one might be removed for them.
        kept_paths = {new, *(good_older[1 - keep :] if keep > 1 else ())}
        removed, unremovable = [], []
        for path in (entry.path for entry in entries if entry.path not in kept_paths):
            try:
                remove(path)
                removed.append(path)
            except OSError as error:
                unremovable.append(RefusedCheckpoint(path, error.strerror or str(error)))
        return tuple(removed), tuple(unremovable)


def is_complete(path: Path) -> bool:
    """Returns whether a checkpoint's manifest verifies and its files have the right sizes; contents aren't read."""
    try:
        manifest = Manifest.read(path)
    except CheckpointError:
        return False
    return not any(find_damage(path / name, record, contents=False) for name, record in manifest.files.items())
