"""Reads NCCL's flight recorder: the collective that a rank's device has not finished.

A host enqueues work on a GPU and continues at once, so its stamps don't show what the GPU waits for. The recorder keeps
the last collectives of a process with their state; this module parses its dump.
Source: torch/csrc/distributed/c10d/FlightRecorderDetail.hpp, version 2.10 of the dump (torch 2.11 to
2.13); gloo records nothing in 2.11.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.json_types import JsonObject
from meshwright.records import parse_json
from meshwright.torch_compat.tensors import collective_dump
from meshwright.units import format_bytes

_COMPLETED, _STARTED = "completed", "started"
_BATCH = ":coalesced"
_UNNAMED = ("", "undefined")
_ELEMENT_BYTES = {
    "Bool": 1, "Byte": 1, "Char": 1, "UInt16": 2, "UInt32": 4, "UInt64": 8, "Short": 2, "Int": 4, "Long": 8, "Half": 2,
    "BFloat16": 2, "Float": 4, "Double": 8, "ComplexHalf": 4, "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip
"""Bytes of an element by its type's name in c10::toString."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfinished:
    """A collective that was enqueued on a device and has not finished."""

    op: str
    """Its operation, as ``all_reduce``."""
    group: str
    """Axis of its process group, or the group's name."""
    number: int
    """Its sequence number within the group, which is the same on all ranks of the group."""
    size_bytes: int
    """Bytes of this rank's inputs; 0 where unknown."""
    started: bool
    """Whether the recorder has seen the device start it."""
    behind: int
    """Number of collectives queued behind it."""

    def __str__(self) -> str:
        """Returns ``all_reduce over tp, 2.00 MiB (number 41 of its group), and 3 behind it``."""
        size = f", {format_bytes(self.size_bytes)}" if self.size_bytes else ""
        behind = f", and {self.behind} behind it" if self.behind else ""
        return f"{self.op} over {self.group}{size} (number {self.number} of its group){behind}"


def unfinished(dump: JsonObject) -> Unfinished | None:
    """Finds the collective that a device is executing: the first incomplete one that was enqueued.

    Those behind it in its stream can't start before it ends. One that has started precedes any that hasn't, since
    another stream may have an earlier one in its queue.

    Args:
        dump: result of `read_dump`.

    Returns:
        The collective; None when all recorded ones are complete, or none was recorded.
    """
    incomplete = [entry for entry in _with_batch_states(dump.get("entries", ())) if not _is_complete(entry)]
    if not incomplete:
        return None
    # Started ones first; among equals the order in which they were enqueued.
    earliest = min(incomplete, key=lambda entry: (entry.get("state") != _STARTED, entry.get("record_id", 0)))
    return Unfinished(
        op=str(earliest["profiling_name"]).partition(":")[2].partition(" ")[0].lstrip("_") or "collective",
        group=_group_name(earliest.get("process_group", ())),
        number=int(earliest["p2p_seq_id"] if earliest.get("is_p2p") else earliest["collective_seq_id"]),
        size_bytes=_size_bytes(earliest.get("input_sizes", ()), earliest.get("input_dtypes", ())),
        started=earliest.get("state") == _STARTED,
        behind=len(incomplete) - 1,
    )


def _with_batch_states(entries: Sequence[JsonObject]) -> list[JsonObject]:
    """Returns the entries, those of a batch as one: its first operation, in the state of the whole batch.

    Operations that were started as a batch (``batch_isend_irecv``) have no events, so that theirs stays "scheduled" for
    ever; an entry behind them, "coalesced", with the same numbers, has the state.
    Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, startCoalescing and endCoalescing.
    """

    def batch_of(entry: JsonObject) -> tuple[object, ...]:
        return tuple(entry.get(name) for name in ("pg_id", "collective_seq_id", "p2p_seq_id"))

    ends = {batch_of(entry): entry for entry in entries if str(entry.get("profiling_name", "")).endswith(_BATCH)}
    ordered: dict[object, JsonObject] = {}
    for index, entry in enumerate(entries):
        end = ends.get(batch_of(entry))
        if end is None:
            ordered[index] = entry
        else:
            state = {name: end.get(name) for name in ("state", "retired")}
            ordered.setdefault(batch_of(entry), {**entry, **state})
    return list(ordered.values())


def _is_complete(entry: JsonObject) -> bool:
    """Returns whether a collective is complete. NCCL retires those that timed out; gloo marks none complete."""
    backend = str(entry.get("profiling_name", "")).partition(":")[0]
    return entry.get("state") == _COMPLETED or (bool(entry.get("retired")) and backend == "gloo")


def _group_name(names: Any) -> str:
    """Returns the axis of a device mesh's group, else the group's description or name."""
    name, description = (*names, "", "")[:2]
    if description == "default_pg":
        return "world"
    if description in _UNNAMED:
        return f"group {name}"
    return str(description).removeprefix("mesh_")


def _size_bytes(sizes: Any, types: Any) -> int:
    """Returns the bytes of tensors; 0 where a type is unknown."""
    total_bytes = 0
    for shape, type_name in zip(sizes, types):
        element_bytes = _ELEMENT_BYTES.get(type_name, 1 if str(type_name).startswith(("Float8", "Float4")) else 0)
        if not element_bytes:
            return 0
        total_bytes += element_bytes * math.prod(shape)
    return total_bytes


def read_dump(data: bytes) -> JsonObject:
    """Parses a dump in JSON; empty for bytes that aren't one."""
    try:
        contents = parse_json(data)
    except ValueError:
        return {}
    return contents if isinstance(contents, dict) else {}


def find_recorder() -> Callable[[], bytes] | None:
    """Returns a function that dumps this process's last collectives as JSON; None where torch has no recorder."""
    dump = collective_dump()
    # Arguments: include collectives (not just the state of groups), and not only active ones: a batch's operations stay
    # active for ever, and a completed entry says that it is complete.
    return (lambda: bytes(dump(True, False))) if dump is not None else None
