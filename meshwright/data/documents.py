"""Reads documents from plain text, JSON lines and parquet, compressed or not, and refuses damaged files."""

from __future__ import annotations

import io
import tokenize
import unicodedata
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import zstandard

from meshwright.data.remote import is_remote, open_remote, unreadable
from meshwright.data.sources import CorpusFile
from meshwright.errors import DataError
from meshwright.records import parse_json

_BLOCK_BYTES = 1 << 20
_BOM = "\ufeff"


def read_documents(source: CorpusFile, text_field: str, normalise: str) -> Iterator[str]:
    """Yields the documents of a file in order, normalised; it skips empty ones.

    Text is UTF-8, strictly. Python source is read in the encoding that it declares, and a file of the interpreter's
    library that can't be decoded (its tests hold some on purpose) is skipped.

    Args:
        source: the file; a plain text file is one document.
        text_field: field of a jsonl line or column of a parquet file.
        normalise: ``NFC``, ``NFKC`` or ``none``.

    Raises:
        DataError: for bytes that aren't UTF-8 (file and byte offset), a damaged archive, a line that is no JSON
            object, a missing field or column.
    """
    if source.kind == "jsonl":
        texts = _read_jsonl(source, text_field)
    elif source.kind == "parquet":
        texts = _read_parquet(source, text_field)
    elif source.kind == "python":
        texts = _read_python(source)
    else:
        texts = iter((_decode(b"".join(_read_blocks(source)), source, 0),))
    for text in texts:
        # Editors on Windows put a byte order mark in front of UTF-8 text.
        text = text.removeprefix(_BOM)
        if normalise != "none" and not text.isascii():
            text = unicodedata.normalize(normalise, text)  # type: ignore[arg-type]
        # Empty after normalisation: it would be a document of its end token alone.
        if text:
            yield text


def _read_blocks(source: CorpusFile) -> Iterator[bytes]:
    """Yields the decompressed bytes of a file in blocks."""
    name = source.path.lower().partition("?")[0] if is_remote(source.path) else source.path.lower()
    try:
        with _open_source(source) as file:
            if name.endswith(".gz"):
                yield from _decompress(source, file, lambda: zlib.decompressobj(wbits=31), zlib.error)
            elif name.endswith(".zst"):
                make_decompressor = zstandard.ZstdDecompressor().decompressobj
                yield from _decompress(source, file, make_decompressor, zstandard.ZstdError)
            else:
                while block := file.read(_BLOCK_BYTES):
                    yield block
    except OSError as error:
        if is_remote(source.path):
            raise unreadable(source.path, error) from error
        raise DataError(f"cannot read {source.path}: {error.strerror}; check the file and its permissions") from error


def _open_source(source: CorpusFile) -> BinaryIO:
    return open_remote(source.path) if is_remote(source.path) else open(source.path, "rb")


def _decompress(
    source: CorpusFile, file: BinaryIO, make_decompressor: Any, codec_error: type[Exception]
) -> Iterator[bytes]:
    """Decompresses one or more frames; detects a truncated last frame, which the libraries' own readers ignore."""
    decompressor, frame_started = make_decompressor(), False
    try:
        while block := file.read(_BLOCK_BYTES):
            while block:
                if decompressor.eof:
                    decompressor, frame_started = make_decompressor(), False
                frame_started = True
                yield decompressor.decompress(block)
                # Concatenated archives: the next frame starts in the bytes that this one left over.
                block = decompressor.unused_data if decompressor.eof else b""
    except codec_error as error:
        raise DataError(f"{source.path} is damaged ({error}); fetch or pack it again") from error
    # A stream that ends inside a frame raises no error of its own.
    if frame_started and not decompressor.eof:
        raise DataError(f"{source.path} is cut off at {source.size} bytes, in the middle of its data; fetch it again")


def _decode(data: bytes, source: CorpusFile, offset: int) -> str:
    """Decodes UTF-8 strictly; ``offset`` is that of the data in the file, for the message."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source.path} is not UTF-8: byte 0x{data[error.start]:02x} at byte offset {offset + error.start}"
            f" ({error.reason}); convert it first, for example with iconv -f latin1 -t utf-8"
        ) from None


def _read_jsonl(source: CorpusFile, text_field: str) -> Iterator[str]:
    offset = 0
    for line_number, line in enumerate(_split_lines(_read_blocks(source)), 1):
        if line.strip():
            yield _text_of_line(_decode(line, source, offset), source, line_number, text_field)
        offset += len(line)


def _split_lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Joins blocks and splits them into lines, each with its newline."""
    line_blocks: list[bytes] = []
    for block in blocks:
        # A line may span blocks: keep its blocks until the newline comes.
        head, newline, remainder = block.partition(b"\n")
        line_blocks.append(head + newline)
        if not newline:
            continue
        yield b"".join(line_blocks)
        line_blocks = []
        for line in io.BytesIO(remainder):
            if line.endswith(b"\n"):
                yield line
            else:
                line_blocks = [line]
    if line_blocks and (final_line := b"".join(line_blocks)):
        yield final_line


def _field_cure(record: object, text_field: str) -> str:
    """Returns what to do about a record without text in its field."""
    fields = record if isinstance(record, dict) else {}
    chats = [key for key, value in fields.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if chats:
        return (
            f"field '{chats[0]}' holds messages, and rows are of plain text: write what your tokenizer's "
            f"apply_chat_template(messages, tokenize=False) gives into '{text_field}', of which every token is then a "
            "target; a loss of the answers alone is a custom loop's, with targets of -100 (docs/strategy.md)"
        )
    texts = ", ".join(sorted(key for key, value in fields.items() if isinstance(value, str)))
    if texts:
        return f"fields with text: {texts}; set data.text_field"
    return "fields with text: none; drop the line, or set data.text_field if others have it elsewhere"


def _text_of_line(line: str, source: CorpusFile, line_number: int, text_field: str) -> str:
    """Returns the text field of one JSON line."""
    try:
        record = parse_json(line.removeprefix(_BOM))
    except ValueError as error:
        raise DataError(
            f"{source.path} line {line_number} is not JSON: {error}; each line must be one object"
        ) from None
    if not isinstance(record, dict) or not isinstance(record.get(text_field), str):
        raise DataError(
            f"{source.path} line {line_number} has no text in field '{text_field}'; {_field_cure(record, text_field)}"
        )
    text: str = record[text_field]
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{source.path} line {line_number}: field '{text_field}' holds half a surrogate pair at character "
            f"{error.start}, which no UTF-8 text can; mend or drop the line"
        ) from None
    return text


def _read_parquet(source: CorpusFile, text_field: str) -> Iterator[str]:
    """Yields the values of a text column, in batches of rows."""
    import pyarrow
    import pyarrow.parquet

    try:
        with _open_source(source) as file, pyarrow.parquet.ParquetFile(file) as table:
            schema = table.schema_arrow
            names = [f.name for f in schema if pyarrow.types.is_string(f.type) or pyarrow.types.is_large_string(f.type)]
            if text_field not in names:
                raise DataError(
                    f"{source.path} has no text column '{text_field}'; columns with text: "
                    f"{', '.join(names) or 'none'}; set data.text_field"
                )
            for batch in table.iter_batches(batch_size=1024, columns=[text_field]):
                yield from (text for text in batch.column(0).to_pylist() if text is not None)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{source.path} cannot be read as parquet: {error}; fetch or write it again") from error


def _read_python(source: CorpusFile) -> Iterator[str]:
    data = b"".join(_read_blocks(source))
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        yield data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError):
        return
