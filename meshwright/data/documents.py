"""Documents out of files: plain text, JSON lines and parquet, packed or not, refused where they are damaged."""

from __future__ import annotations

import io
import tokenize
import unicodedata
import zlib
from collections.abc import Iterator
from typing import Any

from meshwright.data.sources import CorpusFile
from meshwright.errors import DataError
from meshwright.records import parse_json

_CHUNK = 1 << 20
_BOM = "\ufeff"


def read_documents(source: CorpusFile, text_field: str, normalise: str) -> Iterator[str]:
    """Yields the documents of a file in their order, normalised; empty ones are left out.

    Text is UTF-8, strictly. Python source is read in the encoding that it declares, and a file of the interpreter's
    library that can't be decoded (its tests hold some on purpose) is passed over.

    Args:
        source: the file; a plain text file is one document.
        text_field: field of a jsonl line or column of a parquet file.
        normalise: ``NFC``, ``NFKC`` or ``none``.

    Raises:
        DataError: for bytes that aren't UTF-8 (file and byte offset), a damaged archive, a line that is no JSON
            object, a missing field or column.
    """
    if source.kind == "jsonl":
        texts = _jsonl(source, text_field)
    elif source.kind == "parquet":
        texts = _parquet(source, text_field)
    elif source.kind == "python":
        texts = _python(source)
    else:
        texts = iter((_decode(b"".join(_bytes(source)), source, 0),))
    for text in texts:
        text = text.removeprefix(_BOM)
        if normalise != "none" and not text.isascii():
            text = unicodedata.normalize(normalise, text)  # type: ignore[arg-type]
        if text:
            yield text


def _bytes(source: CorpusFile) -> Iterator[bytes]:
    """Yields the unpacked bytes of a file in pieces."""
    try:
        with open(source.path, "rb") as file:
            if source.path.lower().endswith(".gz"):
                yield from _unpack(source, file, lambda: zlib.decompressobj(wbits=31), zlib.error)
            elif source.path.lower().endswith(".zst"):
                import zstandard

                make = zstandard.ZstdDecompressor().decompressobj
                yield from _unpack(source, file, make, zstandard.ZstdError)
            else:
                while piece := file.read(_CHUNK):
                    yield piece
    except OSError as error:
        raise DataError(f"cannot read {source.path}: {error.strerror}; check the file and its permissions") from error


def _unpack(source: CorpusFile, file: io.BufferedReader, make: Any, damage: type[Exception]) -> Iterator[bytes]:
    """Unpacks one or more frames and knows when the last one is cut off, which the libraries' readers let pass."""
    unpacker, begun = make(), False
    try:
        while piece := file.read(_CHUNK):
            while piece:
                if unpacker.eof:
                    unpacker, begun = make(), False
                begun = True
                yield unpacker.decompress(piece)
                piece = unpacker.unused_data if unpacker.eof else b""
    except damage as error:
        raise DataError(f"{source.path} is damaged ({error}); fetch or pack it again") from error
    if begun and not unpacker.eof:
        raise DataError(f"{source.path} is cut off at {source.size} bytes, in the middle of its data; fetch it again")


def _decode(data: bytes, source: CorpusFile, offset: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source.path} is not UTF-8: byte 0x{data[error.start]:02x} at byte offset {offset + error.start}"
            f" ({error.reason}); convert it first, for example with iconv -f latin1 -t utf-8"
        ) from None


def _jsonl(source: CorpusFile, text_field: str) -> Iterator[str]:
    offset = 0
    for number, line in enumerate(_lines(_bytes(source)), 1):
        if line.strip():
            yield _field(_decode(line, source, offset), source, number, text_field)
        offset += len(line)


def _lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    rest: list[bytes] = []
    for piece in pieces:
        first, newline, tail = piece.partition(b"\n")
        rest.append(first + newline)
        if not newline:
            continue
        yield b"".join(rest)
        rest = []
        for line in io.BytesIO(tail):
            if line.endswith(b"\n"):
                yield line
            else:
                rest = [line]
    if rest and (last := b"".join(rest)):
        yield last


def _field(line: str, source: CorpusFile, number: int, text_field: str) -> str:
    try:
        value = parse_json(line.removeprefix(_BOM))
    except ValueError as error:
        raise DataError(f"{source.path} line {number} is not JSON: {error}; each line must be one object") from None
    if not isinstance(value, dict) or not isinstance(value.get(text_field), str):
        known = ", ".join(sorted(k for k, v in value.items() if isinstance(v, str))) if isinstance(value, dict) else ""
        raise DataError(
            f"{source.path} line {number} has no text in field '{text_field}'; fields with text: {known or 'none'}; "
            "set data.text_field"
        )
    text: str = value[text_field]
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{source.path} line {number}: field '{text_field}' holds half a surrogate pair at character "
            f"{error.start}, which no UTF-8 text can; mend or drop the line"
        ) from None
    return text


def _parquet(source: CorpusFile, text_field: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(source.path) as table:
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


def _python(source: CorpusFile) -> Iterator[str]:
    data = b"".join(_bytes(source))
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        yield data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError):
        return
