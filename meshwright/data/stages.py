"""The steps of a preparation, over a working directory: read, select, train the tokenizer, encode, merge."""

from __future__ import annotations

import dataclasses
import json
import mmap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from meshwright.data import selection, tasks
from meshwright.data.config import PREPARED_FIELDS, DataConfig
from meshwright.data.merge import merge
from meshwright.data.selection import TextPiece
from meshwright.data.sources import CorpusFile
from meshwright.data.tokenizer import (
    character_tokenizer,
    end_id,
    given_tokenizer,
    splits_at_newlines,
    vocabulary_size,
)
from meshwright.data.tokens import VERSION
from meshwright.data.workers import Pool
from meshwright.errors import DataError

GROUP_BYTES = 8 << 20
"""Files up to so many bytes together are read by one task."""
SAMPLE_BYTES = 16 << 20
"""Text that a tokenizer is trained on, at most."""
UNIT_BYTES = (1 << 18, 64 << 20)
"""Least and most text that one task encodes; between them a 256th of the text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a step of the preparation is."""

    stage: str
    """``digest``, ``read``, ``train``, ``encode`` or ``merge``."""
    done_bytes: int
    """Bytes of input (digest, read) or text (the others) that are done."""
    total_bytes: int
    """Bytes that the stage has to do."""
    tokens: int = 0
    """Tokens made so far in this call."""


Report = Callable[[Progress], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareJob:
    """One preparation: what the steps share."""

    config: DataConfig
    """Settings."""
    sources: list[CorpusFile]
    """Files to read, in corpus order."""
    key: str
    """Hash of settings and sources."""
    beside: Path
    """Working directory."""
    pool: Pool
    """Where tasks are done."""
    report: Report
    """Called as parts get done."""


def work(job: PrepareJob) -> None:
    """Does all steps; the result lies in ``whole`` under the working directory, its manifest written last.

    Raises:
        DataError: for text that can't be read, split or tokenised, or a full disk.
    """
    shards = _read(job)
    documents = _load_documents(job, shards)
    kept = selection.first_of_each(documents) if job.config.dedup else np.ones(len(documents), dtype=bool)
    if job.config.limit_bytes is not None:
        kept = selection.within_limit(documents, kept, job.config.limit_bytes)
    splits = _split(job, documents, kept)
    texts = {name: sum(piece.stop - piece.start for piece in pieces) for name, pieces in splits.items()}
    _make_tokenizer(job, shards, documents, splits["train"])
    tokenizer = Tokenizer.from_file(str(job.beside / "tokenizer.json"))
    eos = end_id(tokenizer, json.loads((job.beside / "tokenizer_config.json").read_text(encoding="utf-8")))
    size = vocabulary_size(tokenizer)
    dtype = "<u2" if size <= 1 << 16 else "<u4"
    units = _encode(job, splits, texts, eos, dtype)
    facts = {
        "version": VERSION,
        "key": job.key,
        "dtype": dtype,
        "vocab_size": size,
        "eos_id": eos,
        "config": {name: getattr(job.config, name) for name in PREPARED_FIELDS},
        "documents_read": len(documents),
        "documents_dropped": len(documents) - int(kept.sum()),
    }
    total = sum(texts.values())
    merge(job.beside, units, splits, facts, lambda done: job.report(_progress("merge", done, total)))


def _progress(stage: str, done: int, total: int, tokens: int = 0) -> Progress:
    return Progress(stage=stage, done_bytes=done, total_bytes=total, tokens=tokens)


def _run(job: PrepareJob, stage: str, todo: Iterable[dict[str, Any]], total: int) -> None:
    """Does the tasks of a stage, but for those that an earlier call finished."""
    done = tokens = 0

    def count(counts: dict[str, Any]) -> None:
        nonlocal done, tokens
        done, tokens = done + counts["bytes"], tokens + counts.get("tokens", 0)
        job.report(_progress(stage, done, total, tokens))

    def unfinished() -> Iterator[dict[str, Any]]:
        for task in todo:
            if tasks.finished(task):
                count({"bytes": task["bytes"]})
            else:
                yield task

    job.report(_progress(stage, 0, total))
    job.pool.run(unfinished(), count)


def _read(job: PrepareJob) -> int:
    """Reads all sources into shards and returns their number."""
    groups: list[list[CorpusFile]] = []
    size = 0
    for source in job.sources:
        if not groups or size + source.size > GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(source)
        size += source.size
    todo: list[dict[str, Any]] = [
        {
            "kind": "read",
            "directory": str(job.beside),
            "shard": number,
            "sources": [dataclasses.asdict(source) for source in group],
            "bytes": sum(source.size for source in group),
            "text_field": job.config.text_field,
            "normalise": job.config.normalise,
            "characters": job.config.tokenizer == "chars",
        }
        for number, group in enumerate(groups)
    ]
    _run(job, "read", todo, sum(source.size for source in job.sources))
    return len(groups)


def _load_documents(job: PrepareJob, shards: int) -> NDArray[np.void]:
    documents = np.concatenate([_shard_documents(job, shard) for shard in range(shards)])
    if not len(documents):
        names = ", ".join(source.path for source in job.sources[:3])
        raise DataError(f"the corpus is empty: no text in {len(job.sources)} file(s) ({names}); give --data other text")
    return documents


def _shard_documents(job: PrepareJob, shard: int) -> NDArray[np.void]:
    return np.fromfile(tasks.shard_index(job.beside, shard), dtype=selection.DOCUMENT)


def _split(job: PrepareJob, documents: NDArray[np.void], kept: NDArray[np.bool_]) -> dict[str, list[TextPiece]]:
    """Returns the documents of each split as pieces, in corpus order."""
    pieces = _pieces(job, documents)
    share = job.config.validation_share
    if share > 0 and kept.sum() == 1:
        return _tail(job, pieces[int(np.flatnonzero(kept)[0])])
    if job.config.split == "tail":
        raise DataError(
            f"data.split = 'tail' takes the end of one document, and the corpus has {int(kept.sum())}; "
            "use data.split = 'hash'"
        )
    held = selection.held_out(documents, kept, share)
    return {
        "train": [pieces[i] for i in np.flatnonzero(kept & ~held)],
        "validation": [pieces[i] for i in np.flatnonzero(held)],
    }


def _pieces(job: PrepareJob, documents: NDArray[np.void]) -> list[TextPiece]:
    pieces: list[TextPiece] = []
    shard = start = 0
    left = len(_shard_documents(job, 0))
    for size in documents["bytes"].tolist():
        while left == 0:
            shard, start = shard + 1, 0
            left = len(_shard_documents(job, shard))
        pieces.append(TextPiece(shard=shard, start=start, stop=start + size, ends=True))
        start, left = start + size, left - 1
    return pieces


def _tail(job: PrepareJob, whole: TextPiece) -> dict[str, list[TextPiece]]:
    """Cuts the end off the only document, at int(characters x (1 - share)) as nanoGPT does."""
    text = tasks.read_piece(job.beside, whole)
    place = int(len(text) * (1.0 - job.config.validation_share))
    if not 0 < place < len(text):
        raise DataError(
            f"the only document has {len(text)} characters, too few to hold out "
            f"{job.config.validation_share:g} of it; give more text or set data.validation_share = 0"
        )
    middle = whole.start + len(text[:place].encode("utf-8"))
    return {
        "train": [dataclasses.replace(whole, stop=middle)],
        "validation": [dataclasses.replace(whole, start=middle)],
    }


def _make_tokenizer(job: PrepareJob, shards: int, documents: NDArray[np.void], train: list[TextPiece]) -> None:
    if (job.beside / "tokenizer.json").exists():
        return
    if job.config.tokenizer == "bpe":
        sample, size = _sample(documents, train, job)
        task = {"kind": "train", "directory": str(job.beside), "vocab_size": job.config.vocab_size, "bytes": size}
        _run(job, "train", [task | {"pieces": sample}], size)
        return
    if job.config.tokenizer == "chars":
        files = (tasks.shard_characters(job.beside, shard).read_text(encoding="utf-8") for shard in range(shards))
        made = character_tokenizer(sorted(set().union(*files)), end=len(documents) > 1)
    else:
        made = given_tokenizer(job.config.tokenizer)
    tasks.write_tokenizer(job.beside, made)


def _sample(
    documents: NDArray[np.void], train: list[TextPiece], job: PrepareJob
) -> tuple[list[tuple[int, int, int, bool]], int]:
    """Takes training documents in the order of their hashes until the sample is full."""
    order = {(piece.shard, piece.start): int(row) for piece, row in zip(_pieces(job, documents), documents["order"])}
    chosen, size = [], 0
    for piece in sorted(train, key=lambda piece: order[piece.shard, piece.start]):
        stop = min(piece.stop, piece.start + SAMPLE_BYTES - size)
        chosen.append((piece.shard, piece.start, stop, False))
        size += stop - piece.start
        if size >= SAMPLE_BYTES:
            break
    return chosen, size


def _encode(
    job: PrepareJob, splits: dict[str, list[TextPiece]], texts: dict[str, int], eos: int | None, dtype: str
) -> dict[str, int]:
    """Encodes all units and returns how many each split has; validation's follow those of training."""
    rule = (job.beside / "tokenizer.json").read_text(encoding="utf-8")
    cutting = job.config.tokenizer == "chars" or splits_at_newlines(rule)
    total = sum(texts.values())
    size = min(max(total // 256, UNIT_BYTES[0]), UNIT_BYTES[1])
    units: dict[str, int] = {}

    def todo() -> Iterator[dict[str, Any]]:
        number = 0
        for name, pieces in splits.items():
            first = number
            for unit in _units(job.beside, pieces, size, cutting):
                yield {
                    "kind": "encode",
                    "directory": str(job.beside),
                    "unit": number,
                    "pieces": [dataclasses.astuple(piece) for piece in unit],
                    "bytes": sum(piece.stop - piece.start for piece in unit),
                    "dtype": dtype,
                    "eos": eos,
                    "characters": job.config.tokenizer == "chars",
                    "literal": job.config.tokenizer == "bpe",
                }
                number += 1
            units[name] = number - first

    _run(job, "encode", todo(), total)
    return units


def _units(beside: Path, pieces: list[TextPiece], size: int, cutting: bool) -> Iterator[list[TextPiece]]:
    """Groups pieces into units of about ``size`` bytes, cutting long documents where that changes no token."""
    unit: list[TextPiece] = []
    held = 0
    for piece in pieces:
        for part in _parts(beside, piece, size) if cutting and piece.stop - piece.start > size else (piece,):
            unit.append(part)
            held += part.stop - part.start
            if held >= size:
                yield unit
                unit, held = [], 0
    if unit:
        yield unit


def _parts(beside: Path, piece: TextPiece, size: int) -> Iterator[TextPiece]:
    with (
        open(tasks.shard_text(beside, piece.shard), "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
    ):
        yield from selection.cut(text, piece, size)
