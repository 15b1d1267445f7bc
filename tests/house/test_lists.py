"""Nothing lists axes or schedules by hand: who needs them asks `known_axes` and `known_schedules`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.planner.cost.prices import PARTS, TRAFFIC_WORK
from meshwright.planner.explain import NAMES
from meshwright.planner.rounds import JOIN
from meshwright.schedules.spec import known_schedules
from meshwright.spec.axes import known_axes
from tests.house import source

FOLDERS = ("spec/axes", "schedules")
"""Where axes and schedules say what they are called."""
REASONS = {
    "planner/cost/axis_columns.py WIRE_ORDER": "symbols of the formulas, in the order in which they nest",
    "planner/space.py CORE": "columns of `LayoutBatch`, symbols of the formulas",
    "planner/explain.py NAMES": "words for the parts of a price, which are all there",
    "planner/emit.py TORCHTITAN_SCHEDULES": "words of another framework for those of our schedules that it has",
    "planner/emit.py MEGATRON_SCHEDULES": "those of our schedules that another framework has",
    "strategy/hybrid.py __init__": "keywords of the public interface, a parameter for each axis",
}
"""Literal lists that are there for a reason, by file and what holds them."""


def names() -> tuple[frozenset[str], frozenset[str]]:
    return frozenset(known_axes()), frozenset(known_schedules())


def literals(node: ast.AST) -> list[str]:
    """The texts that stand in a literal tuple, list, set or dict."""
    items: list[ast.expr | None] = []
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        items = [*node.elts]
    elif isinstance(node, ast.Dict):
        items = [*node.keys, *node.values]
    return [item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)]


def held(node: ast.AST, holder: str = "") -> Iterator[tuple[ast.AST, str]]:
    """Yields every node with the constant or function that holds it."""
    for child in ast.iter_child_nodes(node):
        name = holder
        if isinstance(child, ast.FunctionDef):
            name = child.name
        elif isinstance(child, ast.Assign | ast.AnnAssign) and not holder:
            name = ast.unparse(child.targets[0] if isinstance(child, ast.Assign) else child.target)
        yield child, name
        yield from held(child, name)


def lists() -> Iterator[str]:
    """Literal lists of two or more axes, or of two or more schedules."""
    for path, module in source.modules().items():
        inside = path.relative_to(source.PACKAGE).as_posix()
        if inside.startswith(FOLDERS):
            continue
        for node, holder in held(module):
            found = literals(node)
            if any(len(known.intersection(found)) > 1 for known in names()):
                yield f"{inside} {holder}"


def degrees() -> Iterator[str]:
    """Degrees that are asked for by the name of an axis, where its mechanics or facts say which it is."""
    for path, module in source.modules().items():
        inside = path.relative_to(source.PACKAGE).as_posix()
        if inside.startswith((*FOLDERS, "parallel")):  # the mechanics of an axis know its name
            continue
        for node in source.nodes(module):
            match node:
                case ast.Call(func=ast.Attribute(attr="degree"), args=[ast.Constant(), *_]):
                    yield source.place(path, node)


def test_nothing_lists_axes_or_schedules_by_hand() -> None:
    assert sorted(set(lists()) - set(REASONS)) == []
    assert sorted(set(REASONS) - set(lists())) == []  # a reason for nothing goes
    assert list(degrees()) == []


def test_words_for_parts_of_a_price_are_all_there() -> None:
    assert set(NAMES) == {*PARTS, TRAFFIC_WORK, JOIN}


LISTED = """
AXES = ("pp", "x", "tp")
def order(layout):
    return {"gpipe": 1, "zbv": 2}, ["pp", "zbv"], layout.degree("cp")
"""


def test_the_rule_sees_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    path = source.PACKAGE / "made_up.py"
    monkeypatch.setattr(
        source, "modules", lambda: {path: ast.parse(LISTED), Path(source.PACKAGE, "schedules/x.py"): ast.parse(LISTED)}
    )
    assert list(lists()) == ["made_up.py AXES", "made_up.py order"]
    assert list(degrees()) == ["meshwright/made_up.py:4"]
