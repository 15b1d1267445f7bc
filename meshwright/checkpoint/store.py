# long: the protocol of save, find and load is one class
"""The checkpoint store: saves checkpoints atomically, and verifies every byte before it loads one.

A checkpoint is written to a temporary folder (``.writing-step-00000500-3fa4c2d1``). The rank that writes a file syncs
it and computes its checksum; rank 0 writes the manifest last, renames the folder and syncs its parent. A folder named
``step-...`` is therefore complete, even if processes were killed, and loading still verifies all of it.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Self

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from meshwright.checkpoint import fit
from meshwright.checkpoint.agreement import Agreement, build_group, format_failures
from meshwright.checkpoint.config import CheckpointConfig
from meshwright.checkpoint.contract import FileRecord, TensorRecord, find_backend
from meshwright.checkpoint.files import ChecksumWriter, find_damage
from meshwright.checkpoint.folder import CheckpointEntry, Folder, RefusedCheckpoint, is_complete
from meshwright.checkpoint.image import copy_image
from meshwright.checkpoint.manifest import MANIFEST, Manifest, Origin
from meshwright.checkpoint.mirror import BEFORE_ALL, Mirror, Order, order_of
from meshwright.checkpoint.outcome import CURE, CheckpointSearch, LoadedCheckpoint, SavedCheckpoint
from meshwright.checkpoint.snapshot import State
from meshwright.errors import CheckpointError
from meshwright.json_types import JsonObject

IMAGE = "image"
"""Name of the backend whose files are images of snapshots."""


class CheckpointStore:
    """Saves, finds, verifies, loads and removes the checkpoints of one folder.

    Every method that takes tensors, and `find`, is called by all ranks of the group at once; `entries`, `latest`,
    `clean` and `read_full` by any process alone.
    """

    def __init__(
        self,
        root: Path,
        config: CheckpointConfig | None = None,
        group: ProcessGroup | Agreement | None = None,
        stamp: Callable[[str], None] = lambda phase: None,
        fence: Callable[[], None] | None = None,
    ) -> None:
        """Opens a folder; it is created by the first save.

        Args:
            root: folder of the checkpoints, seen by all ranks.
            config: how many to keep, backend, verification.
            group: gloo group of the ranks (`agreement.build_group`), or an `Agreement`; None for a single process.
            stamp: called with each phase of a save as it begins on this rank: ``open``, ``write``, ``written``,
                ``manifest``, ``rename``, ``renamed``, ``collect``, ``copy``, ``saved``; it must not raise.
            fence: raises when another leader has taken over the run; called right before the rename.

        Raises:
            ConfigError: for an unknown backend.
            CheckpointError: when the group isn't gloo.
        """
        self.root = Path(root).absolute()
        self._config = config or CheckpointConfig()
        self._folder = Folder(self.root)
        find_backend(self._config.backend)
        self._ranks = group if isinstance(group, Agreement) else Agreement(group)
        self._stamp, self._fence = stamp, fence or (lambda: None)
        self._step: int | None = None
        self._refused: set[Path] = set()
        self._cleaned = False

    @classmethod
    def build(
        cls,
        root: Path,
        config: CheckpointConfig | None = None,
        stamp: Callable[[str], None] = lambda phase: None,
        fence: Callable[[], None] | None = None,
    ) -> Self:
        """Opens a folder for all ranks of the run, over a gloo group whose waits end after ``config.wait_s``.

        Every rank must call it; without an initialised process group the process is alone.
        """
        config = config or CheckpointConfig()
        return cls(root, config, build_group(config.wait_s) if dist.is_initialized() else None, stamp, fence)

    def resumed_after(self, step: int) -> None:
        """Records that the run continues from a state of this step from another tier; later checkpoints may exist."""
        self._step = step

    @property
    def agreement(self) -> Agreement:
        """The agreement between the ranks of this store."""
        return self._ranks

    def entries(self) -> list[CheckpointEntry]:
        """Returns every checkpoint from oldest to newest, unverified."""
        return self._folder.entries()

    def latest(self) -> CheckpointEntry | None:
        """Returns the newest checkpoint whose manifest verifies and whose files have the right sizes, or None."""
        return next((entry for entry in reversed(self.entries()) if is_complete(entry.path)), None)

    def withdraw(self, last_good_step: int) -> list[Path]:
        """Renames damaged checkpoints after a step, so that nobody loads them; the first save removes them."""
        return self._folder.withdraw(last_good_step)

    def clean(self) -> None:
        """Removes leftovers of killed saves; only the process about to write may call it. The first save does."""
        self._folder.clean()
        self._cleaned = True

    def save(
        self, step: int, tensors: Mapping[str, Tensor], meta: JsonObject, origin: Origin | None = None
    ) -> SavedCheckpoint:
        """Writes a checkpoint; it is complete when this returns, and an error is raised on every rank or on none.

        Args:
            step: optimizer steps done.
            tensors: name to tensor of any shape (replicated: equal on all ranks that have it) or DTensor of any
                placements.
            meta: the trainer's plain values; those of rank 0 are saved.
            origin: model, data, layout and config of the run; that of rank 0 is saved.

        Raises:
            CheckpointError: the same on every rank: a full or read-only disk, an error in a writer, a lost rank, or a
                folder that already holds later checkpoints of a run that wasn't resumed.
        """
        backend = find_backend(self._config.backend)

        def write(folder: Path) -> dict[str, FileRecord]:
            return backend.write(folder, tensors, self._ranks.group)

        return self._save(
            step, self._config.backend, write, lambda: fit.tabulate_tensors(tensors), meta, origin or Origin()
        )

    def save_state(self, step: int, state: State, meta: JsonObject, origin: Origin) -> SavedCheckpoint:
        """Writes a checkpoint from snapshots in memory, or this process's share of one; see `save`."""

        def write(folder: Path) -> dict[str, FileRecord]:
            return {
                name: record for snapshot in state.snapshots for name, record in copy_image(folder, snapshot).items()
            }

        return self._save(step, IMAGE, write, lambda: None, meta, origin)

    def _save(
        self,
        step: int,
        backend: str,
        write_files: Callable[[Path], dict[str, FileRecord]],
        check_inputs: Callable[[], object],
        meta: JsonObject,
        origin: Origin,
    ) -> SavedCheckpoint:
        """Runs the protocol of a save: open, write, commit, collect; each phase ends with an agreement of all ranks."""
        started, activity = time.monotonic(), f"saving the checkpoint of step {step} failed"
        self._stamp("open")
        # Phase 1: all ranks check their inputs, so that no rank enters the backend's collectives alone.
        opened_names = self._ranks.run_on_all(activity, lambda: self._open_folder(step, check_inputs, meta, origin))
        folder, target = (self.root / name for name in opened_names[0] or ())
        self._stamp("write")
        try:
            # Phase 2: every rank writes and verifies its files, and reports their records.
            reports = self._ranks.run_on_all(activity, lambda: self._write_and_check(folder, write_files))
            files = {name: FileRecord(*record) for report in reports for name, record in report.items()}
            # Phase 3: rank 0 alone writes the manifest and renames.
            self._ranks.run_on_first(activity, lambda: self._commit(folder, target, step, backend, files, meta, origin))
        except CheckpointError as error:
            # Every rank raises the same error; one of them alone cleans up the temporary folder.
            if self._ranks.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            raise CheckpointError(f"{error}; the checkpoints before it in {self.root} stand") from error
        # The checkpoint is committed; an error in collecting or copying can no longer lose it.
        self._step = step
        # Retention runs only now: older checkpoints go once the new one is complete.
        removed, unremovable = self._collect(target) if self._ranks.rank == 0 else ((), ())
        copied = self._copy_to_mirror(target) if self._ranks.rank == 0 and self._config.mirror else {}
        self._stamp("saved")
        return SavedCheckpoint(
            step=step,
            path=target,
            size_bytes=sum(record.size for record in files.values()),
            seconds=time.monotonic() - started,
            removed=removed,
            unremovable=unremovable,
            copied=copied,
        )

    def find(self, step: int | None = None, *, required: bool = True) -> LoadedCheckpoint | None:
        """Finds the newest checkpoint that verifies, without reading tensors.

        Args:
            step: only checkpoints of this step.
            required: raise instead of returning None when there is no checkpoint at all.

        Raises:
            CheckpointError: when none verifies.
        """
        search = CheckpointSearch()
        for path, manifest in self._verified_candidates(step, search):
            return self._accept(path, manifest, search)
        self._raise_none_found(step, search, required)
        return None

    def load(
        self,
        targets: Mapping[str, Tensor] | Callable[[Collection[str]], Mapping[str, Tensor]],
        *,
        expect: Mapping[str, str] | None = None,
        step: int | None = None,
        required: bool = True,
        may_remain: Callable[[str], bool] = lambda name: False,
    ) -> LoadedCheckpoint | None:
        """Fills tensors from the newest checkpoint that verifies, and records those that were refused.

        Args:
            targets: name to tensor or DTensor of any shape and placements, filled in place; or a function that returns
                them for the names that a checkpoint holds.
            expect: fields of `Origin` (``model``, ``data``) that must be equal.
            step: only checkpoints of this step.
            required: raise instead of returning None when there is no checkpoint at all.
            may_remain: whether a saved tensor of a name may have no target.

        Raises:
            CheckpointError: the same on every rank: none verifies; or one that does holds other tensors than the
                targets, or comes from another model or data (naming them), in which case nothing was read.
        """
        search = CheckpointSearch()
        # Targets that can't be filled are refused whether there is a checkpoint or not.
        target_table = None if callable(targets) else self._gather_targets(targets)
        for path, manifest in self._verified_candidates(step, search):
            checkpoint_targets = targets(manifest.tensors) if callable(targets) else targets
            table = target_table or self._gather_targets(checkpoint_targets)
            # A good checkpoint of another model is an error, no reason to try an older one.
            fit.check(path, manifest, table, expect or {}, may_remain)
            backend = find_backend(manifest.backend)
            outcomes = self._ranks.outcomes(partial(backend.read, path, checkpoint_targets, self._ranks.group))
            if any(outcome.error for outcome in outcomes):
                self._refuse(path, format_failures(outcomes), search)
                continue
            return self._accept(path, manifest, search)
        self._raise_none_found(step, search, required)
        return None

    def read_full(self, loaded: LoadedCheckpoint, names: Sequence[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, full tensor on the CPU) of a checkpoint that was found, in one process.

        Args:
            loaded: the result of `find` or `load`.
            names: of the tensors to read; all by default.

        Raises:
            CheckpointError: for a name that isn't there.
        """
        chosen_names = list(loaded.manifest.tensors) if names is None else names
        return find_backend(loaded.manifest.backend).read_full(loaded.path, chosen_names)

    def _open_folder(
        self, step: int, check_inputs: Callable[[], object], meta: JsonObject, origin: Origin
    ) -> tuple[str, str] | None:
        """Checks the inputs of a save; rank 0 makes the temporary folder and returns its name and its final name.

        Whatever can fail on a single rank is done here, before the backend's own collectives could hang on it.
        """
        check_inputs()
        if self._ranks.rank != 0:
            return None
        try:
            json.dumps([dict(meta), origin.to_json()])
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"meta and origin must be plain JSON values: {error}") from None
        self.root.mkdir(parents=True, exist_ok=True)
        # Once a store, before its first save: a save in progress looks like a leftover.
        if not self._cleaned:
            self.clean()
        entries = self.entries()
        # A fresh run in an old directory would else shadow or delete the checkpoints of another run.
        if self._step is None and entries and entries[-1].step >= step:
            raise CheckpointError(
                f"{self.root} already holds {entries[-1].path.name} of a run that wasn't resumed here; "
                "resume it, or give another run directory"
            )
        return self._folder.create_temporary(step)

    def _write_and_check(
        self, folder: Path, write_files: Callable[[Path], dict[str, FileRecord]]
    ) -> dict[str, FileRecord]:
        """Writes this rank's files and reads them back."""
        files = write_files(folder)
        for name, record in files.items():
            # cold: read from the disk, since the page cache would confirm what was never written.
            if fault := find_damage(folder / name, record, contents=self._config.verify, cold=True):
                raise CheckpointError(f"right after writing, {fault}")
        self._stamp("written")
        return files

    def _commit(
        self,
        folder: Path,
        target: Path,
        step: int,
        backend: str,
        files: dict[str, FileRecord],
        meta: Mapping,
        origin: Origin,
    ) -> None:
        """Writes the manifest and renames the folder, on rank 0 once every rank's files are on disk."""
        self._stamp("manifest")
        manifest = Manifest(
            name=target.name,
            step=step,
            ranks=self._ranks.count,
            backend=backend,
            files=dict(sorted(files.items())),
            tensors=find_backend(backend).describe(folder),
            origin=origin,
            meta=meta,
        )
        # A rank on a node with another file system would write files that rank 0 can't see.
        names_on_disk = {path.name for path in folder.iterdir()}
        if names_on_disk != set(files):
            raise CheckpointError(
                f"rank 0 sees {len(names_on_disk)} files where the ranks wrote {len(files)} "
                f"({', '.join(sorted(names_on_disk ^ set(files))[:4])}); "
                f"{self.root} must be a folder that all nodes share"
            )
        with ChecksumWriter(folder / MANIFEST, "sha256") as stream:
            stream.write(manifest.render())
        self._stamp("rename")
        # Last moment to stop a writer of a deposed leader: after the rename the checkpoint exists.
        self._fence()
        self._folder.rename(folder, target)
        self._stamp("renamed")

    def _collect(self, new: Path) -> tuple[tuple[Path, ...], tuple[RefusedCheckpoint, ...]]:
        self._stamp("collect")
        return self._folder.collect(new, self._config.keep, self._refused)

    def _copy_to_mirror(self, new: Path) -> dict[str, object]:
        """Copies a complete checkpoint to the mirror; returns event fields: copy and seconds, or the failure."""
        self._stamp("copy")
        mirror, began = Mirror(self._config.mirror, self.root.parent.name), time.monotonic()
        try:
            mirror.put(new, self._config.keep, self._config.verify)
        except CheckpointError as error:
            return {"copy_failed": str(error)}
        return {"copy": f"{mirror}/{new.name}", "copy_seconds": time.monotonic() - began}

    def _verified_candidates(self, step: int | None, search: CheckpointSearch) -> Iterator[tuple[Path, Manifest]]:
        """Yields checkpoints that verify, newest first; all ranks go through the same sequence.

        After one that doesn't verify, the mirror's newest is fetched if it is newer than the next local one.
        """
        # Rank 0 lists for all: on a network file system listings of ranks may differ for seconds.
        remaining_names = self._ranks.run_on_first(
            f"listing {self.root} failed",
            lambda: [entry.path.name for entry in reversed(self.entries()) if step in (None, entry.step)],
        )
        while remaining_names:
            path = self.root / remaining_names.pop(0)
            verified: list[Manifest] = []
            outcomes = self._ranks.outcomes(partial(self._verify, path, verified))
            if any(outcome.error for outcome in outcomes):
                self._refuse(path, format_failures(outcomes), search)
            else:
                yield path, verified[0]
            # Also reached after a yielded candidate that turned out unreadable in `load`.
            if path in self._refused and self._config.mirror:
                remaining_names[:0] = self._fetch_from_mirror(
                    order_of(remaining_names[0]) if remaining_names else BEFORE_ALL, step, search
                )

    def _fetch_from_mirror(self, newer_than: Order, step: int | None, search: CheckpointSearch) -> list[str]:
        """Fetches the mirror's newest checkpoint after ``newer_than``; returns its name in a list, empty for none."""
        began, mirror = time.monotonic(), Mirror(self._config.mirror, self.root.parent.name)
        try:
            fetched = self._ranks.run_on_first(
                "asking the mirror failed", lambda: mirror.fetch(self.root, newer_than, step)
            )
        except CheckpointError as error:
            search.mirror_events.append({"kind": "mirror_failed", "reason": str(error)})
            return []
        # A fetched checkpoint that turned out damaged must not be fetched again and again.
        if fetched is None or self.root / fetched.path.name in search.fetched:
            return []
        search.fetched.add(self.root / fetched.path.name)
        self._refused.discard(self.root / fetched.path.name)
        search.mirror_events.append(
            {"kind": "checkpoint_fetched", **fetched.event_fields(mirror, time.monotonic() - began)}
        )
        return [fetched.path.name]

    def _verify(self, path: Path, verified: list[Manifest]) -> None:
        """Checks the manifest and this rank's share of the files, balanced by size; appends it to ``verified``."""
        manifest = Manifest.read(path)
        rank_bytes = [0] * self._ranks.count
        # Largest first to the least loaded rank; every rank computes the same assignment without a message.
        for name, record in sorted(manifest.files.items(), key=lambda item: (-item[1].size, item[0])):
            rank = rank_bytes.index(min(rank_bytes))
            # + 1: empty files, too, are spread over ranks.
            rank_bytes[rank] += record.size + 1
            if rank == self._ranks.rank and (fault := find_damage(path / name, record)):
                raise CheckpointError(fault)
        if self._ranks.rank == 0 and find_backend(manifest.backend).describe(path) != dict(manifest.tensors):
            raise CheckpointError(f"{MANIFEST} lists other tensors than the files hold")
        verified.append(manifest)

    def _gather_targets(self, targets: Mapping[str, Tensor]) -> dict[str, TensorRecord]:
        """Returns the table of all ranks' targets; tables are sent only when they differ (pipeline stages)."""
        # A digest of some bytes first; tables of a large model would be megabytes from every rank.
        digests = self._ranks.run_on_all("loading failed", lambda: fit.digest(fit.tabulate_tensors(targets)))
        local_table = fit.tabulate_tensors(targets)
        return local_table if len(set(digests)) == 1 else fit.merge_tables(self._ranks.gather(local_table))

    def _refuse(self, path: Path, reason: str, search: CheckpointSearch) -> None:
        search.refused.append(RefusedCheckpoint(path, reason))
        self._refused.add(path)

    def _accept(self, path: Path, manifest: Manifest, search: CheckpointSearch) -> LoadedCheckpoint:
        self._step = manifest.step
        return search.build_result(path, manifest)

    def _raise_none_found(self, step: int | None, search: CheckpointSearch, required: bool) -> None:
        root_label = f"{self.root}" + (f" at step {step}" if step is not None else "")
        if search.refused:
            raise CheckpointError(f"no checkpoint in {root_label} is good: {search.reasons()}; {CURE}")
        if required:
            raise CheckpointError(f"there is no checkpoint in {root_label}")
