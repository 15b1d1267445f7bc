"""Merges encoded units into token files: concatenates them in order, counts, hashes, and writes the manifest."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data import tasks
from meshwright.data.chunks import write_sums
from meshwright.data.files import sha256, whole_file
from meshwright.data.selection import TextSpan
from meshwright.data.shards import shard_answers, shard_text
from meshwright.data.tokenizer import COMPANIONS, SETTINGS, TOKENIZER
from meshwright.data.tokens import MANIFEST, checked_files, fingerprint_of, learns_answers, render_manifest
from meshwright.errors import DataError

_COPY_BYTES = 8 << 20


def merge(
    work_dir: Path,
    units: dict[str, int],
    splits: dict[str, list[TextSpan]],
    facts: dict[str, Any],
    report: Callable[[int], None],
) -> None:
    """Writes the final files into ``whole`` under the working directory, the manifest last.

    Args:
        work_dir: working directory with shards, units and the tokenizer.
        units: number of units of each split, in the order of their numbers.
        splits: the documents of each split.
        facts: the manifest's fields besides counts and hashes.
        report: called with the bytes of text merged so far.
    """
    final_dir = work_dir / "whole"
    # A killed merge leaves a partial folder; merging is cheap against encoding, so it starts over.
    shutil.rmtree(final_dir, ignore_errors=True)
    final_dir.mkdir()
    first_unit = merged_bytes = 0
    counts: dict[str, Any] = {}
    has_answers = learns_answers(facts)
    for name, unit_count in units.items():
        numbers = range(first_unit, first_unit + unit_count)
        tokens, documents = _concatenate(work_dir, final_dir / name, numbers, facts)
        text_bytes = sum(span.stop - span.start for span in splits[name])
        begin_tokens = len(facts["begin_ids"]) * sum(span.needs_begin for span in splits[name])
        counts[name] = {
            "tokens": tokens,
            "documents": documents,
            "text_bytes": text_bytes,
            "begin_tokens": begin_tokens,
        }
        if has_answers:
            counts[name]["answer_bytes"] = _answer_bytes(work_dir, splits[name])
        first_unit += unit_count
        merged_bytes += text_bytes
        report(merged_bytes)
    # The held-out text itself, for bits per byte and for baselines of compressors.
    _write_text(work_dir, final_dir / "validation.txt", splits["validation"])
    for name in (TOKENIZER, SETTINGS, *(name for name in COMPANIONS if (work_dir / name).is_file())):
        with whole_file(final_dir / name) as file:
            file.write((work_dir / name).read_bytes())
    chunks = write_sums(final_dir, checked_files(facts))
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(final_dir.iterdir(), key=lambda path: path.name)
    }
    fingerprint, tokenizer = fingerprint_of(files, facts["dtype"]), files["tokenizer.json"]["sha256"]
    manifest = facts | {"fingerprint": fingerprint, "tokenizer_sha256": tokenizer, "splits": counts, "files": files}
    # The manifest comes last: it carries the hashes of all other files.
    with whole_file(final_dir / MANIFEST) as file:
        file.write(render_manifest(manifest | {"chunks": chunks}))


def _concatenate(work_dir: Path, stem: Path, numbers: range, facts: dict[str, Any]) -> tuple[int, int]:
    """Writes the units of a split as one token file, index and answers; returns the number of tokens and documents."""
    tokens = documents = 0
    with contextlib.ExitStack() as files:
        stream, index = (files.enter_context(whole_file(stem.with_suffix(suffix))) for suffix in (".bin", ".idx"))
        answers = files.enter_context(whole_file(stem.with_suffix(".answers"))) if learns_answers(facts) else None
        for number in numbers:
            unit_tokens, unit_ends, unit_answers = tasks.read_unit(tasks.unit_file(work_dir, number), facts["dtype"])
            # A tokenizer with ids beyond its vocabulary would index outside of the model's embedding.
            if len(unit_tokens) and int(unit_tokens.max()) >= facts["vocab_size"]:
                raise DataError(
                    f"the tokenizer gave token {int(unit_tokens.max())}, its vocabulary has {facts['vocab_size']} "
                    "entries; give data.tokenizer one whose ids are all in its vocabulary"
                )
            stream.write(unit_tokens.tobytes())
            # A unit counts its document ends from its own first token.
            index.write((unit_ends + unit_ends.dtype.type(tokens)).tobytes())
            if answers is not None:
                answers.write((unit_answers + tokens).tobytes())
            tokens += len(unit_tokens)
            documents += len(unit_ends)
    return tokens, documents


def _answer_bytes(work_dir: Path, spans: list[TextSpan]) -> int:
    """Counts the bytes of text that are answers in some spans, those at the start of a document too."""
    total, shard = 0, -1
    for span in spans:
        if span.shard != shard:
            shard = span.shard
            starts, stops = np.fromfile(shard_answers(work_dir, shard), dtype="<i8").reshape(-1, 2).T
            before = np.concatenate([[0], np.cumsum(stops - starts)])
        first, after = np.searchsorted(starts, (span.start, span.stop), side="left")
        total += int(before[after] - before[first])
    return total


def _write_text(work_dir: Path, path: Path, spans: list[TextSpan]) -> None:
    """Copies the text of some spans into one file."""
    with whole_file(path) as file:
        for span in spans:
            with open(shard_text(work_dir, span.shard), "rb") as text:
                text.seek(span.start)
                remaining = span.stop - span.start
                while remaining > 0 and (data := text.read(min(remaining, _COPY_BYTES))):
                    file.write(data)
                    remaining -= len(data)
