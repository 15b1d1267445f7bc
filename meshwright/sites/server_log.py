"""What the outer server writes beside its state: a line of `metrics.jsonl` a version, and `events.jsonl`."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from meshwright.records import parse_json

METRICS, EVENTS = "metrics.jsonl", "events.jsonl"
_LINE_S = 1.0


class ServerLog:
    """Appends lines, and prints a live one at most once a second.

    Args:
        run_dir: of the server.
        version: from which it goes on; lines of later versions, which a killed server made and didn't save, go.
        say: prints a line.
    """

    def __init__(self, run_dir: Path, version: int, say: Callable[[str], None]) -> None:
        self._say, self._said_at = say, -_LINE_S
        _drop_later_lines(run_dir / METRICS, version)
        # Unbuffered: each line is one write, which a kill leaves whole or absent.
        self._metrics = open(run_dir / METRICS, "ab", buffering=0)  # noqa: SIM115
        self._events = open(run_dir / EVENTS, "ab", buffering=0)  # noqa: SIM115

    def event(self, kind: str, **fields: object) -> None:
        """Writes an event."""
        self._events.write(_line({"kind": kind, "time": time.time()} | fields))

    def version(self, fields: dict[str, object], text: str) -> None:
        """Writes a version's line, and prints ``text`` unless another was printed just before."""
        self._metrics.write(_line(fields))
        if time.monotonic() - self._said_at >= _LINE_S:
            self._said_at = time.monotonic()
            self._say(text)

    def close(self) -> None:
        """Closes the files."""
        self._metrics.close()
        self._events.close()


def _line(values: dict[str, object]) -> bytes:
    return json.dumps(_finite(values), separators=(",", ":")).encode() + b"\n"


def _finite(value: object) -> object:
    """Returns a value with null for numbers that JSON hasn't."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _drop_later_lines(path: Path, version: int) -> None:
    if not path.exists():
        return
    lines = []
    for line in path.read_bytes().splitlines():
        try:
            values = parse_json(line)
        except ValueError:  # torn by a kill
            continue
        if isinstance(values, dict) and values.get("version", 0) <= version:
            lines.append(line + b"\n")
    beside = path.with_name(f".{path.name}.new")
    beside.write_bytes(b"".join(lines))
    os.replace(beside, path)
