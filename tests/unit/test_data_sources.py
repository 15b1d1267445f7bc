from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from meshwright.data.conversations import Document
from meshwright.data.documents import Reading, read_documents
from meshwright.data.sources import list_sources
from meshwright.errors import DataError

TEXTS = ["one\nline", "zwei: \u00e4\u00f6", "\u0442\u0440\u0438 \U0001f600"]


def texts_of(path: Path, field: str = "text", normalise: str = "none") -> list[str]:
    reading = Reading(text_field=field, normalise=normalise)
    sources = list_sources([str(path)])
    return [document.text for source in sources for document in read_documents(source, reading)]


def jsonl(field: str = "text") -> bytes:
    return b"".join(json.dumps({"id": i, field: text}).encode() + b"\n" for i, text in enumerate(TEXTS))


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("end", [b"", b"\n\n"])
def test_jsonl_packed_or_not(tmp_path: Path, suffix: str, end: bytes) -> None:
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[suffix]
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(pack(jsonl().rstrip() + end))
    assert texts_of(path) == TEXTS


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_several_frames_are_one_file(tmp_path: Path, suffix: str) -> None:
    pack = gzip.compress if suffix == ".gz" else zstandard.ZstdCompressor().compress
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(pack(b"first ") + pack(b"second"))
    assert texts_of(path) == ["first second"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_cut_off_archive_is_refused(tmp_path: Path, suffix: str) -> None:
    pack = gzip.compress if suffix == ".gz" else zstandard.ZstdCompressor().compress
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(pack(bytes(range(97, 122)) * 99)[:-6])
    with pytest.raises(DataError, match=r"a\.txt.*(cut off|damaged)"):
        texts_of(path)
    path.write_bytes(b"this is no archive at all")
    with pytest.raises(DataError, match="damaged"):
        texts_of(path)


def test_long_lines_cross_read_pieces(tmp_path: Path) -> None:
    long = "x" * (3 << 20)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("a", long, "b\rc", long + "y")))
    assert texts_of(path) == ["a", long, "b\rc", long + "y"]


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"id": [1, 2, 3, 4], "body": [*TEXTS, None]})
    pyarrow.parquet.write_table(table, path)
    assert texts_of(path, "body") == TEXTS
    with pytest.raises(DataError, match=r"no text column 'text'; columns with text: body; set data\.text_field"):
        texts_of(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="parquet"):
        texts_of(path, "body")


def test_text_is_normalised_and_byte_order_mark_dropped(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffe\u0301\ufb01\r\n".encode())
    assert texts_of(path, normalise="none") == ["e\u0301\ufb01\r\n"]
    assert texts_of(path, normalise="NFC") == ["\u00e9\ufb01\r\n"]
    assert texts_of(path, normalise="NFKC") == ["\u00e9fi\r\n"]


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"good " * 5 + b"caf\xe9 au lait")
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8: byte 0xe9 at byte offset 28"):
        texts_of(path)
    lines = tmp_path / "b.jsonl"
    lines.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(DataError, match=r"b\.jsonl is not UTF-8: byte 0xff at byte offset 24"):
        texts_of(lines)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', r"line 2 is not JSON"),
        ("[1]", r"line 2 has no text in field 'text'"),
        ('{"body": "a", "n": 1}', r"fields with text: body; set data\.text_field"),
        ('{"text": null}', r"fields with text: none; drop the line, or set data\.text_field"),
        (
            '{"messages": [{"role": "user", "content": "a"}]}',
            r"line 2: it holds messages, .*give data\.chat_template the path",
        ),
        ('{"text": "\\ud800"}', r"line 2: field 'text' holds half a surrogate pair"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' + line)
    with pytest.raises(DataError, match=message):
        texts_of(path)


def test_directories_and_globs_are_sorted_and_hidden_files_left_out(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "sub/c.md", ".hidden.txt", "image.png", "__pycache__/d.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts_of(tmp_path) == ["a.txt", "b.txt", "sub/c.md"]
    assert texts_of(tmp_path / "*.txt") == ["a.txt", "b.txt"]
    assert texts_of(tmp_path / "**/*.md") == ["sub/c.md"]
    twice = list_sources([str(tmp_path / "b.txt"), str(tmp_path)])
    assert [Path(source.path).name for source in twice] == ["b.txt", "a.txt", "c.md"]


def test_missing_inputs_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such file: .*nothing\.txt"):
        list_sources([str(tmp_path / "nothing.txt")])
    with pytest.raises(DataError, match="no file matches"):
        list_sources([str(tmp_path / "*.txt")])
    with pytest.raises(DataError, match="holds no text files"):
        list_sources([str(tmp_path)])


def test_interpreter_source_is_the_corpus_without_paths() -> None:
    sources = list_sources(())
    names = [source.path for source in sources]
    assert any(name.endswith("/json/decoder.py") for name in names)
    assert not any("site-packages" in name for name in names)
    assert names == [source.path for source in list_sources(())]
    assert len(sources) > 300


def test_python_source_is_read_in_its_own_encoding(tmp_path: Path) -> None:
    import dataclasses

    path = tmp_path / "a.py"
    path.write_bytes(b"# coding: latin-1\nname = 'caf\xe9'\n")
    source = dataclasses.replace(list_sources([str(path)])[0], kind="python")
    reading = Reading(text_field="text", normalise="NFC")
    assert list(read_documents(source, reading)) == [Document(text="# coding: latin-1\nname = 'caf\u00e9'\n")]
    path.write_bytes(b"name = 'caf\xe9'\n")
    assert list(read_documents(source, reading)) == []
