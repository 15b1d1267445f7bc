"""The three kinds of work that prepare hands out: read a group of files, train a tokenizer, encode a unit of text.

A task is plain JSON values in and out, names the files it writes, and depends on nothing else: so the bytes are the
same whichever process does it, and a finished file needs no second look.
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
from meshwright.data.selection import DOCUMENT, TextPiece, document_row
from meshwright.data.sources import CorpusFile

_HEADER = np.dtype([("tokens", "<u8"), ("ends", "<u8")])


def perform(task: dict[str, Any], batched: bool) -> dict[str, Any]:
    """Does one task and returns its counts.

    Args:
        task: ``kind`` (``read``, ``train`` or ``encode``) and the arguments of that kind.
        batched: encode through the batch interface, which is faster and starts the library's threads in this process
            (a later fork would make it warn).

    Raises:
        DataError: for text that can't be read, or a full disk.
    """
    directory = Path(task["directory"])
    if task["kind"] == "read":
        return _read(task, directory)
    if task["kind"] == "train":
        return _train(task, directory)
    return _encode(task, directory, batched)


def finished(task: dict[str, Any]) -> bool:
    """Whether a task's last file is there, which it is only when the task was done to its end."""
    directory = Path(task["directory"])
    if task["kind"] == "read":
        return shard_index(directory, task["shard"]).exists()
    if task["kind"] == "train":
        return (directory / "tokenizer.json").exists()
    return unit_file(directory, task["unit"]).exists()


def shard_text(directory: Path, shard: int) -> Path:
    """Returns the file that holds the documents of a shard one after the other, as UTF-8."""
    return directory / f"read-{shard:05d}.text"


def shard_index(directory: Path, shard: int) -> Path:
    """Returns the file of a shard's `DOCUMENT` rows; it is written last, so it says that the shard is whole."""
    return directory / f"read-{shard:05d}.index"


def shard_characters(directory: Path, shard: int) -> Path:
    """Returns the file of the distinct characters of a shard."""
    return directory / f"read-{shard:05d}.characters"


def unit_file(directory: Path, unit: int) -> Path:
    """Returns the file of an encoded unit: a header, document ends counted from its first token, tokens."""
    return directory / f"unit-{unit:06d}.bin"


def read_unit(path: Path, dtype: str) -> tuple[NDArray[np.unsignedinteger], NDArray[np.uint64]]:
    """Reads an encoded unit.

    Returns:
        tokens (tokens,), and ends (documents that end here,).
    """
    with open(path, "rb") as file:
        header = np.fromfile(file, _HEADER, 1)[0]
        ends = np.fromfile(file, "<u8", int(header["ends"]))
        return np.fromfile(file, dtype, int(header["tokens"])), ends


def read_piece(directory: Path, piece: TextPiece) -> str:
    """Returns the text of a piece; a character torn by its end is left out."""
    with open(shard_text(directory, piece.shard), "rb") as file:
        file.seek(piece.start)
        return file.read(piece.stop - piece.start).decode("utf-8", errors="ignore")


def _read(task: dict[str, Any], directory: Path) -> dict[str, Any]:
    rows, characters = [], set[str]()
    with whole_file(shard_text(directory, task["shard"])) as file:
        for source in (CorpusFile(**values) for values in task["sources"]):
            for text in read_documents(source, task["text_field"], task["normalise"]):
                data = text.encode("utf-8")
                rows.append(document_row(data))
                file.write(data)
                if task["characters"]:
                    characters.update(text)
    if task["characters"]:
        with whole_file(shard_characters(directory, task["shard"])) as file:
            file.write("".join(sorted(characters)).encode("utf-8"))
    with whole_file(shard_index(directory, task["shard"])) as file:
        file.write(np.array(rows, dtype=DOCUMENT).tobytes())
    return {"documents": len(rows), "bytes": task["bytes"]}


def _train(task: dict[str, Any], directory: Path) -> dict[str, Any]:
    texts = (read_piece(directory, piece) for piece in _pieces(task))
    write_tokenizer(directory, tokenizers_.train_bpe(texts, task["vocab_size"]))
    return {"bytes": task["bytes"]}


def write_tokenizer(directory: Path, files: tokenizers_.TokenizerFiles) -> None:
    """Writes what goes with a tokenizer and then ``tokenizer.json``, whose presence says that all of it is whole."""
    for name, text in files.companions.items():
        with whole_file(directory / name) as file:
            file.write(text.encode("utf-8"))
    with whole_file(directory / "tokenizer_config.json") as file:
        file.write(json.dumps(files.settings, indent=2, sort_keys=True).encode("utf-8"))
    with whole_file(directory / "tokenizer.json") as file:
        file.write(files.text.encode("utf-8"))


def _encode(task: dict[str, Any], directory: Path, batched: bool) -> dict[str, Any]:
    parts: list[NDArray[np.unsignedinteger]] = []
    ends, total = [], 0
    end = np.array([] if task["eos"] is None else [task["eos"]], dtype=task["dtype"])
    pieces = _pieces(task)
    if task["characters"]:
        encoded = _characters(directory, pieces, task["dtype"])
    else:
        encoded = _subwords(_load(directory, task["literal"]), directory, pieces, task["dtype"], batched)
    for piece, tokens in zip(pieces, encoded, strict=True):
        parts.append(tokens)
        if piece.ends:
            parts.append(end)
        total += len(tokens) + (len(end) if piece.ends else 0)
        if piece.ends:
            ends.append(total)
    with whole_file(unit_file(directory, task["unit"])) as file:
        file.write(np.array([(total, len(ends))], dtype=_HEADER).tobytes())
        file.write(np.array(ends, dtype="<u8").tobytes())
        for part in parts:
            file.write(part.tobytes())
    return {"tokens": total, "bytes": task["bytes"]}


def _pieces(task: dict[str, Any]) -> list[TextPiece]:
    return [TextPiece(shard=shard, start=start, stop=stop, ends=ends) for shard, start, stop, ends in task["pieces"]]


@functools.lru_cache(maxsize=1)
def _tokenizer(path: str, mtime_ns: int, literal: bool) -> Tokenizer:
    tokenizer = Tokenizer.from_file(path)
    tokenizer.encode_special_tokens = literal  # "<|endoftext|>" written in a text must not end a document
    return tokenizer


def _load(directory: Path, literal: bool = False) -> Tokenizer:
    path = directory / "tokenizer.json"
    return _tokenizer(str(path), path.stat().st_mtime_ns, literal)


def _subwords(
    tokenizer: Tokenizer, directory: Path, pieces: Iterable[TextPiece], dtype: str, batched: bool
) -> Iterator[NDArray[np.unsignedinteger]]:
    for piece in pieces:
        text = read_piece(directory, piece)
        if batched:
            # One text a call: the library's threads have nothing to share, so that each process keeps to its core.
            encoding = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]
        else:
            encoding = tokenizer.encode(text, add_special_tokens=False)
        yield np.array(encoding.ids, dtype=dtype)


def _characters(directory: Path, pieces: Iterable[TextPiece], dtype: str) -> Iterator[NDArray[np.unsignedinteger]]:
    table = np.zeros(0x110000, dtype=dtype)
    for character, token in _load(directory).get_vocab(with_added_tokens=False).items():
        table[ord(character)] = token
    for piece in pieces:
        yield table[np.frombuffer(read_piece(directory, piece).encode("utf-32-le"), dtype="<u4")]
