"""Shards: the documents that one task has read, as concatenated UTF-8 with an index, in a working directory."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.data.selection import DOCUMENT, TextSpan


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Work done by a task."""

    bytes: int
    """Bytes of its input."""
    tokens: int = 0
    """Tokens that it encoded."""


def shard_text(directory: Path, shard: int) -> Path:
    """Returns the path of a shard's documents, concatenated as UTF-8."""
    return directory / f"read-{shard:05d}.text"


def shard_index(directory: Path, shard: int) -> Path:
    """Returns the path of a shard's `DOCUMENT` rows; the file is written last and marks a complete shard."""
    return directory / f"read-{shard:05d}.documents"


def shard_characters(directory: Path, shard: int) -> Path:
    """Returns the path of a shard's distinct characters."""
    return directory / f"read-{shard:05d}.characters"


def shard_dropped(directory: Path, shard: int) -> Path:
    """Returns the path of how many documents of a shard each filter dropped."""
    return directory / f"read-{shard:05d}.dropped"


def shard_answers(directory: Path, shard: int) -> Path:
    """Returns the path of the ranges of a shard's text that are answers: (ranges, 2) int64, ascending bytes."""
    return directory / f"read-{shard:05d}.answers"


def shard_documents(directory: Path, shard: int) -> NDArray[np.void]:
    """Returns the (documents,) `DOCUMENT` rows of a shard."""
    return np.fromfile(shard_index(directory, shard), dtype=DOCUMENT)


def read_shard(directory: Path, shard: int) -> Iterator[str]:
    """Yields the documents of a shard, one in memory at a time."""
    with open(shard_text(directory, shard), "rb") as file:
        for size in shard_documents(directory, shard)["bytes"].tolist():
            yield file.read(size).decode("utf-8")


def read_span(directory: Path, span: TextSpan) -> str:
    """Returns the text of a span; a character that its end divides is left out."""
    with open(shard_text(directory, span.shard), "rb") as file:
        file.seek(span.start)
        return file.read(span.stop - span.start).decode("utf-8", errors="ignore")


def count_dropped(directory: Path, shards: int) -> dict[str, int]:
    """Returns how many documents each filter dropped, over all shards."""
    counts: Counter[str] = Counter()
    for shard in range(shards):
        counts.update(json.loads(shard_dropped(directory, shard).read_text(encoding="utf-8")))
    return dict(sorted(counts.items()))
