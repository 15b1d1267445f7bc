"""Compares a checkpoint's tensors with the targets by name, shape and dtype, before any is read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from meshwright.checkpoint.contract import TensorRecord
from meshwright.checkpoint.manifest import Manifest
from meshwright.errors import CheckpointError

_MAX_NAMES = 8


def tabulate_tensors(tensors: Mapping[str, Tensor]) -> dict[str, TensorRecord]:
    """Returns name to global shape and dtype; a DTensor's shape is already global.

    Raises:
        CheckpointError: for a tensor on the meta device, which holds no values.
    """
    if empty := [name for name, tensor in tensors.items() if tensor.is_meta]:
        raise CheckpointError(f"tensors on the meta device hold no values; materialise {_format_names(empty)} first")
    return {
        name: TensorRecord(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    }


def digest(table: Mapping[str, TensorRecord]) -> str:
    """Returns a sha256 of a table: ranks compare it first, and send tables only where they differ."""
    text = "\n".join(f"{name} {record.shape} {record.dtype}" for name, record in sorted(table.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def merge_tables(tables: list[dict[str, TensorRecord]]) -> dict[str, TensorRecord]:
    """Merges the ranks' tables; pipeline stages hold different names.

    Raises:
        CheckpointError: when two ranks disagree about a tensor.
    """
    union: dict[str, TensorRecord] = {}
    for rank, table in enumerate(tables):
        for name, record in table.items():
            # Replicas on several ranks must agree on shape and dtype.
            if union.setdefault(name, record) != record:
                raise CheckpointError(
                    f"rank {rank} has '{name}' as {_format_record(record)}, another as {_format_record(union[name])}"
                )
    return union


def describe_misfit(targets: Mapping[str, TensorRecord], saved: Mapping[str, TensorRecord]) -> str | None:
    """Returns why a checkpoint doesn't fit the targets, with tensor names, or None when it does."""
    common_names = [name for name in targets if name in saved]
    # All differences at once: a user who mends one name a run would need many runs.
    findings = {
        "missing in the checkpoint": [name for name in targets if name not in saved],
        "foreign (in the checkpoint, not in the model)": [name for name in saved if name not in targets],
        "of another shape": [
            f"{name} (saved {saved[name].shape}, wanted {targets[name].shape})"
            for name in common_names
            if saved[name].shape != targets[name].shape
        ],
        "of another type": [
            f"{name} (saved {saved[name].dtype}, wanted {targets[name].dtype})"
            for name in common_names
            if saved[name].dtype != targets[name].dtype
        ],
    }
    lines = [f"{len(names)} {fault}: {_format_names(names)}" for fault, names in findings.items() if names]
    return "; ".join(lines) or None


def _format_names(names: list[str]) -> str:
    suffix = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + suffix


def _format_record(record: TensorRecord) -> str:
    return f"{record.dtype} {record.shape}"


def check(
    path: Path,
    manifest: Manifest,
    targets: Mapping[str, TensorRecord],
    expect: Mapping[str, str],
    may_remain: Callable[[str], bool] = lambda name: False,
) -> None:
    """Refuses a good checkpoint of another model, or of other data.

    Args:
        path: of the checkpoint, for the message.
        manifest: of the checkpoint.
        targets: table of the tensors to fill.
        expect: fields of `Origin` and the values that they must have.
        may_remain: whether a saved tensor of a name may have no target.
    """
    saved = {name: record for name, record in manifest.tensors.items() if name in targets or not may_remain(name)}
    if reason := describe_misfit(targets, saved):
        raise CheckpointError(f"{path} is a checkpoint of another model: {reason}")
    for name, value in expect.items():
        if (saved_value := manifest.origin.to_json()[name]) != value:
            raise CheckpointError(f"{path} comes from another {name}: its fingerprint is {saved_value}, not {value}")
