"""Text behind URLs: the same set as from files here, in whatever form Spark or Hadoop wrote it."""

from __future__ import annotations

import gzip
import http.server
import importlib.util
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from meshwright.data.config import DataConfig
from meshwright.data.prepare import prepare
from meshwright.data.remote import remote_digest
from meshwright.data.sources import list_sources
from meshwright.errors import DataError
from tests.prepare_runs import contents

TEXTS = [f"Document {i}: {'the cat sat on the mat. ' * (1 + i % 7)}na\u00efve" for i in range(40)]


def spark_folder(folder: Path) -> Path:
    """Writes a table as Spark does: parts, their checksums, an empty part, a partition's folder, and the mark."""
    for number, name in enumerate(
        ("lang=de/part-00000-a1b2.c000.snappy.parquet", "lang=en/part-00000-a1b2.c000.snappy.parquet")
    ):
        path = folder / name
        path.parent.mkdir(parents=True)
        texts = TEXTS[20 * number : 20 * number + 20]
        table = pyarrow.table({"id": list(range(20)), "text": pyarrow.array([*texts[:19], texts[19]])})
        pyarrow.parquet.write_table(table, path, compression="snappy", row_group_size=7)
        (path.parent / f".{path.name}.crc").write_bytes(b"crc\0")
        empty = path.parent / "part-00001-a1b2.c000.snappy.parquet"
        pyarrow.parquet.write_table(table.slice(0, 0), empty)
    (folder / "_SUCCESS").touch()
    return folder


def spark_json(folder: Path) -> Path:
    """Writes lines of JSON as Spark does, which calls them .json."""
    folder.mkdir()
    for number in range(2):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[20 * number : 20 * number + 20])
        (folder / f"part-0000{number}-ff.c000.json.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "_SUCCESS").touch()
    return folder


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    store = fsspec.filesystem("memory")
    store.rm("/", recursive=True) if store.ls("/") else None
    yield store
    store.rm("/corpus", recursive=True) if store.exists("/corpus") else None


def upload(store: fsspec.AbstractFileSystem, folder: Path) -> str:
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        store.pipe(f"/corpus/{path.relative_to(folder)}", path.read_bytes())
    return "memory://corpus"


def settings(path: str) -> DataConfig:
    return DataConfig(paths=(path,), tokenizer="chars", validation_share=0.2)


@pytest.mark.parametrize("write", [spark_folder, spark_json])
def test_a_folder_that_spark_wrote_is_read_here_and_from_a_store(
    tmp_path: Path, memory: fsspec.AbstractFileSystem, write: object
) -> None:
    folder = write(tmp_path / "table")  # type: ignore[operator]
    here = prepare(settings(str(folder)), tmp_path / "here", workers=1)
    assert here.manifest["documents_read"] == 40
    there = prepare(settings(upload(memory, folder)), tmp_path / "there", workers=1)
    # memory:// says nothing of the bytes, which are therefore read: the whole set is equal, its key included.
    assert contents(there.path) == contents(here.path)


def test_a_folder_that_is_still_written_is_refused(tmp_path: Path, memory: fsspec.AbstractFileSystem) -> None:
    folder = spark_folder(tmp_path / "table")
    (folder / "_temporary" / "0").mkdir(parents=True)
    (folder / "_temporary" / "0" / "part-00002.parquet").write_bytes(b"PAR1")
    for path in (str(folder), upload(memory, folder)):
        with pytest.raises(DataError, match=r"holds _temporary: the Spark or Hadoop job .* hasn't ended, or failed"):
            list_sources([path])


def test_globs_and_single_files_of_a_store(memory: fsspec.AbstractFileSystem) -> None:
    for name in ("b.txt", "a.jsonl", "c.bin"):
        memory.pipe(f"/corpus/{name}", b'{"text": "x"}\n')
    assert [(file.path, file.kind) for file in list_sources(["memory://corpus/*.*"])] == [
        ("memory:///corpus/a.jsonl", "jsonl"),
        ("memory:///corpus/b.txt", "text"),
    ]
    assert [file.kind for file in list_sources(["memory://corpus/c.bin"])] == ["text"]
    for url, sentence in (
        ("memory://corpus/none.txt", "no such file: memory://corpus/none.txt"),
        ("memory://corpus/*.nothing", "no file matches"),
        ("nosuch://corpus/a.txt", r"cannot read nosuch://.*credentials"),
    ):
        with pytest.raises(DataError, match=sentence):
            list_sources([url])


def test_a_stores_file_that_changes_is_another_text(memory: fsspec.AbstractFileSystem) -> None:
    memory.pipe("/corpus/a.txt", b"abc")
    before = remote_digest("memory://corpus/a.txt")
    memory.pipe("/corpus/a.txt", b"abd")
    assert remote_digest("memory://corpus/a.txt") != before


@pytest.mark.skipif(importlib.util.find_spec("aiohttp") is None, reason="fsspec's http needs aiohttp")
def test_text_from_a_web_server(tmp_path: Path) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (folder / "text.jsonl.gz").write_bytes(gzip.compress(lines.encode()))

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/text.jsonl.gz"
        there = prepare(settings(url), tmp_path / "there", workers=1)
        server.shutdown()
    here = prepare(settings(str(folder)), tmp_path / "here", workers=1)
    assert there.fingerprint == here.fingerprint
