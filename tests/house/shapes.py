"""Tensor and array functions whose docstrings don't state a shape: ``python -m tests.house.shapes``.

A reader of a public function must see from its docstring what shape each tensor or array has: ``grad: (n_local,)``,
"any shape", "a scalar". A function counts when a parameter's or the result's annotation names a tensor or an array.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.house.source import modules, place

ARRAY = re.compile(r"\b(Tensor|DTensor|NDArray|ndarray|Parameter)\b")
STATED = re.compile(r"\(\)|\([\w.*/+ -]+,[\w.,*/+ -]*\)|\bshapes?\b|\bscalars?\b", re.IGNORECASE)


def array_functions() -> Iterator[tuple[str, ast.FunctionDef, str]]:
    """Yields (place, function, docstring) of each public function with a tensor or an array among its types.

    A method's docstring is joined with its class's, where a shape that all methods share may stand.
    """
    for path, module in modules().items():
        for node in module.body:
            if isinstance(node, ast.FunctionDef):
                yield from _if_array(path, node, "")
            elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef):
                        yield from _if_array(path, method, ast.get_docstring(node) or "")


def _if_array(path: Path, function: ast.FunctionDef, shared: str) -> Iterator[tuple[str, ast.FunctionDef, str]]:
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    annotations = [argument.annotation for argument in arguments] + [function.returns]
    # An annotation inside Callable[...] describes another function's tensors.
    texts = [ast.unparse(annotation) for annotation in annotations if annotation is not None]
    has_array = any(ARRAY.search(re.sub(r"Callable\[.*\]", "", text)) for text in texts)
    if has_array and not function.name.startswith("_"):
        yield place(path, function), function, f"{shared}\n{ast.get_docstring(function) or ''}"


def without_shapes() -> list[str]:
    """Returns ``place name`` of each function whose docstring states no shape."""
    return [f"{where} {function.name}" for where, function, text in array_functions() if not STATED.search(text)]


if __name__ == "__main__":
    missing = without_shapes()
    print("\n".join(missing))
    print(f"{len(missing)} of {sum(1 for _ in array_functions())} functions state no shape")
    sys.exit(bool(missing))
