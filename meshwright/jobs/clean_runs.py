"""The job ``runs clean``: removes checkpoints that a newer good one stands in for, or whole runs.

Only run directories are touched, never one in which a command trains, and links in them aren't followed. Nothing is
removed before the checkpoint that stays has been read and its checksums agree.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.checkpoint.files import find_damage, remove
from meshwright.checkpoint.folder import Folder
from meshwright.checkpoint.manifest import Manifest
from meshwright.errors import CheckpointError, ConfigError, LaunchError
from meshwright.jobs.progress import Say, silently
from meshwright.jobs.run_control import find_state
from meshwright.jobs.run_directory import run_config
from meshwright.jobs.runs import check_run
from meshwright.json_types import JsonObject
from meshwright.monitor.rundir import RunReader, find_runs
from meshwright.resilience.keeper import await_keeper
from meshwright.resilience.run_lock import RunLock

_UNDER_WAY = ("queued", "starting", "running")
_NEWEST_BYTES = 1 << 16
_KEEPER_S = 0.0
"""Seconds that a killed command's state may take to be written before its run is left alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Removal:
    """What is removed of a run, or why nothing is."""

    run: str
    """The run's directory."""
    paths: tuple[str, ...]
    """Folders to remove: checkpoints, leftovers of killed saves, or the run's own directory."""
    size_bytes: int
    """Bytes of the files in them."""
    kept: str = ""
    """Name of the checkpoint that stays; empty without one."""
    refused: str = ""
    """Why nothing is removed; empty when something is."""

    def to_json(self) -> JsonObject:
        """Returns the fields as plain values."""
        return dataclasses.asdict(self)


def find_removals(paths: Sequence[Path], whole: bool) -> list[Removal]:
    """Returns what ``runs clean`` would remove; it removes nothing.

    Args:
        paths: run directories, or folders with runs in them.
        whole: the runs themselves instead of checkpoints; each path must be a run directory then.

    Raises:
        ConfigError: for a path that is no folder, for ``whole`` one that is no run directory, or a link.
    """
    run_dirs: list[Path] = []
    for path in paths:
        if path.is_symlink() or not path.is_dir():
            raise ConfigError(f"{path} is a link or no folder; give the directory of a run, or a folder with runs")
        if whole:
            check_run(path)
        run_dirs += [path] if whole else find_runs(path)
    return [find_removal(run_dir, whole) for run_dir in dict.fromkeys(run_dirs)]


def find_removal(run_dir: Path, whole: bool) -> Removal:
    """Returns what would be removed of one run."""
    reason = _refusal(run_dir)
    if reason:
        return Removal(run=str(run_dir), paths=(), size_bytes=0, refused=reason)
    if whole:
        return Removal(run=str(run_dir), paths=(str(run_dir),), size_bytes=_tree_bytes(run_dir))
    folder = Folder(run_dir / "checkpoints")
    checkpoints = [entry.path for entry in folder.entries() if _is_plain_folder(entry.path)]
    kept = next((path for path in reversed(checkpoints) if _is_good(path)), None)
    if kept is None:
        reason = "none of its checkpoints is whole: all stay" if checkpoints else "it has no checkpoint"
        return Removal(run=str(run_dir), paths=(), size_bytes=0, refused=reason)
    leftovers = [path for path in folder.leftovers() if _is_plain_folder(path)]
    doomed = [path for path in checkpoints if path != kept] + leftovers
    reason = "" if doomed else f"it has {kept.name} alone"
    size_bytes = sum(map(_tree_bytes, doomed))
    return Removal(
        run=str(run_dir), paths=tuple(map(str, doomed)), size_bytes=size_bytes, kept=kept.name, refused=reason
    )


def remove_runs(removals: Sequence[Removal], whole: bool, say: Say = silently) -> list[Removal]:
    """Removes what `find_removals` returned, run by run, each looked at again once no command can start there.

    Args:
        removals: what was shown to the user; nothing else is removed.
        whole: as for `find_removals`.
        say: takes a line of progress.

    Returns:
        What was removed of each run.
    """
    done = []
    for removal in removals:
        if removal.refused:
            continue
        try:
            with RunLock(Path(removal.run)):
                await_keeper(Path(removal.run), _KEEPER_S, say)
                done.append(_remove(removal, whole))
        except (ConfigError, LaunchError, OSError) as error:
            done.append(dataclasses.replace(removal, paths=(), size_bytes=0, refused=str(error)))
    return done


def _remove(removal: Removal, whole: bool) -> Removal:
    """Removes the folders of a run that are still to be removed; its lock is held."""
    now = find_removal(Path(removal.run), whole)
    removed: list[Path] = []
    # Nobody was asked about what appeared since, and what is good now may be another checkpoint.
    for path in (Path(text) for text in removal.paths if text in now.paths):
        try:
            remove(path)
        except OSError as error:
            reason = f"{path} can't be removed: {error.strerror or error}"
            return dataclasses.replace(removal, paths=tuple(map(str, removed)), refused=reason)
        removed.append(path)
    return dataclasses.replace(removal, paths=tuple(map(str, removed)), kept=now.kept, refused=now.refused)


def _refusal(run_dir: Path) -> str:
    """Returns why nothing of a run may be removed; empty when something may."""
    try:
        check_run(run_dir)
        # A folder of other files may hold a config.toml and a plan.json too.
        run_config(run_dir)
        state, owners, _ = find_state(RunReader(run_dir, newest_bytes=_NEWEST_BYTES).read())
    except (ConfigError, LaunchError) as error:
        return str(error)
    # This process holds the lock while it looks for the second time.
    if owners and owners[0].lives and owners[0].pid == os.getpid():
        return ""
    return f"it is {state}" if state in _UNDER_WAY else ""


def _is_good(checkpoint: Path) -> bool:
    """Returns whether every file of a checkpoint has the checksum of its manifest."""
    try:
        manifest = Manifest.read(checkpoint)
    except CheckpointError:
        return False
    return not any(find_damage(checkpoint / name, record) for name, record in manifest.files.items())


def _is_plain_folder(path: Path) -> bool:
    """Returns whether a path is a folder of regular files alone: no link, pipe or device that a name stands for."""
    return not path.is_symlink() and path.is_dir() and all(map(stat.S_ISREG, _file_modes(path)))


def _file_modes(folder: Path) -> Iterator[int]:
    """Yields the mode of everything below a folder but folders themselves; links aren't followed."""
    for parent, folders, names in os.walk(folder):
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        yield from (os.lstat(Path(parent) / name).st_mode for name in [*names, *links])


def _tree_bytes(folder: Path) -> int:
    """Returns the bytes of the files below a folder; links aren't followed."""
    return sum(os.lstat(Path(parent) / name).st_size for parent, _, names in os.walk(folder) for name in names)
