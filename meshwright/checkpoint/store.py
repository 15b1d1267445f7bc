"""The store: a folder of checkpoints that is whole at any moment, whatever is killed, and believes no file unchecked.

A checkpoint is written beside (``.writing-step-00000500-3fa4c2d1``), every file synced and summed by the rank that
writes it, the manifest last; then it is renamed and the folder synced. What stands under ``step-...`` is therefore
complete, and loading still checks every byte of it.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from meshwright.checkpoint import fit
from meshwright.checkpoint.agreement import Agreement, blame, build_group
from meshwright.checkpoint.config import CheckpointConfig
from meshwright.checkpoint.contract import FileRecord, TensorRecord, find_backend
from meshwright.checkpoint.files import SummedWriter, damage
from meshwright.checkpoint.folder import CheckpointEntry, Folder, RefusedCheckpoint, whole
from meshwright.checkpoint.image import copy_image
from meshwright.checkpoint.manifest import MANIFEST, Manifest, Origin
from meshwright.checkpoint.mirror import BEFORE_ALL, Mirror, Order, order
from meshwright.checkpoint.outcome import CheckpointSearch, LoadedCheckpoint, SavedCheckpoint
from meshwright.checkpoint.snapshot import State
from meshwright.errors import CheckpointError

IMAGE = "image"
"""Name of the backend whose files are images of snapshots."""


class CheckpointStore:
    """Saves, finds, verifies, loads and collects the checkpoints of one folder.

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
            group: gloo group of the ranks (`agreement.build_group`), or how they agree; None for a process alone.
            stamp: told of each phase of a save as it begins on this rank: ``open``, ``write``, ``written``,
                ``manifest``, ``rename``, ``renamed``, ``collect``, ``copy``, ``saved``; it must not raise.
            fence: raises when others have taken over the run; asked right before a checkpoint gets its name.

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
        self._clean = False

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

    def went_on(self, step: int) -> None:
        """Tells that the run goes on from a state of this step from elsewhere; later checkpoints may stand."""
        self._step = step

    @property
    def agreement(self) -> Agreement:
        """How the ranks of this store agree."""
        return self._ranks

    def entries(self) -> list[CheckpointEntry]:
        """Returns every checkpoint from oldest to newest, unverified."""
        return self._folder.entries()

    def latest(self) -> CheckpointEntry | None:
        """Returns the newest checkpoint whose manifest holds and whose files have the right sizes, or None."""
        return next((entry for entry in reversed(self.entries()) if whole(entry.path)), None)

    def withdraw(self, after: int) -> list[Path]:
        """Takes back checkpoints of later steps, which are damaged; returns them. The first save removes them."""
        return self._folder.withdraw(after)

    def clean(self) -> None:
        """Removes what dead saves left behind; only for the process that is about to write. The first save does it."""
        self._folder.clean()
        self._clean = True

    def save(
        self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], origin: Origin | None = None
    ) -> SavedCheckpoint:
        """Writes a checkpoint: it stands when this returns; when this raises, it does so on every rank.

        Args:
            step: optimizer steps done.
            tensors: name to tensor (the same on all ranks that have it) or DTensor.
            meta: plain values for the trainer's own use, taken from rank 0.
            origin: what trained the state, taken from rank 0.

        Raises:
            CheckpointError: the same on every rank: a full or read-only disk, an error in a writer, a lost rank, or a
                folder that already holds later checkpoints of a run that wasn't resumed.
        """
        backend = find_backend(self._config.backend)

        def write(folder: Path) -> dict[str, FileRecord]:
            return backend.write(folder, tensors, self._ranks.group)

        return self._save(step, self._config.backend, write, lambda: fit.tabulate(tensors), meta, origin or Origin())

    def save_state(self, step: int, state: State, meta: Mapping[str, Any], origin: Origin) -> SavedCheckpoint:
        """Writes a checkpoint of what ranks left in memory, or this process's share of one. See `save`."""

        def write(folder: Path) -> dict[str, FileRecord]:
            return {name: record for one in state.snapshots for name, record in copy_image(folder, one).items()}

        return self._save(step, IMAGE, write, lambda: None, meta, origin)

    def _save(
        self,
        step: int,
        backend: str,
        write: Callable[[Path], dict[str, FileRecord]],
        check: Callable[[], object],
        meta: Mapping[str, Any],
        origin: Origin,
    ) -> SavedCheckpoint:
        started, what = time.monotonic(), f"saving the checkpoint of step {step} failed"
        self._stamp("open")
        opened = self._ranks.everywhere(what, lambda: self._open(step, check, meta, origin))
        folder, target = (self.root / name for name in opened[0])
        self._stamp("write")
        try:
            reports = self._ranks.everywhere(what, lambda: self._write(folder, write))
            files = {name: FileRecord(*record) for report in reports for name, record in report.items()}
            self._ranks.once(what, lambda: self._commit(folder, target, step, backend, files, meta, origin))
        except CheckpointError as error:
            if self._ranks.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            raise CheckpointError(f"{error}; the checkpoints before it in {self.root} stand") from error
        self._step = step
        removed, left = self._collect(target) if self._ranks.rank == 0 else ((), ())
        copied = self._copy(target) if self._ranks.rank == 0 and self._config.mirror else {}
        self._stamp("saved")
        return SavedCheckpoint(
            step=step,
            path=target,
            size_bytes=sum(record.size for record in files.values()),
            seconds=time.monotonic() - started,
            removed=removed,
            left=left,
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
        for path, manifest in self._candidates(step, search):
            return self._accepted(path, manifest, search)
        self._none(step, search, required)
        return None

    def load(
        self,
        targets: Mapping[str, Tensor],
        *,
        expect: Mapping[str, str] | None = None,
        step: int | None = None,
        required: bool = True,
    ) -> LoadedCheckpoint | None:
        """Fills tensors from the newest checkpoint that verifies, else from the one before, and tells what was refused.

        Args:
            targets: name to tensor or DTensor of any layout, filled in place.
            expect: fields of `Origin` (``model``, ``data``) that must be equal.
            step: only checkpoints of this step.
            required: raise instead of returning None when there is no checkpoint at all.

        Raises:
            CheckpointError: the same on every rank: none verifies; or one that does holds other tensors than the
                targets, or comes from another model or data (naming them), in which case nothing was read.
        """
        search = CheckpointSearch()
        wanted = self._union(targets)
        for path, manifest in self._candidates(step, search):
            fit.check(path, manifest, wanted, expect or {})
            backend = find_backend(manifest.backend)
            outcomes = self._ranks.outcomes(partial(backend.read, path, targets, self._ranks.group))
            if any(outcome.error for outcome in outcomes):
                self._refuse(path, blame(outcomes), search)
                continue
            return self._accepted(path, manifest, search)
        self._none(step, search, required)
        return None

    def read_full(self, loaded: LoadedCheckpoint, names: Sequence[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, full tensor on the CPU) of a checkpoint that was found, in one process.

        Args:
            loaded: what `find` or `load` returned.
            names: which tensors; all by default.

        Raises:
            CheckpointError: for a name that isn't there.
        """
        wanted = list(loaded.manifest.tensors) if names is None else names
        return find_backend(loaded.manifest.backend).read_full(loaded.path, wanted)

    def _open(
        self, step: int, check: Callable[[], object], meta: Mapping[str, Any], origin: Origin
    ) -> tuple[str, str] | None:
        """Checks what is to be saved; rank 0 makes the folder, and returns its name and the name that it will get.

        All that can fail on one rank alone stands here, before the backend's own collectives.
        """
        check()
        if self._ranks.rank != 0:
            return None
        try:
            json.dumps([dict(meta), origin.to_json()])
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"meta and origin must be plain JSON values: {error}") from None
        self.root.mkdir(parents=True, exist_ok=True)
        if not self._clean:
            self.clean()
        entries = self.entries()
        if self._step is None and entries and entries[-1].step >= step:
            raise CheckpointError(
                f"{self.root} already holds {entries[-1].path.name} of a run that wasn't resumed here; "
                "resume it, or give another run directory"
            )
        return self._folder.begin(step)

    def _write(self, folder: Path, write: Callable[[Path], dict[str, FileRecord]]) -> dict[str, FileRecord]:
        """Writes this rank's part and checks it."""
        files = write(folder)
        for name, record in files.items():
            if fault := damage(folder / name, record, contents=self._config.verify, cold=True):
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
        """Writes the manifest, and gives the checkpoint its name once everything is on the disk."""
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
        found = {path.name for path in folder.iterdir()}
        if found != set(files):
            raise CheckpointError(
                f"rank 0 sees {len(found)} files where the ranks wrote {len(files)} "
                f"({', '.join(sorted(found ^ set(files))[:4])}); {self.root} must be a folder that all nodes share"
            )
        with SummedWriter(folder / MANIFEST, "sha256") as stream:
            stream.write(manifest.render())
        self._stamp("rename")
        self._fence()
        self._folder.rename(folder, target)
        self._stamp("renamed")

    def _collect(self, new: Path) -> tuple[tuple[Path, ...], tuple[RefusedCheckpoint, ...]]:
        self._stamp("collect")
        return self._folder.collect(new, self._config.keep, self._refused)

    def _copy(self, new: Path) -> dict[str, Any]:
        """Copies a checkpoint that stands to its other place; returns where, how long it took, or why it couldn't."""
        self._stamp("copy")
        mirror, began = Mirror(self._config.mirror, self.root.parent.name), time.monotonic()
        try:
            mirror.put(new, self._config.keep, self._config.verify)
        except CheckpointError as error:
            return {"copy_failed": str(error)}
        return {"copy": f"{mirror}/{new.name}", "copy_seconds": time.monotonic() - began}

    def _candidates(self, step: int | None, search: CheckpointSearch) -> Iterator[tuple[Path, Manifest]]:
        """Yields checkpoints that verify, newest first; all ranks go through the same ones.

        Where one doesn't, and the mirror has one that is later than the next one here, that is brought back first.
        """
        left = self._ranks.once(
            f"listing {self.root} failed",
            lambda: [entry.path.name for entry in reversed(self.entries()) if step in (None, entry.step)],
        )
        while left:
            path = self.root / left.pop(0)
            verified: list[Manifest] = []
            outcomes = self._ranks.outcomes(partial(self._verify, path, verified))
            if any(outcome.error for outcome in outcomes):
                self._refuse(path, blame(outcomes), search)
            else:
                yield path, verified[0]
            if path in self._refused and self._config.mirror:
                left[:0] = self._brought_back(order(left[0]) if left else BEFORE_ALL, step, search)

    def _brought_back(self, newer_than: Order, step: int | None, search: CheckpointSearch) -> list[str]:
        """Copies the newest that is later than ``newer_than`` from the mirror; returns its name, or none."""
        began, mirror = time.monotonic(), Mirror(self._config.mirror, self.root.parent.name)
        try:
            found = self._ranks.once("asking the mirror failed", lambda: mirror.fetch(self.root, newer_than, step))
        except CheckpointError as error:
            search.asked.append({"kind": "mirror_failed", "reason": str(error)})
            return []
        if found is None or self.root / found.path.name in search.brought:
            return []
        search.brought.add(self.root / found.path.name)
        self._refused.discard(self.root / found.path.name)
        search.asked.append({"kind": "checkpoint_fetched", **found.told(mirror, time.monotonic() - began)})
        return [found.path.name]

    def _verify(self, path: Path, verified: list[Manifest]) -> None:
        """Checks the manifest and this rank's share of the files, balanced by size; hands the manifest over."""
        manifest = Manifest.read(path)
        loads = [0] * self._ranks.count
        for name, record in sorted(manifest.files.items(), key=lambda item: (-item[1].size, item[0])):
            rank = loads.index(min(loads))
            loads[rank] += record.size + 1
            if rank == self._ranks.rank and (fault := damage(path / name, record)):
                raise CheckpointError(fault)
        if self._ranks.rank == 0 and find_backend(manifest.backend).describe(path) != dict(manifest.tensors):
            raise CheckpointError(f"{MANIFEST} lists other tensors than the files hold")
        verified.append(manifest)

    def _union(self, targets: Mapping[str, Tensor]) -> dict[str, TensorRecord]:
        """Returns the targets of all ranks; tables are only sent when ranks hold different tensors (pipeline)."""
        digests = self._ranks.everywhere("loading failed", lambda: fit.digest(fit.tabulate(targets)))
        table = fit.tabulate(targets)
        return table if len(set(digests)) == 1 else fit.merge(self._ranks.gather(table))

    def _refuse(self, path: Path, reason: str, search: CheckpointSearch) -> None:
        search.refused.append(RefusedCheckpoint(path, reason))
        self._refused.add(path)

    def _accepted(self, path: Path, manifest: Manifest, search: CheckpointSearch) -> LoadedCheckpoint:
        self._step = manifest.step
        return search.loaded(path, manifest)

    def _none(self, step: int | None, search: CheckpointSearch, required: bool) -> None:
        where = f"{self.root}" + (f" at step {step}" if step is not None else "")
        if search.refused:
            raise CheckpointError(f"no checkpoint in {where} is good: {search.reasons()}")
        if required:
            raise CheckpointError(f"there is no checkpoint in {where}")
