"""Lists the files of a corpus, in an order that depends on their names alone."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusFile:
    """One file of the corpus."""

    path: str
    """Absolute path."""
    kind: Kind
    """How documents are read from it."""
    size: int
    """Bytes on disk."""


def list_sources(paths: Sequence[str]) -> list[CorpusFile]:
    """Lists the files behind paths, directories and globs; without any, the Python interpreter's own library.

    Args:
        paths: the user's paths, in that order; directories and globs are sorted by name.

    Raises:
        DataError: when a path doesn't exist, a glob matches nothing, or a directory holds no text.
    """
    if not paths:
        return _interpreter_sources()
    files_by_real_path: dict[str, CorpusFile] = {}
    for path in paths:
        for file in _expand_path(path):
            # A file reached by two paths, or through a link, is read once.
            files_by_real_path.setdefault(os.path.realpath(file), _corpus_file(file, _kind_of(file) or "text"))
    return list(files_by_real_path.values())


def _expand_path(path: str) -> list[str]:
    """Lists the files of a path, directory or glob."""
    full = os.path.expanduser(path)
    if os.path.isdir(full):
        files = [file for file in _walk_files(full) if _kind_of(file)]
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


def _walk_files(directory: str, skipped: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yields the files below a directory, sorted by name, without hidden ones and skipped folders."""
    for folder, folders, files in os.walk(directory):
        # Hidden folders and byte code hold no text.
        entered = (name for name in folders if name != "__pycache__" and name not in skipped)
        # os.walk descends in the order of this list, which must not depend on the file system.
        folders[:] = sorted(name for name in entered if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith("."):
                yield os.path.join(folder, name)


def _kind_of(path: str) -> Kind | None:
    stem, suffix = os.path.splitext(path.lower())
    # x.jsonl.gz has the kind of x.jsonl; parquet compresses by itself.
    if suffix in _COMPRESSED:
        kind = _KINDS.get(os.path.splitext(stem)[1])
        return None if kind == "parquet" else kind
    return _KINDS.get(suffix)


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
