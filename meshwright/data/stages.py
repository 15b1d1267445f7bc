"""The stages of a preparation in a working directory: read, select, train the tokenizer, encode, merge."""

from __future__ import annotations

import dataclasses
import json
import mmap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from meshwright.data import near_duplicates, selection, tasks
from meshwright.data.config import DataConfig
from meshwright.data.documents import reading_of
from meshwright.data.merge import merge
from meshwright.data.selection import TextSpan
from meshwright.data.shards import Counts, count_dropped, read_span, shard_characters, shard_documents, shard_text
from meshwright.data.sources import CorpusFile
from meshwright.data.tasks import EncodeTask, ReadTask, Task, TrainTask
from meshwright.data.tokenizer import (
    CHAT_TEMPLATE,
    begin_ids,
    character_tokenizer,
    end_id,
    given_tokenizer,
    read_chat_template,
    splits_at_newlines,
    vocabulary_size,
)
from meshwright.data.tokens import VERSION
from meshwright.errors import DataError

GROUP_BYTES = 8 << 20
"""Most bytes of files that one task reads, or a `MOST_SHARDS`th of all; a larger file is one task's."""
MOST_SHARDS = 512
"""About how many tasks read a large corpus: each stage opens or lists as many files."""
SAMPLE_BYTES = 16 << 20
"""Most bytes of text that a tokenizer is trained on."""
UNIT_BYTES = (1 << 18, 64 << 20)
"""Least and most bytes of text that one task encodes; between them a 256th of the text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Progress of a stage of the preparation."""

    stage: str
    """``digest``, ``read``, ``near-duplicates``, ``train``, ``encode`` or ``merge``."""
    done_bytes: int
    """Bytes of input (digest, read) or text (the other stages) that are done."""
    total_bytes: int
    """Bytes of the whole stage."""
    tokens: int = 0
    """Tokens encoded so far in this call."""


Report = Callable[[Progress], None]


class TaskRunner(Protocol):
    """Runs tasks in other processes, here or elsewhere."""

    def run(self, tasks: Iterable[Task], on_done: Callable[[Counts], None]) -> None:
        """Runs all tasks of a stage.

        Args:
            tasks: each depends on files of earlier stages alone.
            on_done: called in this thread with the counts of each task as it ends.

        Raises:
            DataError: when a task raised one.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareJob:
    """Inputs and services that the stages of one preparation share."""

    config: DataConfig
    """Settings."""
    sources: list[CorpusFile]
    """Files to read, in corpus order."""
    key: str
    """Hash of settings and sources."""
    beside: Path
    """Working directory."""
    pool: TaskRunner
    """Runs the tasks."""
    report: Report
    """Called as tasks finish."""


def work(job: PrepareJob) -> None:
    """Runs all stages; the result is ``whole`` under the working directory, its manifest written last.

    Raises:
        DataError: for text that can't be read, split or tokenised, or a full disk.
    """
    shards = _read_sources(job)
    documents = _load_documents(job, shards)
    selected = selection.mark_first_copies(documents) if job.config.dedup else np.ones(len(documents), dtype=bool)
    if job.config.filters.near_duplicates:
        selected &= _mark_first_of_near_duplicates(job, shards)
    if job.config.limit_bytes is not None:
        selected = selection.within_limit(documents, selected, job.config.limit_bytes)
    splits = _split_documents(job, documents, selected)
    text_bytes = {name: sum(span.stop - span.start for span in spans) for name, spans in splits.items()}
    _make_tokenizer(job, shards, documents, splits["train"])
    tokenizer = Tokenizer.from_file(str(job.beside / "tokenizer.json"))
    eos_id = end_id(tokenizer, json.loads((job.beside / "tokenizer_config.json").read_text(encoding="utf-8")))
    # The ids' type depends on the vocabulary, so the tokenizer comes before the first token is written.
    vocab_size = vocabulary_size(tokenizer)
    dtype = "<u2" if vocab_size <= 1 << 16 else "<u4"
    begins = begin_ids(tokenizer)
    units = _encode_units(job, splits, text_bytes, eos_id, begins, dtype)
    facts = {
        "version": VERSION,
        "key": job.key,
        "dtype": dtype,
        "vocab_size": vocab_size,
        "eos_id": eos_id,
        "begin_ids": list(begins),
        "config": job.config.prepared_settings(),
        "documents_read": len(documents),
        "documents_dropped": len(documents) - int(selected.sum()),
    }
    if job.config.filters.is_active:
        # Rules and thresholds are datatrove's, and may change with it.
        facts |= {"documents_filtered": count_dropped(job.beside, shards), "datatrove": version("datatrove")}
    total_bytes = sum(text_bytes.values())
    merge(job.beside, units, splits, facts, lambda done_bytes: job.report(_progress("merge", done_bytes, total_bytes)))


def _progress(stage: str, done_bytes: int, total_bytes: int, tokens: int = 0) -> Progress:
    return Progress(stage=stage, done_bytes=done_bytes, total_bytes=total_bytes, tokens=tokens)


def _run_tasks(job: PrepareJob, stage: str, stage_tasks: Iterable[Task], total_bytes: int) -> None:
    """Runs the tasks of a stage, except for those that an earlier call finished."""
    done_bytes = tokens = 0

    def count_finished(counts: Counts) -> None:
        nonlocal done_bytes, tokens
        done_bytes, tokens = done_bytes + counts.bytes, tokens + counts.tokens
        job.report(_progress(stage, done_bytes, total_bytes, tokens))

    def unfinished() -> Iterator[Task]:
        for task in stage_tasks:
            if task.is_finished():
                count_finished(Counts(bytes=task.bytes))
            else:
                yield task

    job.report(_progress(stage, 0, total_bytes))
    job.pool.run(unfinished(), count_finished)


def _read_sources(job: PrepareJob) -> int:
    """Reads all sources into shards; returns the number of shards."""
    # Small files are grouped, so that a task is worth its overhead.
    groups: list[list[CorpusFile]] = []
    total_bytes, group_bytes = sum(source.size for source in job.sources), 0
    most_bytes = max(GROUP_BYTES, total_bytes // MOST_SHARDS)
    for source in job.sources:
        if not groups or group_bytes + source.size > most_bytes:
            groups.append([])
            group_bytes = 0
        groups[-1].append(source)
        group_bytes += source.size
    reading = reading_of(job.config)
    stage_tasks = [
        ReadTask(
            directory=job.beside,
            shard=number,
            sources=tuple(group),
            reading=reading,
            characters=job.config.tokenizer == "chars",
            filters=job.config.filters,
        )
        for number, group in enumerate(groups)
    ]
    _run_tasks(job, "read", stage_tasks, total_bytes)
    return len(groups)


def _mark_first_of_near_duplicates(job: PrepareJob, shards: int) -> NDArray[np.bool_]:
    """Marks the (documents,) that are nearly equal to no earlier one, in corpus order."""
    shard_rows = [shard_documents(job.beside, shard)["bytes"] for shard in range(shards)]
    shard_bytes = [int(sizes.sum()) for sizes in shard_rows]
    # Three stages, each over all of what the one before it wrote.
    for stage_tasks in (
        near_duplicates.signature_tasks(job.beside, shard_bytes, job.config.filters.word_language),
        near_duplicates.bucket_tasks(job.beside, sum(shard_bytes)),
        (near_duplicates.ClusterTask(directory=job.beside),),
    ):
        _run_tasks(job, "near-duplicates", stage_tasks, sum(shard_bytes))
    return near_duplicates.mark_first_of_clusters(job.beside, [len(sizes) for sizes in shard_rows])


def _load_documents(job: PrepareJob, shards: int) -> NDArray[np.void]:
    """Loads the (documents,) `DOCUMENT` rows of all shards, in corpus order."""
    documents = np.concatenate([shard_documents(job.beside, shard) for shard in range(shards)])
    if not len(documents):
        if dropped := count_dropped(job.beside, shards):
            reasons = ", ".join(f"{name} {count}" for name, count in dropped.items())
            raise DataError(f"the corpus is empty: data.filters dropped every document ({reasons}); ask for fewer")
        names = ", ".join(source.path for source in job.sources[:3])
        raise DataError(f"the corpus is empty: no text in {len(job.sources)} file(s) ({names}); give --data other text")
    return documents


def _split_documents(
    job: PrepareJob, documents: NDArray[np.void], selected: NDArray[np.bool_]
) -> dict[str, list[TextSpan]]:
    """Returns the documents of each split as spans, in corpus order.

    Args:
        job: the preparation.
        documents: (documents,) `DOCUMENT` rows in corpus order.
        selected: (documents,) bool, those that weren't dropped.
    """
    spans = _document_spans(job, documents)
    share = job.config.validation_share
    # A single document can't be split by hash; its tail is held out instead.
    if share > 0 and selected.sum() == 1:
        return _split_off_tail(job, spans[int(np.flatnonzero(selected)[0])])
    if job.config.split == "tail":
        raise DataError(
            f"data.split = 'tail' takes the end of one document, and the corpus has {int(selected.sum())}; "
            "use data.split = 'hash'"
        )
    validation = selection.held_out(documents, selected, share)
    return {
        "train": [spans[i] for i in np.flatnonzero(selected & ~validation)],
        "validation": [spans[i] for i in np.flatnonzero(validation)],
    }


def _document_spans(job: PrepareJob, documents: NDArray[np.void]) -> list[TextSpan]:
    """Returns the span of each of the (documents,) rows: documents lie one after the other in their shard."""
    spans: list[TextSpan] = []
    shard = start = 0
    documents_left = len(shard_documents(job.beside, 0))
    columns = (documents[name].tolist() for name in ("bytes", "needs_end", "needs_begin"))
    for size, ends, begins in zip(*columns):
        # A shard may hold no document: all of its files were empty.
        while documents_left == 0:
            shard, start = shard + 1, 0
            documents_left = len(shard_documents(job.beside, shard))
        stop = start + size
        span = TextSpan(shard=shard, start=start, stop=stop, ends_document=True, needs_end=ends, needs_begin=begins)
        spans.append(span)
        start, documents_left = stop, documents_left - 1
    return spans


def _split_off_tail(job: PrepareJob, document: TextSpan) -> dict[str, list[TextSpan]]:
    """Splits the end off the only document, at int(characters x (1 - share)) as nanoGPT does."""
    if job.config.targets == "answers":
        raise DataError(
            "the corpus has one conversation, and a part of it can't be held out from the rest; give more of them, or "
            "data.validation_share = 0"
        )
    text = read_span(job.beside, document)
    # Characters, not bytes, for the same split as nanoGPT's.
    split_at = int(len(text) * (1.0 - job.config.validation_share))
    if not 0 < split_at < len(text):
        raise DataError(
            f"the only document has {len(text)} characters, too few to hold out "
            f"{job.config.validation_share:g} of it; give more text or set data.validation_share = 0"
        )
    split_byte = document.start + len(text[:split_at].encode("utf-8"))
    return {
        "train": [dataclasses.replace(document, stop=split_byte)],
        "validation": [dataclasses.replace(document, start=split_byte, needs_begin=False)],
    }


def _make_tokenizer(job: PrepareJob, shards: int, documents: NDArray[np.void], train: list[TextSpan]) -> None:
    """Trains, builds or copies the tokenizer, unless an earlier call did; (documents,) rows order the sample."""
    if (job.beside / "tokenizer.json").exists():
        return
    companions = {}
    if job.config.chat_template:
        companions[CHAT_TEMPLATE] = read_chat_template(job.config.chat_template)
    if job.config.tokenizer == "bpe":
        # The tokenizer is trained by one task in a worker, whose threads end with it.
        tasks.write_companions(job.beside, companions)
        sample = _sample_spans(documents, train, job)
        task = TrainTask(directory=job.beside, vocab_size=job.config.vocab_size, spans=tuple(sample))
        _run_tasks(job, "train", [task], task.bytes)
        return
    if job.config.tokenizer == "chars":
        # As bytes: reading text would turn a carriage return into a line feed.
        character_sets = (shard_characters(job.beside, shard).read_bytes().decode("utf-8") for shard in range(shards))
        files = character_tokenizer(sorted(set().union(*character_sets)), with_end_token=len(documents) > 1)
    else:
        files = given_tokenizer(job.config.tokenizer)
    tasks.write_tokenizer(job.beside, dataclasses.replace(files, companions={**files.companions, **companions}))


def _sample_spans(documents: NDArray[np.void], train: list[TextSpan], job: PrepareJob) -> list[TextSpan]:
    """Samples training documents in the order of their hashes up to `SAMPLE_BYTES`."""
    # Documents by hash are a random sample, and the same on any machine.
    order_hash = {
        (span.shard, span.start): int(row) for span, row in zip(_document_spans(job, documents), documents["order"])
    }
    sample_spans, sample_bytes = [], 0
    for span in sorted(train, key=lambda span: order_hash[span.shard, span.start]):
        # The last document of the sample is truncated to the limit.
        stop = min(span.stop, span.start + SAMPLE_BYTES - sample_bytes)
        sample_spans.append(dataclasses.replace(span, stop=stop, ends_document=False))
        sample_bytes += stop - span.start
        if sample_bytes >= SAMPLE_BYTES:
            break
    return sample_spans


def _encode_units(
    job: PrepareJob,
    splits: dict[str, list[TextSpan]],
    text_bytes: dict[str, int],
    eos_id: int | None,
    begins: tuple[int, ...],
    dtype: str,
) -> dict[str, int]:
    """Encodes all units; returns the number of units of each split, which are numbered training first."""
    tokenizer_text = (job.beside / "tokenizer.json").read_text(encoding="utf-8")
    # Splitting a document must not change its tokens: true of characters, and of BPE at some newlines.
    may_split = job.config.tokenizer == "chars" or splits_at_newlines(tokenizer_text)
    total_bytes = sum(text_bytes.values())
    unit_bytes = min(max(total_bytes // 256, UNIT_BYTES[0]), UNIT_BYTES[1])
    units: dict[str, int] = {}

    def unit_tasks() -> Iterator[Task]:
        number = 0
        for name, spans in splits.items():
            first_unit = number
            for unit in _group_into_units(job.beside, spans, unit_bytes, may_split):
                yield EncodeTask(
                    directory=job.beside,
                    unit=number,
                    spans=tuple(unit),
                    dtype=dtype,
                    eos_id=eos_id,
                    characters=job.config.tokenizer == "chars",
                    literal=job.config.tokenizer == "bpe",
                    answers=job.config.targets == "answers",
                    begin_ids=begins,
                )
                number += 1
            # Counted while tasks are drawn, so the count is known once the stage has run.
            units[name] = number - first_unit

    _run_tasks(job, "encode", unit_tasks(), total_bytes)
    return units


def _group_into_units(
    work_dir: Path, spans: list[TextSpan], unit_bytes: int, may_split: bool
) -> Iterator[list[TextSpan]]:
    """Groups documents into units of about ``unit_bytes``, and splits long ones where that changes no token."""
    unit: list[TextSpan] = []
    collected_bytes = 0
    for document in spans:
        for span in (
            _split_document(work_dir, document, unit_bytes)
            if may_split and document.stop - document.start > unit_bytes
            else (document,)
        ):
            unit.append(span)
            collected_bytes += span.stop - span.start
            # A unit is closed once it is full, so it may exceed the size by one span.
            if collected_bytes >= unit_bytes:
                yield unit
                unit, collected_bytes = [], 0
    if unit:
        yield unit


def _split_document(work_dir: Path, document: TextSpan, span_bytes: int) -> Iterator[TextSpan]:
    with (
        open(shard_text(work_dir, document.shard), "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
    ):
        yield from selection.split_document(text, document, span_bytes)
