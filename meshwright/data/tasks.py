"""The tasks of a preparation: read files, train a tokenizer, encode a unit; three more are in `near_duplicates`.

A task is a record that any process can run: it names the files that it writes and depends on nothing else. Its bytes
are therefore the same in any process, and a finished file is never computed again.
"""

from __future__ import annotations

import functools
import json
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from meshwright.data import tokenizer as tokenizers_
from meshwright.data.answers import NO_RUNS, AnswerMarks
from meshwright.data.chat_template import ChatTemplate
from meshwright.data.conversations import Document
from meshwright.data.documents import Reading, read_documents
from meshwright.data.files import whole_file
from meshwright.data.filters import DocumentFilters, FilterConfig
from meshwright.data.near_duplicates import BucketTask, ClusterTask, SignatureTask
from meshwright.data.selection import DOCUMENT, TextSpan, document_row
from meshwright.data.shards import (
    Counts,
    read_span,
    shard_answers,
    shard_characters,
    shard_dropped,
    shard_index,
    shard_text,
)
from meshwright.data.sources import CorpusFile
from meshwright.errors import DataError
from meshwright.records import RecordCodec

_HEADER = np.dtype([("tokens", "<u8"), ("ends", "<u8"), ("answers", "<u8")])


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskError:
    """A task's failure, as a worker answers it."""

    message: str
    """For the user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadTask:
    """Reads a group of files into a shard: text, characters and index."""

    directory: Path
    """Working directory."""
    shard: int
    """Number of the shard."""
    sources: tuple[CorpusFile, ...]
    """Files to read."""
    reading: Reading
    """How their records become documents."""
    characters: bool
    """Whether the distinct characters are collected too."""
    filters: FilterConfig
    """Which documents stay."""

    @property
    def bytes(self) -> int:
        """Bytes of the files."""
        return sum(source.size for source in self.sources)

    def is_finished(self) -> bool:
        """Returns whether the index exists, which is written last."""
        return shard_index(self.directory, self.shard).exists()

    def run(self, batched: bool) -> Counts:
        """Reads the files; see `Task.run`."""
        document_rows, answers, characters = [], list[tuple[int, int]](), set[str]()
        filters = DocumentFilters(self.filters)
        documents = (document for source in self.sources for document in read_documents(source, self.reading))
        start = 0
        with whole_file(shard_text(self.directory, self.shard)) as file:
            for document in filters.apply(documents):
                data = document.text.encode("utf-8")
                places = list(_byte_ranges(document)) if self.reading.answers else []
                document_rows.append(document_row(data, document.needs_end, document.needs_begin, places))
                answers += [(start + begin, start + end) for begin, end in places]
                file.write(data)
                start += len(data)
                if self.characters:
                    characters.update(document.text)
        if self.reading.answers:
            with whole_file(shard_answers(self.directory, self.shard)) as file:
                file.write(np.array(answers, dtype="<i8").tobytes())
        with whole_file(shard_dropped(self.directory, self.shard)) as file:
            file.write(json.dumps(filters.dropped()).encode("utf-8"))
        if self.characters:
            with whole_file(shard_characters(self.directory, self.shard)) as file:
                file.write("".join(sorted(characters)).encode("utf-8"))
        # The index comes last: `is_finished` looks for it alone.
        with whole_file(shard_index(self.directory, self.shard)) as file:
            file.write(np.array(document_rows, dtype=DOCUMENT).tobytes())
        return Counts(bytes=self.bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainTask:
    """Trains a byte-level BPE."""

    directory: Path
    """Working directory."""
    vocab_size: int
    """Entries of the tokenizer."""
    spans: tuple[TextSpan, ...]
    """Sample of the text."""

    @property
    def bytes(self) -> int:
        """Bytes of the sample."""
        return sum(span.stop - span.start for span in self.spans)

    def is_finished(self) -> bool:
        """Returns whether the tokenizer exists."""
        return (self.directory / tokenizers_.TOKENIZER).exists()

    def run(self, batched: bool) -> Counts:
        """Trains the tokenizer; see `Task.run`."""
        texts = (read_span(self.directory, span) for span in self.spans)
        write_tokenizer(self.directory, tokenizers_.train_bpe(texts, self.vocab_size))
        return Counts(bytes=self.bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeTask:
    """Encodes the spans of a unit, with the end token behind each document."""

    directory: Path
    """Working directory."""
    unit: int
    """Number of the unit."""
    spans: tuple[TextSpan, ...]
    """Text of the unit."""
    dtype: str
    """Type of the token ids."""
    eos_id: int | None
    """The end token; None where the tokenizer has none."""
    characters: bool
    """Whether each character is a token."""
    literal: bool
    """Whether an end token written in a text is text."""
    answers: bool = False
    """Whether the tokens of answers are marked."""
    begin_ids: tuple[int, ...] = ()
    """Tokens that begin a text where a document needs them."""

    @property
    def bytes(self) -> int:
        """Bytes of the text."""
        return sum(span.stop - span.start for span in self.spans)

    def is_finished(self) -> bool:
        """Returns whether the unit's file exists."""
        return unit_file(self.directory, self.unit).exists()

    def run(self, batched: bool) -> Counts:
        """Encodes the unit; see `Task.run`."""
        token_arrays: list[NDArray[np.unsignedinteger]] = []
        document_ends, token_count = [], 0
        # An array of one or no token, so that a tokenizer without an end token needs no branch.
        end_token = np.array([] if self.eos_id is None else [self.eos_id], dtype=self.dtype)
        begin_tokens = np.array(self.begin_ids, dtype=self.dtype)
        marks = AnswerMarks(self.directory, len(self.begin_ids)) if self.answers else None
        encode = self._encode_characters(marks) if self.characters else self._encode_subwords(batched, marks)
        for span, tokens in zip(self.spans, encode, strict=True):
            begins = begin_tokens if span.needs_begin else begin_tokens[:0]
            token_arrays += [begins, tokens]
            ends = end_token if span.ends_document and span.needs_end else end_token[:0]
            token_arrays.append(ends)
            if marks is not None and len(ends):
                marks.add_end()
            token_count += len(begins) + len(tokens) + len(ends)
            if span.ends_document:
                document_ends.append(token_count)
        runs = marks.runs() if marks is not None else NO_RUNS
        # Header with the lengths, then ends, then answers, then tokens: `read_unit` reads them in this order.
        with whole_file(unit_file(self.directory, self.unit)) as file:
            file.write(np.array([(token_count, len(document_ends), len(runs))], dtype=_HEADER).tobytes())
            file.write(np.array(document_ends, dtype="<u8").tobytes())
            file.write(runs.tobytes())
            for token_array in token_arrays:
                file.write(token_array.tobytes())
        return Counts(bytes=self.bytes, tokens=token_count)

    def _encode_subwords(self, batched: bool, marks: AnswerMarks | None) -> Iterator[NDArray[np.unsignedinteger]]:
        """Yields the (tokens,) ids of each span by the tokenizer."""
        tokenizer = _load_tokenizer(self.directory, self.literal)
        for span in self.spans:
            text = read_span(self.directory, span)
            if marks is not None:
                encoding = tokenizer.encode_batch([text], add_special_tokens=False)[0]
                marks.add(span, text, np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2))
            elif batched:
                # One text a call: the library's threads have nothing to share, so that each process keeps to its core.
                encoding = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]
            else:
                encoding = tokenizer.encode(text, add_special_tokens=False)
            yield np.array(encoding.ids, dtype=self.dtype)

    def _encode_characters(self, marks: AnswerMarks | None) -> Iterator[NDArray[np.unsignedinteger]]:
        """Yields the (characters,) ids of each span, one token a character."""
        # A table over all of Unicode: encoding is one look-up by code point. -1: no character of the tokenizer's.
        token_of_character = np.full(0x110000, -1, dtype=np.int32)
        for character, token in _load_tokenizer(self.directory).get_vocab(with_added_tokens=False).items():
            token_of_character[ord(character)] = token
        for span in self.spans:
            # UTF-32 gives one code point a character: the whole text is one array look-up.
            text = read_span(self.directory, span)
            code_points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
            if marks is not None:
                marks.add(span, text, np.arange(len(code_points))[:, None] + np.arange(2))
            tokens = token_of_character[code_points]
            if tokens.min(initial=0) < 0:
                character = chr(code_points[int(tokens.argmin())])
                raise DataError(
                    f"the text has the character {character!r}, which isn't in {self.directory}/tokenizer.json, made "
                    "of this text's characters: one of both is damaged; delete the directory and prepare again"
                )
            yield tokens.astype(self.dtype)


def _byte_ranges(document: Document) -> Iterator[tuple[int, int]]:
    """Yields a document's answers as ranges of its UTF-8 bytes."""
    for start, stop in document.answers:
        first = len(document.text[:start].encode("utf-8"))
        yield first, first + len(document.text[start:stop].encode("utf-8"))


class Task(Protocol):
    """The contract of every kind."""

    @property
    def directory(self) -> Path:
        """Working directory."""

    @property
    def bytes(self) -> int:
        """Bytes of its input."""

    def is_finished(self) -> bool:
        """Returns whether its last file exists, which it does only when the task has finished."""

    def run(self, batched: bool) -> Counts:
        """Runs the task.

        Args:
            batched: encode through the batch interface, which is faster and starts the library's threads in this
                process (a later fork would make it warn).

        Raises:
            DataError: for text that can't be read, or a full disk.
        """


KINDS = (ReadTask, TrainTask, EncodeTask, SignatureTask, BucketTask, ClusterTask)
"""Every kind of task."""
CODEC = RecordCodec((*KINDS, CorpusFile, Reading, ChatTemplate, TextSpan, FilterConfig, Counts, TaskError))
"""Tasks and their answers as JSON, one a line, between the preparing process and its workers."""


def answer_of(task: Task) -> Counts | TaskError:
    """Runs a task and returns its answer, whatever happens; for processes that somebody else waits for."""
    try:
        return task.run(batched=True)
    except DataError as error:
        return TaskError(message=str(error))
    except Exception:
        return TaskError(message=f"a task of prepare failed:\n{traceback.format_exc()}")


def unit_file(directory: Path, unit: int) -> Path:
    """Returns the path of an encoded unit: a header, document ends and answers counted from its first token, tokens."""
    return directory / f"unit-{unit:06d}.bin"


def read_unit(path: Path, dtype: str) -> tuple[NDArray[np.unsignedinteger], NDArray[np.uint64], NDArray[np.int64]]:
    """Reads an encoded unit.

    Returns:
        tokens: (tokens,) of ``dtype``; document ends: (documents that end in the unit,) uint64; answers: (runs, 2)
        int64, first token and the one after the last.
    """
    with open(path, "rb") as file:
        header = np.fromfile(file, _HEADER, 1)[0]
        document_ends = np.fromfile(file, "<u8", int(header["ends"]))
        answers = np.fromfile(file, "<i8", 2 * int(header["answers"])).reshape(-1, 2)
        return np.fromfile(file, dtype, int(header["tokens"])), document_ends, answers


def write_companions(directory: Path, companions: Mapping[str, str]) -> None:
    """Writes the files that go with a tokenizer."""
    for name, text in companions.items():
        with whole_file(directory / name) as file:
            file.write(text.encode("utf-8"))


def write_tokenizer(directory: Path, files: tokenizers_.TokenizerFiles) -> None:
    """Writes a tokenizer's companions and then ``tokenizer.json``, whose presence marks all of them complete."""
    write_companions(directory, files.companions)
    with whole_file(directory / "tokenizer_config.json") as file:
        file.write(json.dumps(files.settings, indent=2, sort_keys=True).encode("utf-8"))
    with whole_file(directory / "tokenizer.json") as file:
        file.write(files.text.encode("utf-8"))


@functools.lru_cache(maxsize=1)
def _cached_tokenizer(path: str, mtime_ns: int, literal: bool) -> Tokenizer:
    tokenizer = Tokenizer.from_file(path)
    tokenizer.encode_special_tokens = literal  # "<|endoftext|>" written in a text must not end a document
    return tokenizer


def _load_tokenizer(directory: Path, literal: bool = False) -> Tokenizer:
    path = directory / "tokenizer.json"
    return _cached_tokenizer(str(path), path.stat().st_mtime_ns, literal)
