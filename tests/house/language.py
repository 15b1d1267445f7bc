"""Measures how the package reads: ``python -m tests.house.language [--worst 40] [--json]``.

A name is an everyday word where it says nothing of the thing that it names (``found``, ``one``): an engineer who knows
Megatron and FSDP can't search for it. The figures are for reading, no limits; only `shared_type_names` is a rule.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.house.source import inner_imports, modules, nodes, place

_STRICT = (
    "found held kept told one asked given taken made left seen said got done gone known thing things at most way ways"
    " there here again own such others other both"
)
_WIDE = (
    "part parts place places piece pieces word words whole rest more less few fewer many much first last next before"
    " after back away apart ahead same like look tell take make give ask say wanted tried why what who end"
    " ends begin begins take takes stand stands lie lies"
)
STRICT = frozenset(_STRICT.split())
WIDE = STRICT | frozenset(_WIDE.split())


def defined_names(module: ast.Module) -> Iterator[str]:
    """Names that a module gives to functions, classes, arguments, variables and fields, each once for each place."""
    for node in nodes(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def shared_type_names() -> list[str]:
    """Types of different modules that go by one name: ``Name: places``."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, module in modules().items():
        for node in nodes(module):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(place(path, node))
    return [f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]


def figures() -> dict[str, Any]:
    """Returns the package's figures by name; shares are of 1."""
    names = [name.strip("_") for module in modules().values() for name in defined_names(module)]
    names = [name for name in names if name not in ("", "self", "cls")]
    lines = comments = any_types = 0
    for path, module in modules().items():
        text = path.read_text(encoding="utf-8")
        lines += text.count("\n")
        comments += _comment_lines(path)
        any_types += sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes(module))
    everyday = [name for name in names if name in WIDE]
    return {
        "files": len(modules()),
        "lines": lines,
        "names": len(names),
        "everyday words, wide": len(everyday) / len(names),
        "everyday words, strict": sum(name in STRICT for name in names) / len(names),
        "names of one word": sum("_" not in name and name == name.lower() for name in names) / len(names),
        "mean length of a name": sum(map(len, names)) / len(names),
        "comment lines": comments / lines,
        "Any per 1,000 lines": 1000 * any_types / lines,
        "imports inside functions": len(list(inner_imports())),
        "type names with several meanings": len(shared_type_names()),
    }


def _comment_lines(path: Path) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return sum(token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip() for token in tokens)


def main(words: list[str]) -> int:
    """Prints the figures, and the everyday words that are used most."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worst", type=int, default=20, help="everyday words to list")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(words)
    measured = figures()
    if chosen.json:
        print(json.dumps(measured))
        return 0
    for name, value in measured.items():
        print(f"{name:<36}{value:.1%}" if isinstance(value, float) and value < 1 else f"{name:<36}{value:,.5g}")
    counts = Counter(name for module in modules().values() for name in defined_names(module) if name in WIDE)
    print("most used:", ", ".join(f"{name} {count}" for name, count in counts.most_common(chosen.worst)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
