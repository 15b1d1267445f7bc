"""What NCCL's flight recorder says of a rank: the collective that its device has not finished.

A host that hands work to a GPU goes on at once, so its stamps don't say what the GPU waits for. The recorder keeps the
last collectives of a process with their state; what it dumps is told here in words.
Source: torch/csrc/distributed/c10d/FlightRecorderDetail.hpp, version 2.10 of the dump (torch 2.11 to
2.13); gloo records nothing in 2.11.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.records import parse_json
from meshwright.units import format_bytes

_COMPLETED, _STARTED = "completed", "started"
_UNNAMED = ("", "undefined")
_BYTES = {
    "Bool": 1, "Byte": 1, "Char": 1, "UInt16": 2, "UInt32": 4, "UInt64": 8, "Short": 2, "Int": 4, "Long": 8, "Half": 2,
    "BFloat16": 2, "Float": 4, "Double": 8, "ComplexHalf": 4, "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip
"""Size of an element by the name that c10::toString gives its type; names of eight bits end so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfinished:
    """A collective that a device was given and has not finished."""

    op: str
    """Its kind, as ``all_reduce``."""
    group: str
    """The axis over which it goes, or the name of its group."""
    number: int
    """Which of its group's collectives it is, as the recorder counts: the same on all ranks of the group."""
    size_bytes: int
    """Of what this rank gives to it; 0 where that isn't known."""
    started: bool
    """Whether the recorder knows that the device began with it."""
    behind: int
    """Collectives that wait behind it."""

    def __str__(self) -> str:
        """Returns ``all_reduce over tp, 2.00 MiB (number 41 of its group), and 3 behind it``."""
        size = f", {format_bytes(self.size_bytes)}" if self.size_bytes else ""
        behind = f", and {self.behind} behind it" if self.behind else ""
        return f"{self.op} over {self.group}{size} (number {self.number} of its group){behind}"


def unfinished(dump: Mapping[str, Any]) -> Unfinished | None:
    """Returns the collective that a device is at: of those that aren't complete the first that it was given.

    Those behind it in its stream can't begin before it ends. One that is known to have started comes before any that
    isn't, since other streams may have been given something earlier.

    Args:
        dump: as `read_dump` returns it.

    Returns:
        The collective; None when all that were recorded are complete, or none was.
    """
    left = [one for one in dump.get("entries", ()) if not _ended(one)]
    if not left:
        return None
    first = min(left, key=lambda one: (one.get("state") != _STARTED, one.get("record_id", 0)))
    return Unfinished(
        op=str(first["profiling_name"]).partition(":")[2].partition(" ")[0].lstrip("_") or "collective",
        group=_group(first.get("process_group", ())),
        number=int(first["p2p_seq_id"] if first.get("is_p2p") else first["collective_seq_id"]),
        size_bytes=_size_bytes(first.get("input_sizes", ()), first.get("input_dtypes", ())),
        started=first.get("state") == _STARTED,
        behind=len(left) - 1,
    )


def _ended(entry: Mapping[str, Any]) -> bool:
    """Whether a collective is done. NCCL's that is put away and not complete has timed out; gloo's never says so."""
    kind = str(entry.get("profiling_name", "")).partition(":")[0]
    return entry.get("state") == _COMPLETED or (bool(entry.get("retired")) and kind == "gloo")


def _group(names: Any) -> str:
    """Returns the axis of a group of a device mesh, else its description or name."""
    name, description = (*names, "", "")[:2]
    if description == "default_pg":
        return "world"
    if description in _UNNAMED:
        return f"group {name}"
    return str(description).removeprefix("mesh_")


def _size_bytes(sizes: Any, types: Any) -> int:
    """Returns the bytes of tensors; 0 where one is of a type that isn't known."""
    found = 0
    for shape, kind in zip(sizes, types):
        element = _BYTES.get(kind, 1 if str(kind).startswith(("Float8", "Float4")) else 0)
        if not element:
            return 0
        found += element * math.prod(shape)
    return found


def read_dump(data: bytes) -> Mapping[str, Any]:
    """Returns a dump in JSON as plain values; empty for what is none."""
    try:
        found = parse_json(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def find_recorder() -> Callable[[], bytes] | None:
    """Returns what dumps this process's collectives that aren't complete, as JSON; None where torch has no recorder."""
    import torch._C._distributed_c10d as c10d

    dump = getattr(c10d, "_dump_nccl_trace_json", None) or getattr(c10d, "_dump_fr_trace_json", None)
    # Collectives, not the state of groups alone; of them those that are active.
    return (lambda: bytes(dump(True, True))) if dump is not None else None
