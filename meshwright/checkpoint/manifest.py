"""The manifest of a checkpoint: files, tensors and origin, as JSON that carries its own checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from meshwright.checkpoint.contract import FileRecord, TensorRecord
from meshwright.errors import CheckpointError, MeshwrightError
from meshwright.json_types import JsonObject
from meshwright.names import plain_name
from meshwright.records import parse_json
from meshwright.spec.layout import Layout

MANIFEST = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Model, data, layout and config of the run that saved a checkpoint."""

    model: str = ""
    """Fingerprint of the model's architecture; empty where there is none to compare."""
    data: str = ""
    """Fingerprint of the token files."""
    layout: Layout | None = None
    """Layout that the state was saved under; it may be loaded under any other."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The run's config as plain values."""

    def to_json(self) -> dict[str, object]:
        """Returns plain values for `from_json`."""
        layout = self.layout.to_json() if self.layout is not None else None
        return {"model": self.model, "data": self.data, "layout": layout, "config": dict(self.config)}

    @classmethod
    def from_json(cls, values: JsonObject) -> Self:
        """Builds the origin from `to_json`'s values."""
        layout = Layout.from_json(values["layout"]) if values["layout"] else None
        return cls(model=values["model"], data=values["data"], layout=layout, config=values["config"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Contents of a checkpoint, all of which is verified before it is loaded."""

    name: str
    """Name of the checkpoint's folder."""
    step: int
    """Optimizer steps done."""
    ranks: int
    """Number of ranks that saved."""
    backend: str
    """Backend that wrote the files."""
    files: Mapping[str, FileRecord]
    """Files by name, without the manifest."""
    tensors: Mapping[str, TensorRecord]
    """Tensors by name, with global shapes."""
    origin: Origin
    """Model, data, layout and config of the run that saved it."""
    meta: Mapping[str, Any]
    """The trainer's plain values: optimizer scalars, data position, loss history."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(record.size for record in self.files.values())

    def render(self) -> bytes:
        """Renders the manifest as the only file contents that `read` accepts.

        Raises:
            TypeError: when meta or config holds something that JSON doesn't.
        """
        body = {
            "format": _FORMAT,
            "name": self.name,
            "step": self.step,
            "ranks": self.ranks,
            "backend": self.backend,
            "files": {name: list(record) for name, record in self.files.items()},
            "tensors": {name: [list(record.shape), record.dtype] for name, record in self.tensors.items()},
            "origin": self.origin.to_json(),
            "meta": dict(self.meta),
        }
        # Through JSON and back: tuples become lists now, so that rendering what was read gives the same bytes.
        return _with_checksum(json.loads(json.dumps(body)))

    @classmethod
    def read(cls, folder: Path, name: str = "") -> Self:
        """Reads a checkpoint's manifest.

        Args:
            folder: of the checkpoint.
            name: of the checkpoint; the folder's when empty.

        Raises:
            CheckpointError: when it is missing, altered in any byte, of another format or of another checkpoint.
        """
        try:
            raw = (folder / MANIFEST).read_bytes()
        except FileNotFoundError:
            raise CheckpointError(f"{MANIFEST} is missing") from None
        except OSError as error:
            raise CheckpointError(f"{MANIFEST} can't be read: {error.strerror or error}") from None
        body = _verified_body(raw)
        if body.get("format") != _FORMAT:
            raise CheckpointError(f"{MANIFEST} has format {body.get('format')}; this version reads {_FORMAT}")
        if body["name"] != (name or folder.name):
            raise CheckpointError(f"{MANIFEST} belongs to {body['name']}")
        try:
            return cls._from_body(body)
        except (MeshwrightError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{MANIFEST} was written by another version: {error!r}") from error

    @classmethod
    def _from_body(cls, body: JsonObject) -> Self:
        """Builds the manifest from parsed JSON; raises for missing or mistyped fields."""
        return cls(
            name=body["name"],
            step=body["step"],
            ranks=body["ranks"],
            backend=body["backend"],
            files={_file_name(name): _file_record(record) for name, record in body["files"].items()},
            tensors={name: TensorRecord(tuple(shape), dtype) for name, (shape, dtype) in body["tensors"].items()},
            origin=Origin.from_json(body["origin"]),
            meta=body["meta"],
        )


def _file_name(name: str) -> str:
    if plain_name(name, MANIFEST, CheckpointError) == MANIFEST:
        raise CheckpointError(f"{MANIFEST} lists itself")
    return name


def _file_record(record: Any) -> FileRecord:
    size, checksum = record
    if not isinstance(size, int) or size < 0 or not isinstance(checksum, str):
        raise CheckpointError(f"{MANIFEST} gives a file neither size nor checksum")
    return FileRecord(size, checksum)


def _with_checksum(body: JsonObject) -> bytes:
    """Returns the body as canonical JSON with the sha256 of that JSON as the last entry."""
    # The checksum covers a compact canonical form; the file itself is indented for people.
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    checksum = hashlib.sha256(canonical.encode()).hexdigest()
    return (json.dumps({"body": body, "checksum": checksum}, sort_keys=True, indent=1) + "\n").encode()


def _verified_body(raw: bytes) -> dict[str, object]:
    """Parses a manifest's bytes; rendering the body again must give the same bytes, so that no byte can change."""
    try:
        body = parse_json(raw)["body"]
        # Rendered again, not just summed: spaces and key order are part of what must not change.
        intact = isinstance(body, dict) and _with_checksum(body) == raw
    except (ValueError, TypeError, KeyError, RecursionError):
        intact = False
    if not intact:
        raise CheckpointError(f"{MANIFEST} is damaged: its contents don't give its checksum")
    return body
