"""The three kinds of tasks of a preparation: read a group of files, train a tokenizer, encode a unit of text.

A task is plain JSON values in and out, names the files that it writes, and depends on nothing else. Its bytes are
therefore the same in any process, and a finished file is never computed again.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from meshwright.data import tokenizer as tokenizers_
from meshwright.data.documents import read_documents
from meshwright.data.files import whole_file
from meshwright.data.selection import DOCUMENT, TextSpan, document_row
from meshwright.data.sources import CorpusFile

_HEADER = np.dtype([("tokens", "<u8"), ("ends", "<u8")])


def run_task(task: dict[str, Any], batched: bool) -> dict[str, Any]:
    """Runs one task and returns its counts.

    Args:
        task: ``kind`` (``read``, ``train`` or ``encode``) and the arguments of that kind.
        batched: encode through the batch interface, which is faster and starts the library's threads in this process
            (a later fork would make it warn).

    Raises:
        DataError: for text that can't be read, or a full disk.
    """
    directory = Path(task["directory"])
    if task["kind"] == "read":
        return _read_group(task, directory)
    if task["kind"] == "train":
        return _train_tokenizer(task, directory)
    return _encode_unit(task, directory, batched)


def finished(task: dict[str, Any]) -> bool:
    """Returns whether a task's last file exists, which it does only when the task has finished."""
    directory = Path(task["directory"])
    if task["kind"] == "read":
        return shard_index(directory, task["shard"]).exists()
    if task["kind"] == "train":
        return (directory / "tokenizer.json").exists()
    return unit_file(directory, task["unit"]).exists()


def shard_text(directory: Path, shard: int) -> Path:
    """Returns the path of a shard's documents, concatenated as UTF-8."""
    return directory / f"read-{shard:05d}.text"


def shard_index(directory: Path, shard: int) -> Path:
    """Returns the path of a shard's `DOCUMENT` rows; the file is written last and marks a complete shard."""
    return directory / f"read-{shard:05d}.index"


def shard_characters(directory: Path, shard: int) -> Path:
    """Returns the path of a shard's distinct characters."""
    return directory / f"read-{shard:05d}.characters"


def unit_file(directory: Path, unit: int) -> Path:
    """Returns the path of an encoded unit: a header, document ends counted from its first token, tokens."""
    return directory / f"unit-{unit:06d}.bin"


def read_unit(path: Path, dtype: str) -> tuple[NDArray[np.unsignedinteger], NDArray[np.uint64]]:
    """Reads an encoded unit.

    Returns:
        tokens: (tokens,) of ``dtype``; document ends: (documents that end in the unit,) uint64.
    """
    with open(path, "rb") as file:
        header = np.fromfile(file, _HEADER, 1)[0]
        document_ends = np.fromfile(file, "<u8", int(header["ends"]))
        return np.fromfile(file, dtype, int(header["tokens"])), document_ends


def read_span(directory: Path, span: TextSpan) -> str:
    """Returns the text of a span; a character that its end divides is left out."""
    with open(shard_text(directory, span.shard), "rb") as file:
        file.seek(span.start)
        return file.read(span.stop - span.start).decode("utf-8", errors="ignore")


def _read_group(task: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Reads a group of files into a shard: text, characters and index."""
    document_rows, characters = [], set[str]()
    with whole_file(shard_text(directory, task["shard"])) as file:
        for source in (CorpusFile(**values) for values in task["sources"]):
            for text in read_documents(source, task["text_field"], task["normalise"]):
                data = text.encode("utf-8")
                document_rows.append(document_row(data))
                file.write(data)
                if task["characters"]:
                    characters.update(text)
    if task["characters"]:
        with whole_file(shard_characters(directory, task["shard"])) as file:
            file.write("".join(sorted(characters)).encode("utf-8"))
    # The index comes last: `finished` looks for it alone.
    with whole_file(shard_index(directory, task["shard"])) as file:
        file.write(np.array(document_rows, dtype=DOCUMENT).tobytes())
    return {"documents": len(document_rows), "bytes": task["bytes"]}


def _train_tokenizer(task: dict[str, Any], directory: Path) -> dict[str, Any]:
    texts = (read_span(directory, span) for span in _task_spans(task))
    write_tokenizer(directory, tokenizers_.train_bpe(texts, task["vocab_size"]))
    return {"bytes": task["bytes"]}


def write_tokenizer(directory: Path, files: tokenizers_.TokenizerFiles) -> None:
    """Writes a tokenizer's companions and then ``tokenizer.json``, whose presence marks all of them complete."""
    for name, text in files.companions.items():
        with whole_file(directory / name) as file:
            file.write(text.encode("utf-8"))
    with whole_file(directory / "tokenizer_config.json") as file:
        file.write(json.dumps(files.settings, indent=2, sort_keys=True).encode("utf-8"))
    with whole_file(directory / "tokenizer.json") as file:
        file.write(files.text.encode("utf-8"))


def _encode_unit(task: dict[str, Any], directory: Path, batched: bool) -> dict[str, Any]:
    """Encodes the spans of a unit, with the end token behind each document."""
    token_arrays: list[NDArray[np.unsignedinteger]] = []
    document_ends, token_count = [], 0
    # An array of one or no token, so that a tokenizer without an end token needs no branch.
    end_token = np.array([] if task["eos"] is None else [task["eos"]], dtype=task["dtype"])
    spans = _task_spans(task)
    if task["characters"]:
        encoded = _encode_characters(directory, spans, task["dtype"])
    else:
        encoded = _encode_subwords(
            _load_tokenizer(directory, task["literal"]), directory, spans, task["dtype"], batched
        )
    for span, tokens in zip(spans, encoded, strict=True):
        token_arrays.append(tokens)
        if span.ends_document:
            token_arrays.append(end_token)
        token_count += len(tokens) + (len(end_token) if span.ends_document else 0)
        if span.ends_document:
            document_ends.append(token_count)
    # Header with both lengths, then ends, then tokens: `read_unit` reads them in this order.
    with whole_file(unit_file(directory, task["unit"])) as file:
        file.write(np.array([(token_count, len(document_ends))], dtype=_HEADER).tobytes())
        file.write(np.array(document_ends, dtype="<u8").tobytes())
        for token_array in token_arrays:
            file.write(token_array.tobytes())
    return {"tokens": token_count, "bytes": task["bytes"]}


def _task_spans(task: dict[str, Any]) -> list[TextSpan]:
    return [
        TextSpan(shard=shard, start=start, stop=stop, ends_document=ends_document)
        for shard, start, stop, ends_document in task["pieces"]
    ]


@functools.lru_cache(maxsize=1)
def _cached_tokenizer(path: str, mtime_ns: int, literal: bool) -> Tokenizer:
    tokenizer = Tokenizer.from_file(path)
    tokenizer.encode_special_tokens = literal  # "<|endoftext|>" written in a text must not end a document
    return tokenizer


def _load_tokenizer(directory: Path, literal: bool = False) -> Tokenizer:
    path = directory / "tokenizer.json"
    return _cached_tokenizer(str(path), path.stat().st_mtime_ns, literal)


def _encode_subwords(
    tokenizer: Tokenizer, directory: Path, spans: Iterable[TextSpan], dtype: str, batched: bool
) -> Iterator[NDArray[np.unsignedinteger]]:
    """Yields the (tokens,) ids of each span by the tokenizer."""
    for span in spans:
        text = read_span(directory, span)
        if batched:
            # One text a call: the library's threads have nothing to share, so that each process keeps to its core.
            encoding = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]
        else:
            encoding = tokenizer.encode(text, add_special_tokens=False)
        yield np.array(encoding.ids, dtype=dtype)


def _encode_characters(directory: Path, spans: Iterable[TextSpan], dtype: str) -> Iterator[NDArray[np.unsignedinteger]]:
    """Yields the (characters,) ids of each span, one token a character."""
    # A table over all of Unicode: encoding is one look-up by code point.
    token_of_character = np.zeros(0x110000, dtype=dtype)
    for character, token in _load_tokenizer(directory).get_vocab(with_added_tokens=False).items():
        token_of_character[ord(character)] = token
    for span in spans:
        # UTF-32 gives one code point a character: the whole text is one array look-up.
        yield token_of_character[np.frombuffer(read_span(directory, span).encode("utf-32-le"), dtype="<u4")]
