"""The outer server's state on disk: a folder a version, written beside, and renamed when it is complete."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import CheckpointError
from meshwright.records import RecordError, parse_json
from meshwright.sites.messages import CODEC, Declaration

FOLDER = "versions"
_FILE = "state.json"
_MOST_KEPT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedState:
    """What was saved beside the tensors."""

    folder: Path
    version: int
    delayed: int
    """Movements since the last update of the momentum."""
    shards: int
    """Number of shards that wrote it."""
    declaration: Declaration


def save_state(
    run_dir: Path, version: int, delayed: int, shards: int, declaration: Declaration, write: Callable[[Path], None]
) -> None:
    """Saves a version; older ones but one are removed.

    Args:
        run_dir: of the server.
        version: to save.
        delayed: as in `SavedState`.
        shards: number of shards.
        declaration: of the model.
        write: has the shards write into a folder.

    Raises:
        OSError: when the disk is full or gone; the versions before stay.
    """
    root = run_dir / FOLDER
    root.mkdir(parents=True, exist_ok=True)
    folder, beside = root / f"{version:08d}", root / f".{version:08d}.new"
    if folder.exists():
        return
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    write(beside)
    values = {"version": version, "delayed": delayed, "shards": shards}
    text = json.dumps(values | {"declaration": CODEC.dumps(declaration).decode()})
    with open(beside / _FILE, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(folder)
    descriptor = os.open(root, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    for old in _saved_folders(run_dir)[:-_MOST_KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def _saved_folders(run_dir: Path) -> list[Path]:
    """Returns the folders of saved versions, oldest first."""
    return sorted(path for path in (run_dir / FOLDER).glob("[0-9]*") if (path / _FILE).is_file())


def read_state(run_dir: Path) -> SavedState | None:
    """Returns the newest saved version; None without any.

    Raises:
        CheckpointError: when its file can't be read.
    """
    folders = _saved_folders(run_dir)
    if not folders:
        return None
    folder = folders[-1]
    try:
        values = parse_json((folder / _FILE).read_text(encoding="utf-8"))
        return SavedState(
            folder=folder,
            version=int(values["version"]),
            delayed=int(values["delayed"]),
            shards=int(values["shards"]),
            declaration=CODEC.loads_as(Declaration, values["declaration"].encode()),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecordError) as error:
        raise CheckpointError(f"{folder} can't be read: {error}; remove it, and the version before counts") from None
