"""Reads the package's source files for the house tests; run it as a program to list what breaks the style."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "meshwright"
FILE_LINES = 400
FUNCTION_LINES = 60
INNER_IMPORTS = {
    ("arguments.py", "tyro"): "a third of a second, which a command without flags needn't wait for",
}
"""Imports inside functions of jobs and cli that may stay, each with its reason."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def modules() -> dict[Path, ast.Module]:
    """Every module of the package, parsed."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def place(path: Path, node: ast.AST | None = None) -> str:
    """``meshwright/x.py:12``."""
    line = getattr(node, "lineno", 1)
    return f"{path.relative_to(ROOT)}:{line}"


def missing_docstrings() -> Iterator[str]:
    """Names a stranger may use that don't say what they are."""
    for path, module in modules().items():
        if not ast.get_docstring(module):
            yield f"{place(path)} module has no docstring"
        if path.name != "__main__.py":
            yield from _undocumented(path, module, "")


def _undocumented(path: Path, parent: ast.Module | ast.ClassDef, prefix: str) -> Iterator[str]:
    for node in parent.body:
        if not isinstance(node, (ast.ClassDef, *Function.__args__)) or node.name.startswith("_"):
            continue
        name = prefix + node.name
        if not ast.get_docstring(node) and not _is_overload(node):
            yield f"{place(path, node)} {name} has no docstring"
        if isinstance(node, ast.ClassDef):
            yield from _undocumented(path, node, f"{name}.")
            if node.name.endswith("Config"):
                yield from _undocumented_fields(path, node)


def _is_overload(node: ast.AST) -> bool:
    names = [ast.unparse(item) for item in getattr(node, "decorator_list", [])]
    return any(name.endswith(("overload", ".setter")) for name in names)


def _undocumented_fields(path: Path, config: ast.ClassDef) -> Iterator[str]:
    following = [*config.body[1:], None]
    for node, after in zip(config.body, following):
        if not isinstance(node, ast.AnnAssign) or "ClassVar" in ast.unparse(node.annotation):
            continue
        documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if not (documented and isinstance(after.value.value, str)):
            yield f"{place(path, node)} {config.name}.{ast.unparse(node.target)} has no docstring under it"


def prints() -> Iterator[str]:
    """Calls of print: output belongs to cli and monitor, through rich."""
    for path, module in modules().items():
        for node in ast.walk(module):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                yield f"{place(path, node)} calls print"


def environment_reads() -> Iterator[str]:
    """Uses of the environment outside launch/."""
    names = {"environ", "getenv", "putenv", "environb"}
    for path, module in modules().items():
        if path.is_relative_to(PACKAGE / "launch"):
            continue
        for node in ast.walk(module):
            if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os":
                yield f"{place(path, node)} uses os.{node.attr}"
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                yield from (f"{place(path, node)} imports os.{a.name}" for a in node.names if a.name in names)


def inner_imports() -> Iterator[str]:
    """Imports inside functions of jobs and cli, where they hide what a job needs: who starts it loads it by name."""
    for path, module in modules().items():
        if path.relative_to(PACKAGE).parts[0] not in ("jobs", "cli"):
            continue
        functions = [node for node in ast.walk(module) if isinstance(node, Function)]
        inside = {id(node): node for function in functions for node in ast.walk(function)}.values()
        for node in inside:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                if (path.name, name) not in INNER_IMPORTS:
                    yield f"{place(path, node)} imports {name} inside a function"


def lazy_tables() -> Iterator[str]:
    """Calls of import_module outside of the two tables: the verbs of the command line, the names of the public API."""
    for path, module in modules().items():
        relative = path.relative_to(PACKAGE)
        if relative.parts[0] not in ("jobs", "cli") or relative.as_posix() == "cli/main.py":
            continue
        for node in ast.walk(module):
            if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node).endswith("import_module"):
                yield f"{place(path, node)} imports by name"


def oversized() -> Iterator[str]:
    """Files and functions over the limit, unless line 1 gives the reason (a comment ``# long: why``)."""
    for path, module in modules().items():
        lines = path.read_text(encoding="utf-8").splitlines()
        if lines and lines[0].startswith("# long: "):
            continue
        if len(lines) > FILE_LINES:
            yield f"{place(path)} has {len(lines)} lines, over {FILE_LINES}"
        for node in ast.walk(module):
            if isinstance(node, Function):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                if size > FUNCTION_LINES:
                    yield f"{place(path, node)} {node.name} has {size} lines, over {FUNCTION_LINES}"


RULES = (missing_docstrings, prints, environment_reads, inner_imports, lazy_tables, oversized)


def main() -> int:
    """Prints what breaks the style; the exit status is 1 when anything does."""
    found = [line for rule in RULES for line in rule()]
    for line in found:
        print(line)
    print(f"house: {len(modules())} modules, {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
