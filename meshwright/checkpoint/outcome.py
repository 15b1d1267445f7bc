"""Results of a save, a search and a load of checkpoints."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.checkpoint.folder import RefusedCheckpoint
from meshwright.checkpoint.manifest import Manifest
from meshwright.json_types import JsonObject

CURE = "bring one of them back, name a checkpoint.mirror that has copies, or give another --run, which begins anew"
"""What helps a run of which no checkpoint is good."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that was saved and is complete."""

    step: int
    """Optimizer steps done."""
    path: Path
    """Its folder."""
    size_bytes: int
    """Bytes of all its files."""
    seconds: float
    """Duration of the save on this rank, in seconds."""
    removed: tuple[Path, ...] = ()
    """Older checkpoints that were collected (known on rank 0)."""
    unremovable: tuple[RefusedCheckpoint, ...] = ()
    """Older checkpoints that could not be removed, and why (known on rank 0)."""
    copied: Mapping[str, Any] = field(default_factory=dict)
    """Event fields of its copy in ``config.mirror``: path and seconds, or the failure (known on rank 0)."""

    def event_fields(self) -> dict[str, object]:
        """Returns the fields of its event, without the step."""
        return {"path": str(self.path), "bytes": self.size_bytes, "seconds": self.seconds, **self.copied}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedCheckpoint:
    """A checkpoint that verified; its tensors were read if the caller gave targets."""

    step: int
    """Optimizer steps done."""
    path: Path
    """Its folder."""
    manifest: Manifest
    """Everything else: origin, tensors, files."""
    refused: tuple[RefusedCheckpoint, ...]
    """Newer checkpoints that didn't verify."""
    seconds: float
    """Duration of search and load on this rank, in seconds."""
    mirror_events: tuple[Mapping[str, Any], ...] = ()
    """Events of fetching from ``config.mirror`` in their place, each with its ``kind``."""

    @property
    def meta(self) -> JsonObject:
        """The trainer's plain values."""
        return self.manifest.meta


@dataclass(slots=True)
class CheckpointSearch:
    """State of a search for a checkpoint that verifies."""

    began: float = field(default_factory=time.monotonic)
    """time.monotonic() at its start."""
    refused: list[RefusedCheckpoint] = field(default_factory=list)
    """Checkpoints that don't verify."""
    fetched: set[Path] = field(default_factory=set)
    """Checkpoints that were fetched from the mirror."""
    mirror_events: list[Mapping[str, Any]] = field(default_factory=list)
    """Events of fetching from the mirror, each with its ``kind``."""

    def build_result(self, path: Path, manifest: Manifest) -> LoadedCheckpoint:
        """Builds the result of a search that ended with a good checkpoint."""
        return LoadedCheckpoint(
            step=manifest.step,
            path=path,
            manifest=manifest,
            refused=tuple(self.refused),
            seconds=time.monotonic() - self.began,
            mirror_events=tuple(self.mirror_events),
        )

    def reasons(self) -> str:
        """Returns why no checkpoint verified, as one line."""
        # Why the mirror couldn't help belongs to the reasons.
        mirror_failures = [str(event["reason"]) for event in self.mirror_events if "reason" in event]
        return "; ".join([f"{item.path.name}: {item.reason}" for item in self.refused] + mirror_failures)
