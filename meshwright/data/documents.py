"""Reads documents from plain text, JSON lines and parquet, compressed or not, and refuses damaged files."""

from __future__ import annotations

import dataclasses
import io
import tokenize
import unicodedata
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import zstandard

from meshwright.data.chat_template import ChatTemplate
from meshwright.data.config import TRAINED_TOKENIZERS, DataConfig
from meshwright.data.conversations import (
    FIELDS,
    MESSAGE_FIELDS,
    Document,
    conversation_document,
    holds_conversation,
)
from meshwright.data.remote import is_remote, open_remote, unreadable
from meshwright.data.sources import CorpusFile
from meshwright.data.tokenizer import begin_text, chat_template, end_text, given_tokenizer
from meshwright.errors import DataError
from meshwright.records import parse_json

_BLOCK_BYTES = 1 << 20
_BOM = "\ufeff"
_NO_ANSWERS = (
    "and data.targets = 'answers' needs messages, or prompt and completion (docs/prepare.md); leave it out to learn "
    "every token"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How records become documents."""

    text_field: str
    """Field of a jsonl line or column of a parquet file."""
    normalise: str
    """``NFC``, ``NFKC`` or ``none``."""
    answers: bool = False
    """Whether only answers are targets, so that a text without any is refused."""
    chat: ChatTemplate | None = None
    """Of the tokenizer; None where it has none."""
    end_token: str = ""
    """Text that the tokenizer reads as its end token; empty where no text is."""
    begin_tokens: str = ""
    """Text of what the tokenizer puts before every text; empty for nothing."""

    def plain(self, text: str) -> Document:
        """Returns a text as a document: what would be at its beginning or its end twice isn't added."""
        text = self.normal(text)
        return Document(text=text, needs_end=not self.ends_itself(text), needs_begin=self.needs_begin(text))

    def ends_itself(self, text: str) -> bool:
        """Returns whether a text ends with the end token."""
        return bool(self.end_token) and text.endswith(self.end_token)

    def needs_begin(self, text: str) -> bool:
        """Returns whether something is to be put before a text."""
        return bool(self.begin_tokens) and not text.startswith(self.begin_tokens)

    def normal(self, text: str) -> str:
        """Returns a text in the normal form, without a byte order mark in front."""
        # Editors on Windows put it in front of UTF-8 text.
        text = text.removeprefix(_BOM)
        if self.normalise == "none" or text.isascii():
            return text
        return unicodedata.normalize(self.normalise, text)  # type: ignore[arg-type]


def reading_of(config: DataConfig) -> Reading:
    """Returns how records become documents; the tokenizer, where one is given, says how it writes conversations."""
    files = None if config.tokenizer in TRAINED_TOKENIZERS else given_tokenizer(config.tokenizer)
    return Reading(
        text_field=config.text_field,
        normalise=config.normalise,
        answers=config.targets == "answers",
        chat=chat_template(files, config.chat_template),
        end_token=end_text(files) if files is not None else "",
        begin_tokens=begin_text(files) if files is not None and config.add_bos else "",
    )


def read_documents(source: CorpusFile, reading: Reading) -> Iterator[Document]:
    """Yields the documents of a file in order, normalised; it skips empty ones.

    Text is UTF-8, strictly. Python source is read in the encoding that it declares, and a file of the interpreter's
    library that can't be decoded (its tests hold some on purpose) is skipped.

    Args:
        source: the file; a plain text file is one document.
        reading: how its records become documents.

    Raises:
        DataError: for bytes that aren't UTF-8 (file and byte offset), a damaged archive, a line that is no JSON
            object, a missing field or column, a conversation that can't be written, text without answers where those
            are asked for.
    """
    if source.kind == "jsonl":
        documents = _read_jsonl(source, reading)
    elif source.kind == "parquet":
        documents = _read_parquet(source, reading)
    else:
        if reading.answers:
            raise DataError(f"{source.path} is plain text, {_NO_ANSWERS}")
        texts = _read_python(source) if source.kind == "python" else _read_text(source)
        documents = (reading.plain(text) for text in texts)
    # Empty after normalisation: it would be a document of its end token alone.
    yield from (document for document in documents if document.text)


def _read_text(source: CorpusFile) -> Iterator[str]:
    yield _decode(b"".join(_read_blocks(source)), source, 0)


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


def _read_jsonl(source: CorpusFile, reading: Reading) -> Iterator[Document]:
    offset = 0
    for line_number, line in enumerate(_split_lines(_read_blocks(source)), 1):
        if line.strip():
            place = f"{source.path} line {line_number}"
            try:
                record = parse_json(_decode(line, source, offset).removeprefix(_BOM))
            except ValueError as error:
                raise DataError(f"{place} is not JSON: {error}; each line must be one object") from None
            yield _document_of(record, reading, place)
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


def _document_of(record: object, reading: Reading, place: str) -> Document:
    """Returns the document of a record: its text, or what its messages or its prompt and completion give.

    Raises:
        DataError: naming ``place``, for a record without them.
    """
    fields = record if isinstance(record, dict) else {}
    text = fields.get(reading.text_field)
    if holds_conversation(fields, reading.text_field) and (reading.answers or not isinstance(text, str)):
        try:
            document = conversation_document(
                fields,
                reading.text_field,
                reading.chat,
                reading.normal,
                answers=reading.answers,
                end_token=reading.end_token,
            )
        except DataError as error:
            raise DataError(f"{place}: {error}") from None
        needs_begin = document.needs_begin and reading.needs_begin(document.text)
        document = dataclasses.replace(document, needs_begin=needs_begin)
    elif isinstance(text, str):
        if reading.answers:
            raise DataError(f"{place} has text, {_NO_ANSWERS}")
        document = reading.plain(text)
    else:
        raise DataError(f"{place} has no text in field '{reading.text_field}'; {_field_cure(fields)}")
    try:
        document.text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place}: field '{reading.text_field}' holds half a surrogate pair at character {error.start}, which no "
            "UTF-8 text can; mend or drop the line"
        ) from None
    return document


def _field_cure(fields: dict[str, Any]) -> str:
    """Returns what to do about a record without text in its field."""
    texts = ", ".join(sorted(key for key, value in fields.items() if isinstance(value, str)))
    if texts:
        return f"fields with text: {texts}; set data.text_field"
    return "fields with text: none; drop the line, or set data.text_field if others have it elsewhere"


def _read_parquet(source: CorpusFile, reading: Reading) -> Iterator[Document]:
    """Yields the documents of the rows, in batches of rows."""
    import pyarrow
    import pyarrow.parquet

    try:
        with _open_source(source) as file, pyarrow.parquet.ParquetFile(file) as table:
            schema = table.schema_arrow
            names = [f.name for f in schema if pyarrow.types.is_string(f.type) or pyarrow.types.is_large_string(f.type)]
            columns = [name for name in dict.fromkeys((reading.text_field, *FIELDS)) if name in schema.names]
            if reading.text_field in names and not reading.answers:
                columns = [reading.text_field]
            elif not any(name in columns for name in (*MESSAGE_FIELDS, "completion", reading.text_field)):
                raise DataError(
                    f"{source.path} has no text column '{reading.text_field}'; columns with text: "
                    f"{', '.join(names) or 'none'}; set data.text_field"
                )
            row_number = 0
            for batch in table.iter_batches(batch_size=1024, columns=columns):
                for row in batch.to_pylist():
                    row_number += 1
                    if columns != [reading.text_field] or row[reading.text_field] is not None:
                        yield _document_of(_without_missing(row), reading, f"{source.path} row {row_number}")
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{source.path} cannot be read as parquet: {error}; fetch or write it again") from error


def _without_missing(value: Any) -> Any:
    """Returns a row without fields of None: a column gives each of its objects the fields of all others."""
    if isinstance(value, dict):
        return {name: _without_missing(item) for name, item in value.items() if item is not None}
    return [_without_missing(item) for item in value] if isinstance(value, list) else value


def _read_python(source: CorpusFile) -> Iterator[str]:
    data = b"".join(_read_blocks(source))
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        yield data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError):
        return
