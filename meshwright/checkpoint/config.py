"""When checkpoints are written, how many are kept, and by which backend."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.config import Config
from meshwright.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig(Config):
    """Checkpoints of a run."""

    every: int = 500
    """Steps between checkpoints; 0 writes only the one at the end of the run."""
    keep: int = 3
    """Number of newest good checkpoints that stay; older ones are removed once the new one stands."""
    backend: str = "image"
    """File format: the name of a backend's file in ``meshwright/checkpoint/``."""
    verify: bool = True
    """Read each new file back from the disk and compare its checksum before the checkpoint counts and older ones are
    removed; false compares sizes only. Loading always compares checksums."""
    mirror: str = ""
    """A second place for them by any path of fsspec, as ``s3://bucket/runs``: a folder named like the run's directory.
    Each is copied there once it stands; a machine whose run directory has none, or older ones, starts with a copy of
    the newest. Empty for none."""
    wait_s: float = 600.0
    """Longest wait for another rank during a save or a load, in seconds; it must cover the slowest rank's write."""

    def check(self) -> None:
        """Raises `ConfigError` for numbers that can't be."""
        if self.every < 0:
            raise ConfigError(f"checkpoint.every = {self.every}: give a number of steps, or 0 for only at the end")
        if self.keep < 1:
            raise ConfigError(f"checkpoint.keep = {self.keep}: at least one checkpoint has to stay; give 1 or more")
        if self.wait_s <= 0:
            raise ConfigError(f"checkpoint.wait_s = {self.wait_s}: every wait has a limit above 0 seconds")

    def due(self, step: int) -> bool:
        """Returns whether a checkpoint is to be written after this step (steps done, counted from 1)."""
        return self.every > 0 and step > 0 and step % self.every == 0
