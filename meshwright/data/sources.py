"""Lists the files of a corpus, here or behind a URL, in an order that depends on their names alone."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.data.remote import is_remote, list_remote
from meshwright.errors import DataError

Kind = Literal["text", "jsonl", "parquet", "python"]

_KINDS: dict[str, Kind] = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".rst": "text",
    ".py": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
_COMPRESSED = (".gz", ".zst")
_FOREIGN_FOLDERS = frozenset({"site-packages", "dist-packages"})
_COMMITTED, _UNCOMMITTED = "_SUCCESS", "_temporary"
"""What Spark and Hadoop leave in a folder when its job has ended, and while it runs. Source: FileOutputCommitter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusFile:
    """One file of the corpus."""

    path: str
    """Absolute path, or URL."""
    kind: Kind
    """How documents are read from it."""
    size: int
    """Bytes as stored."""


def list_sources(paths: Sequence[str]) -> list[CorpusFile]:
    """Lists the files behind paths, directories and globs; without any, the Python interpreter's own library.

    Args:
        paths: the user's paths and URLs, in that order; directories and globs are sorted by name.

    Raises:
        DataError: when a path doesn't exist, a glob matches nothing, or a directory holds no text.
    """
    if not paths:
        return _interpreter_sources()
    files_by_real_path: dict[str, CorpusFile] = {}
    for path in paths:
        if is_remote(path):
            for source in _remote_files(path):
                files_by_real_path.setdefault(source.path, source)
            continue
        for file in _expand_path(path):
            # A file reached by two paths, or through a link, is read once.
            files_by_real_path.setdefault(os.path.realpath(file), _corpus_file(file, _kind_here(file) or "text"))
    return list(files_by_real_path.values())


def _remote_files(url: str) -> list[CorpusFile]:
    """Lists the files behind a URL; of more than one those alone that hold text."""
    listed = list_remote(url)
    if len(listed) == 1:
        ((name, size),) = listed
        return [CorpusFile(path=name, kind=_kind_of(name) or "text", size=size)]
    names = [(name, size) for name, size in listed if not _is_hidden(name.removeprefix(url.rstrip("/")))]
    if unfinished := [name for name, _ in names if f"/{_UNCOMMITTED}/" in name]:
        raise _uncommitted(unfinished[0].partition(f"/{_UNCOMMITTED}/")[0])
    committed = {name.rpartition("/")[0] for name, _ in listed if name.endswith(f"/{_COMMITTED}")}
    files = [
        CorpusFile(path=name, kind=kind, size=size)
        for name, size in names
        if (kind := _kind_of(name, name.rpartition("/")[0] in committed))
    ]
    if not files:
        raise DataError(f"{url} holds no text files; known are {', '.join(_KINDS)}; name other files one by one")
    return files


def _is_hidden(path: str) -> bool:
    return any(part.startswith(".") for part in path.split("/"))


def _uncommitted(folder: str) -> DataError:
    return DataError(
        f"{folder} holds {_UNCOMMITTED}: the Spark or Hadoop job that writes it hasn't ended, or failed; wait for it, "
        "or remove that folder where the other files are whole"
    )


def _expand_path(path: str) -> list[str]:
    """Lists the files of a path, directory or glob."""
    full = os.path.expanduser(path)
    if os.path.isdir(full):
        files = [file for file in _walk_files(full) if _kind_here(file)]
        if not files:
            raise DataError(
                f"directory {path} holds no text files; known are {', '.join(_KINDS)} (text and jsonl also with "
                ".gz or .zst); name other files one by one or by a glob"
            )
        return files
    if os.path.exists(full):
        return [full]
    if any(sign in path for sign in "*?["):
        files = sorted(file for file in glob.glob(full, recursive=True) if os.path.isfile(file))
        if files:
            return files
        raise DataError(f"no file matches {path} (looked from {os.getcwd()}); check the pattern given to --data")
    raise DataError(f"no such file: {path} (looked from {os.getcwd()}); check the path given to --data")


def _kind_here(path: str) -> Kind | None:
    return _kind_of(path, os.path.exists(os.path.join(os.path.dirname(path), _COMMITTED)))


def _walk_files(directory: str, skipped: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yields the files below a directory, sorted by name, without hidden ones and skipped folders.

    Raises:
        DataError: where Spark or Hadoop still writes.
    """
    for folder, folders, files in os.walk(directory):
        if _UNCOMMITTED in folders:
            raise _uncommitted(folder)
        # Hidden folders and byte code hold no text.
        entered = (name for name in folders if name != "__pycache__" and name not in skipped)
        # os.walk descends in the order of this list, which must not depend on the file system.
        folders[:] = sorted(name for name in entered if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith("."):
                yield os.path.join(folder, name)


def _kind_of(path: str, committed: bool = False) -> Kind | None:
    """Returns how a file is read, by its name; None for one that isn't known to hold text.

    Args:
        path: path or URL; what follows a ``?`` of a URL is no part of the name.
        committed: whether Spark or Hadoop wrote its folder, whose ``.json`` files hold an object a line.
    """
    stem, suffix = os.path.splitext((path.partition("?")[0] if is_remote(path) else path).lower())
    # x.jsonl.gz has the kind of x.jsonl; parquet compresses by itself.
    is_compressed = suffix in _COMPRESSED
    if is_compressed:
        suffix = os.path.splitext(stem)[1]
    if committed and suffix == ".json":
        return "jsonl"
    return None if is_compressed and suffix == ".parquet" else _KINDS.get(suffix)


def _corpus_file(path: str, kind: Kind) -> CorpusFile:
    try:
        status = os.stat(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; check the path and its permissions") from None
    return CorpusFile(path=os.path.abspath(path), kind=kind, size=status.st_size)


def _interpreter_sources() -> list[CorpusFile]:
    root = sysconfig.get_paths()["stdlib"]
    files = [_corpus_file(file, "python") for file in _walk_files(root, _FOREIGN_FOLDERS) if file.endswith(".py")]
    if not files:
        raise DataError(f"no Python source text under {root}; this interpreter ships without it: give --data PATH")
    return files
