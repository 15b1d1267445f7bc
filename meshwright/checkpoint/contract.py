"""The contract of a checkpoint backend: how tensors become files and come back under any layout.

A backend file (`checkpoint/<name>.py`) exports one `BACKEND`. It knows nothing of steps, manifests or renames: the
store gives it an empty folder to write to, and a folder of verified files to read from. Tensors are a flat mapping
from names such as ``weights/model.layers.0.q.weight`` or ``exp_avg/model.layers.0.q.weight``. A `torch.Tensor` in it is
equal on every rank that has it and is written once; a `DTensor` has any placements.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import meshwright.checkpoint as folder
from meshwright.errors import ConfigError, nearest

if TYPE_CHECKING:  # what lists and cleans runs reads manifests, and needs no torch
    from torch import Tensor
    from torch.distributed import ProcessGroup


class TensorRecord(NamedTuple):
    """Global shape and dtype of a saved tensor, or of a target."""

    shape: tuple[int, ...]
    """Global shape."""
    dtype: str
    """Element type as torch names it, without the prefix: ``float32``."""


class FileRecord(NamedTuple):
    """Size and checksum of a file as it was written."""

    size: int
    """Bytes."""
    checksum: str
    """``crc32:<8 hex digits>`` or ``sha256:<64 hex digits>``, of the bytes before they reach the file system."""


@runtime_checkable
class Backend(Protocol):
    """Turns tensors into files of a folder and back. ``group`` is a gloo group, or None for a process alone."""

    def write(self, folder: Path, tensors: Mapping[str, Tensor], group: ProcessGroup | None) -> dict[str, FileRecord]:
        """Writes this rank's shards; called by every rank at once, with an empty folder that only this save uses.

        Every distinct shard of every tensor is written by exactly one rank, and files are synced before this returns.

        Args:
            folder: an existing, empty folder that all ranks see.
            tensors: name to tensor of any shape; ranks may hold different names (pipeline stages).
            group: the ranks that save together.

        Returns:
            The files that this rank wrote, with size and checksum of the bytes handed to the file system.

        Raises:
            CheckpointError: on every rank when any rank failed.
        """
        ...

    def describe(self, folder: Path) -> dict[str, TensorRecord]:
        """Lists the tensors of a folder without reading their values; called by any rank alone.

        Raises:
            CheckpointError: when the folder can't be read, or doesn't hold every element of each tensor exactly once.
        """
        ...

    def read(self, folder: Path, targets: Mapping[str, Tensor], group: ProcessGroup | None) -> None:
        """Fills this rank's tensors in place; called by every rank at once, after names, shapes and types agreed.

        Args:
            folder: a folder whose files have been verified.
            targets: name to tensor or DTensor of any layout; each element is written exactly once.
            group: the ranks that load together.

        Raises:
            CheckpointError: on every rank when any rank failed; targets are then partly overwritten.
        """
        ...

    def read_full(self, folder: Path, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, full tensor on the CPU) in the order of ``names``; called by one process, without a group.

        At most about 256 MiB beyond the largest tensor are held at once, as long as the caller lets go of them.

        Raises:
            CheckpointError: for a name that isn't there.
        """
        ...


@cache
def known_backends() -> dict[str, Backend]:
    """Imports every module of this folder and returns the backends among them, by name."""
    backends = {}
    for module_info in pkgutil.iter_modules(folder.__path__):
        backend = getattr(importlib.import_module(f"{folder.__name__}.{module_info.name}"), "BACKEND", None)
        if isinstance(backend, Backend):
            backends[module_info.name] = backend
    return backends


def find_backend(name: str) -> Backend:
    """Returns a backend by name.

    Raises:
        ConfigError: when no file has that name.
    """
    backends = known_backends()
    if name not in backends:
        raise ConfigError(f"checkpoint.backend = '{name}' is not known{nearest(name, backends)}")
    return backends[name]
