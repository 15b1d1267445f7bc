"""Finished units to token files: concatenated in order, counted, hashed, and vouched for by a manifest."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.data import tasks
from meshwright.data.chunks import write_sums
from meshwright.data.files import sha256, whole_file
from meshwright.data.selection import TextPiece
from meshwright.data.tokenizer import COMPANIONS, SETTINGS, TOKENIZER
from meshwright.data.tokens import CHECKED, MANIFEST, fingerprint_of, render_manifest
from meshwright.errors import DataError

_COPY_BYTES = 8 << 20


def merge(
    beside: Path,
    units: dict[str, int],
    splits: dict[str, list[TextPiece]],
    facts: dict[str, Any],
    report: Callable[[int], None],
) -> None:
    """Writes the final files into ``whole`` under the working directory, the manifest last.

    Args:
        beside: working directory with shards, units and the tokenizer.
        units: number of units of each split, in the order of their numbers.
        splits: the documents of each split.
        facts: what the manifest says besides counts and hashes.
        report: called with the bytes of text that are merged.
    """
    whole = beside / "whole"
    shutil.rmtree(whole, ignore_errors=True)
    whole.mkdir()
    first = done = 0
    counts: dict[str, Any] = {}
    for name, count in units.items():
        tokens, documents = _concatenate(beside, whole / name, range(first, first + count), facts)
        text_bytes = sum(piece.stop - piece.start for piece in splits[name])
        counts[name] = {"tokens": tokens, "documents": documents, "text_bytes": text_bytes}
        first += count
        done += text_bytes
        report(done)
    _write_text(beside, whole / "validation.txt", splits["validation"])
    for name in (TOKENIZER, SETTINGS, *(name for name in COMPANIONS if (beside / name).is_file())):
        with whole_file(whole / name) as file:
            file.write((beside / name).read_bytes())
    chunks = write_sums(whole, CHECKED)
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(whole.iterdir(), key=lambda path: path.name)
    }
    fingerprint, tokenizer = fingerprint_of(files, facts["dtype"]), files["tokenizer.json"]["sha256"]
    manifest = facts | {"fingerprint": fingerprint, "tokenizer_sha256": tokenizer, "splits": counts, "files": files}
    with whole_file(whole / MANIFEST) as file:
        file.write(render_manifest(manifest | {"chunks": chunks}))


def _concatenate(beside: Path, stem: Path, numbers: range, facts: dict[str, Any]) -> tuple[int, int]:
    tokens = documents = 0
    with whole_file(stem.with_suffix(".bin")) as stream, whole_file(stem.with_suffix(".idx")) as index:
        for number in numbers:
            part, ends = tasks.read_unit(tasks.unit_file(beside, number), facts["dtype"])
            if len(part) and int(part.max()) >= facts["vocab_size"]:
                raise DataError(
                    f"the tokenizer gave token {int(part.max())}, its vocabulary has {facts['vocab_size']} entries; "
                    "give data.tokenizer one whose ids are all in its vocabulary"
                )
            stream.write(part.tobytes())
            index.write((ends + ends.dtype.type(tokens)).tobytes())
            tokens += len(part)
            documents += len(ends)
    return tokens, documents


def _write_text(beside: Path, path: Path, pieces: list[TextPiece]) -> None:
    with whole_file(path) as file:
        for piece in pieces:
            with open(tasks.shard_text(beside, piece.shard), "rb") as text:
                text.seek(piece.start)
                left = piece.stop - piece.start
                while left > 0 and (data := text.read(min(left, _COPY_BYTES))):
                    file.write(data)
                    left -= len(data)
