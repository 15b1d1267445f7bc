"""What the docs name is there: files, definitions, events, pages; what they compute is computed again."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from meshwright.spec.groups import coordinates, loss_axes, members, reader, state_axes
from meshwright.spec.layout import Layout
from tests.house.source import PACKAGE, ROOT, modules

PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
"""Everything that people read first."""

FILE = re.compile(r"`((?:[\w*]+/)*[\w*]+\.py)`")
"""A path of Python in backticks; it may have stars."""
DEFINITION = re.compile(r"((?:\w+/)*\w+\.py): ([A-Za-z_][\w.]*)")
"""``parallel/program.py: Program.forward_backward``, in a diagram or in backticks."""
DIAGRAM = re.compile(r"```mermaid\n(.*?)```", re.DOTALL)
_NODE = r'\w+(?:\["[^"]+"\]|\(\["[^"]+"\]\)|\[\("[^"]+"\)\])?'
_ARROW = r'(?:-->|---|<-- "[^"]+" -->|-- "[^"]+" -->|-\. "[^"]+" \.->)'
STATEMENT = re.compile(rf"(?:flowchart (?:LR|TB)|end|subgraph \w+ \[[\w ]+\]|{_NODE}(?: {_ARROW} {_NODE})*)")
"""A line of a diagram: the part of mermaid's language that the pages use, which mermaid is known to read."""


def missing(text: str) -> list[str]:
    """Names of files that neither the repository nor the package nor its tests have."""
    found = []
    for name in sorted(set(FILE.findall(text))):
        roots = [ROOT, PACKAGE, *(ROOT / folder for folder in ("tests", "benchmarks", "examples"))]
        exact = any(next(iter(root.glob(name)), None) for root in roots)
        # A bare name may stand beside the folder that a sentence speaks of.
        if not exact and ("/" in name or not any(next(iter(root.rglob(name)), None) for root in roots[1:])):
            found.append(name)
    return found


def test_files_that_the_docs_name_are_there() -> None:
    assert {page.name: names for page in PAGES if (names := missing(page.read_text(encoding="utf-8")))} == {}


def test_a_file_that_is_gone_is_seen() -> None:
    text = "read `spec/layout.py`, `build.py` and `parallel/*.py`, not `axes/tp.py` or `chance.py`"
    assert missing(text) == ["axes/tp.py", "chance.py"]


def definitions(path: Path) -> Iterator[str]:
    """Names that a module defines: functions, classes, ``Class.method``, constants."""
    for node in modules()[path].body:
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef))
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        if isinstance(node, ast.Assign):
            yield from (ast.unparse(target) for target in node.targets)


def test_definitions_that_the_docs_name_are_there() -> None:
    named = {(page.name, *match) for page in PAGES for match in DEFINITION.findall(page.read_text(encoding="utf-8"))}
    assert len(named) > 40
    gone = [item for item in sorted(named) if item[2] not in definitions(PACKAGE / item[1])]
    assert gone == []


def test_events_that_a_diagram_names_are_recorded() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in modules())
    named = {kind for page in PAGES for kind in re.findall(r"event: (\w+)", page.read_text(encoding="utf-8"))}
    assert len(named) >= 8
    assert [kind for kind in sorted(named) if f'"{kind}"' not in text] == []


def test_diagrams_are_of_the_form_that_mermaid_reads() -> None:
    for page in PAGES:
        for diagram in DIAGRAM.findall(page.read_text(encoding="utf-8")):
            wrong = [line for line in diagram.splitlines() if not STATEMENT.fullmatch(line.strip())]
            assert wrong == [], page.name


def groups_table(text: str) -> str:
    """The rows of docs/parallelism.md: what follows for each rank of a layout, by the functions of `spec.groups`."""
    layout = Layout.parse(text)
    degrees = layout.shape()
    columns = ("rank", "index along each axis", "reads rows", "sums gradients with", "shares ZeRO state with")
    lines = ["| " + " | ".join((*columns, "is split by `tp` with")) + " |", "|---" * 6 + "|"]
    state = state_axes(layout.zero)
    for rank in range(layout.world):
        index, count = reader(rank, degrees)
        place = ", ".join(f"{name} {at}" for name, at in coordinates(rank, degrees).items() if degrees[name] > 1)
        groups = [" ".join(map(str, members(rank, names, degrees))) for names in (loss_axes(), state, ("tp",))]
        lines.append("| " + " | ".join((str(rank), place, f"{index} of {count}", *groups)) + " |")
    return "\n".join(lines)


def test_the_groups_of_the_docs_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "parallelism.md").read_text(encoding="utf-8")
    assert groups_table("replicate=2,shard=2,tp=2,zero=1") in page


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f": {page.name}\n" not in navigation] == []


def test_the_readme_fits_two_screens() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 110
    assert max(map(len, lines)) <= 120
