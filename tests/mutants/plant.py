"""A mutant: one planted bug, put into a module's source as it is imported."""

from __future__ import annotations

import importlib.machinery
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

ROOT = Path(__file__).parents[2]
CATALOGUE = Path(__file__).parent / "catalogue.toml"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A bug that somebody might write, and who should notice."""

    name: str
    """Short and unique, in words."""
    file: str
    """Path of the source, from the root of the checkout."""
    find: str
    """Text that stands in the file exactly once."""
    put: str
    """What stands there instead."""
    tests: tuple[str, ...]
    """Tests that notice where the proof can't: the fault is outside what a proof of a layout runs."""
    survives: str
    """Why nothing can notice, for a mutant that computes the same; empty for all others."""
    unproven: str = ""
    """Why no proof can notice, for one that tests alone do: numbers of a run that is well are the same."""

    @property
    def module(self) -> str:
        """Its dotted name."""
        return self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def source(self) -> str:
        """Returns the file with the bug in it.

        Raises:
            LookupError: when the text doesn't stand there exactly once: the code has moved on, the catalogue hasn't.
        """
        text = (ROOT / self.file).read_text(encoding="utf-8")
        if text.count(self.find) != 1:
            raise LookupError(f"{self.name}: {self.find!r} stands {text.count(self.find)} times in {self.file}")
        return text.replace(self.find, self.put)


def load_catalogue(path: Path = CATALOGUE) -> list[Mutant]:
    """Reads all mutants.

    Raises:
        ValueError: when two have the same name.
    """
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    mutants = [
        Mutant(
            name=entry["name"],
            file=entry["file"],
            find=entry["find"],
            put=entry["put"],
            tests=tuple(entry.get("tests", ())),
            survives=entry.get("survives", ""),
            unproven=entry.get("unproven", ""),
        )
        for entry in entries
    ]
    names = [mutant.name for mutant in mutants]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"mutants of the same name: {sorted(twice)}")
    return mutants


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles the mutant's text instead of the file's; no compiled file is read or written."""

    def __init__(self, mutant: Mutant, path: str) -> None:
        super().__init__(mutant.module, path)
        self._text = mutant.source()

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._text, self.get_filename(fullname), "exec", dont_inherit=True)


class _Finder:
    """Answers for one module, before anybody else does."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._mutant.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.origin is not None, name
        spec.loader = _Loader(self._mutant, spec.origin)
        return spec


def plant(mutant: Mutant) -> None:
    """Has this process, and what it forks, import the mutant.

    Raises:
        RuntimeError: when meshwright was imported before.
    """
    if any(name.partition(".")[0] == "meshwright" for name in sys.modules):
        raise RuntimeError("meshwright is imported already; a mutant must be planted before")
    mutant.source()
    sys.meta_path.insert(0, _Finder(mutant))  # type: ignore[arg-type]
