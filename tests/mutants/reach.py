"""Which commands of the battery run a mutant's statement: the others can't notice it and aren't asked."""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType

from tests.mutants.plant import ROOT, Mutant

PROBE = "__reached__"


def record(mutants: list[Mutant], folder: Path) -> None:
    """Has this process, and what it forks, make an empty file in ``folder`` for each mutant whose statement runs.

    The file is named by the mutant's place in ``mutants``.
    """
    by_module: dict[str, list[tuple[int, Mutant]]] = defaultdict(list)
    for place, mutant in enumerate(mutants):
        by_module[mutant.module].append((place, mutant))
    seen: set[int] = set()

    def reached(place: int) -> None:
        if place not in seen:
            seen.add(place)
            os.close(os.open(folder / str(place), os.O_CREAT | os.O_WRONLY))

    setattr(builtins, PROBE, reached)
    sys.meta_path.insert(0, _Finder(by_module))  # type: ignore[arg-type]


def probed(mutants: list[tuple[int, Mutant]]) -> ast.Module:
    """Returns the syntax tree of one file with a call of the probe before each mutant's statement."""
    text = (ROOT / mutants[0][1].file).read_text(encoding="utf-8")
    tree = ast.parse(text)
    for place, mutant in mutants:
        at = text.index(mutant.find)
        at += len(mutant.find) - len(mutant.find.lstrip())
        block, index = _statement(tree, text.count("\n", 0, at) + 1)
        call = ast.parse(f"{PROBE}({place})").body[0]
        block.insert(index, ast.copy_location(call, block[index]))
    return ast.fix_missing_locations(tree)


def _statement(tree: ast.Module, line: int) -> tuple[list[ast.stmt], int]:
    """Returns the innermost list of statements of which one holds a line, and that one's place in it."""
    inner: tuple[list[ast.stmt], int] = (tree.body, 0)
    for node in ast.walk(tree):  # outer nodes come before inner ones
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if not isinstance(block, list):
                continue
            for index, statement in enumerate(block):
                if statement.lineno <= line <= (statement.end_lineno or 0):
                    inner = (block, index)
    return inner


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles a file with its probes; no compiled file is read or written."""

    def __init__(self, name: str, path: str, mutants: list[tuple[int, Mutant]]) -> None:
        super().__init__(name, path)
        self._mutants = mutants

    def get_code(self, fullname: str) -> CodeType:
        return compile(probed(self._mutants), self.get_filename(fullname), "exec", dont_inherit=True)


class _Finder:
    """Answers for the modules that have mutants."""

    def __init__(self, by_module: dict[str, list[tuple[int, Mutant]]]) -> None:
        self._by_module = by_module

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._by_module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.origin is not None, name
        spec.loader = _Loader(name, spec.origin, self._by_module[name])
        return spec
