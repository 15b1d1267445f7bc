"""Whether a checkpoint's tensors are those asked for: compared by name, shape and type before any is read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from meshwright.checkpoint.contract import TensorRecord
from meshwright.checkpoint.manifest import Manifest
from meshwright.errors import CheckpointError

_SHOWN = 8


def tabulate(tensors: Mapping[str, Tensor]) -> dict[str, TensorRecord]:
    """Returns name to global shape and type; a DTensor's shape is global by itself.

    Raises:
        CheckpointError: for a tensor on the meta device, which holds no values.
    """
    if empty := [name for name, tensor in tensors.items() if tensor.is_meta]:
        raise CheckpointError(f"tensors on the meta device hold no values; materialise {_listed(empty)} first")
    return {
        name: TensorRecord(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    }


def digest(table: Mapping[str, TensorRecord]) -> str:
    """Returns a fingerprint of a table, so that equal tables needn't be sent."""
    text = "\n".join(f"{name} {record.shape} {record.dtype}" for name, record in sorted(table.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def merge(tables: list[dict[str, TensorRecord]]) -> dict[str, TensorRecord]:
    """Returns the union of the ranks' tables; ranks of a pipeline hold different names.

    Raises:
        CheckpointError: when two ranks disagree about a tensor.
    """
    union: dict[str, TensorRecord] = {}
    for rank, table in enumerate(tables):
        for name, record in table.items():
            if union.setdefault(name, record) != record:
                raise CheckpointError(f"rank {rank} has '{name}' as {_shown(record)}, another as {_shown(union[name])}")
    return union


def misfit(wanted: Mapping[str, TensorRecord], saved: Mapping[str, TensorRecord]) -> str | None:
    """Returns why a checkpoint doesn't fit its targets, with the names, or None when it does."""
    both = [name for name in wanted if name in saved]
    findings = {
        "missing in the checkpoint": [name for name in wanted if name not in saved],
        "foreign (in the checkpoint, not in the model)": [name for name in saved if name not in wanted],
        "of another shape": [
            f"{name} (saved {saved[name].shape}, wanted {wanted[name].shape})"
            for name in both
            if saved[name].shape != wanted[name].shape
        ],
        "of another type": [
            f"{name} (saved {saved[name].dtype}, wanted {wanted[name].dtype})"
            for name in both
            if saved[name].dtype != wanted[name].dtype
        ],
    }
    lines = [f"{len(names)} {what}: {_listed(names)}" for what, names in findings.items() if names]
    return "; ".join(lines) or None


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _shown(record: TensorRecord) -> str:
    return f"{record.dtype} {record.shape}"


def check(path: Path, manifest: Manifest, wanted: Mapping[str, TensorRecord], expect: Mapping[str, str]) -> None:
    """Refuses a good checkpoint of something else."""
    if reason := misfit(wanted, manifest.tensors):
        raise CheckpointError(f"{path} is a checkpoint of another model: {reason}")
    for name, value in expect.items():
        if (found := manifest.origin.to_json()[name]) != value:
            raise CheckpointError(f"{path} comes from another {name}: its fingerprint is {found}, not {value}")
