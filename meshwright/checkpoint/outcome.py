"""What came of a save or a load."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.checkpoint.folder import RefusedCheckpoint
from meshwright.checkpoint.manifest import Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that stands."""

    step: int
    """Optimizer steps done."""
    path: Path
    """Its folder."""
    size_bytes: int
    """Bytes of all its files."""
    seconds: float
    """Time that the save took on this rank."""
    removed: tuple[Path, ...] = ()
    """Older checkpoints that were collected (known on rank 0)."""
    left: tuple[RefusedCheckpoint, ...] = ()
    """Older checkpoints that could not be removed, and why (known on rank 0)."""
    copied: Mapping[str, Any] = field(default_factory=dict)
    """Of its copy in ``config.mirror``: where it is and how long it took, or why there is none (known on rank 0)."""

    def told(self) -> dict[str, Any]:
        """Returns what its event says beside the step."""
        return {"path": str(self.path), "bytes": self.size_bytes, "seconds": self.seconds, **self.copied}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedCheckpoint:
    """A checkpoint that was found good, and whose tensors were read if targets were given."""

    step: int
    """Optimizer steps done."""
    path: Path
    """Its folder."""
    manifest: Manifest
    """Everything else: origin, tensors, files."""
    refused: tuple[RefusedCheckpoint, ...]
    """Newer checkpoints that didn't verify."""
    seconds: float
    """Time that it took on this rank."""
    asked: tuple[Mapping[str, Any], ...] = ()
    """What came of asking ``config.mirror`` in their place: events, each with its ``kind``."""

    @property
    def meta(self) -> Mapping[str, Any]:
        """The trainer's plain values."""
        return self.manifest.meta


@dataclass(slots=True)
class CheckpointSearch:
    """A search for a checkpoint that is good, as far as it has come."""

    began: float = field(default_factory=time.monotonic)
    """time.monotonic() of its beginning."""
    refused: list[RefusedCheckpoint] = field(default_factory=list)
    """Checkpoints that aren't good."""
    brought: set[Path] = field(default_factory=set)
    """Those that the mirror gave."""
    asked: list[Mapping[str, Any]] = field(default_factory=list)
    """As in `LoadedCheckpoint`."""

    def loaded(self, path: Path, manifest: Manifest) -> LoadedCheckpoint:
        """Returns its end: the checkpoint that is good."""
        return LoadedCheckpoint(
            step=manifest.step,
            path=path,
            manifest=manifest,
            refused=tuple(self.refused),
            seconds=time.monotonic() - self.began,
            asked=tuple(self.asked),
        )

    def reasons(self) -> str:
        """Returns why none is."""
        failed = [str(event["reason"]) for event in self.asked if "reason" in event]
        return "; ".join([f"{item.path.name}: {item.reason}" for item in self.refused] + failed)
