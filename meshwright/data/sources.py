"""Which files the text comes from, in an order that depends on nothing but their names."""

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
_PACKED = (".gz", ".zst")
_NOT_OURS = frozenset({"site-packages", "dist-packages"})


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
    """Lists the files behind paths, directories and globs; without any, the interpreter's own library.

    Args:
        paths: what the user gave, in that order; directories and globs are sorted by name.

    Raises:
        DataError: when a path is not there, a glob matches nothing, or a directory holds no text.
    """
    if not paths:
        return _interpreter_sources()
    seen: dict[str, CorpusFile] = {}
    for path in paths:
        for file in _expand(path):
            seen.setdefault(os.path.realpath(file), _source(file, _kind(file) or "text"))
    return list(seen.values())


def _expand(path: str) -> list[str]:
    full = os.path.expanduser(path)
    if os.path.isdir(full):
        found = [file for file in _walk(full) if _kind(file)]
        if not found:
            raise DataError(
                f"directory {path} holds no text files; known are {', '.join(_KINDS)} (text and jsonl also with "
                ".gz or .zst); name other files one by one or by a glob"
            )
        return found
    if os.path.exists(full):
        return [full]
    if any(sign in path for sign in "*?["):
        found = sorted(file for file in glob.glob(full, recursive=True) if os.path.isfile(file))
        if found:
            return found
        raise DataError(f"no file matches {path} (looked from {os.getcwd()}); check the pattern given to --data")
    raise DataError(f"no such file: {path} (looked from {os.getcwd()}); check the path given to --data")


def _walk(directory: str, passed: frozenset[str] = frozenset()) -> Iterator[str]:
    for here, folders, files in os.walk(directory):
        kept = (name for name in folders if name != "__pycache__" and name not in passed)
        folders[:] = sorted(name for name in kept if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith("."):
                yield os.path.join(here, name)


def _kind(path: str) -> Kind | None:
    stem, suffix = os.path.splitext(path.lower())
    if suffix in _PACKED:
        kind = _KINDS.get(os.path.splitext(stem)[1])
        return None if kind == "parquet" else kind
    return _KINDS.get(suffix)


def _source(path: str, kind: Kind) -> CorpusFile:
    try:
        state = os.stat(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; check the path and its permissions") from None
    return CorpusFile(path=os.path.abspath(path), kind=kind, size=state.st_size)


def _interpreter_sources() -> list[CorpusFile]:
    root = sysconfig.get_paths()["stdlib"]
    found = [_source(file, "python") for file in _walk(root, _NOT_OURS) if file.endswith(".py")]
    if not found:
        raise DataError(f"no Python source text under {root}; this interpreter ships without it: give --data PATH")
    return found
