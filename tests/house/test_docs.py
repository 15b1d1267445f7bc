"""What the docs name is there: files, definitions, events, pages; what they compute is computed again."""

from __future__ import annotations

import ast
import dataclasses
import re
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import meshwright
from meshwright.cli.arguments import SHORT
from meshwright.cli.main import VERBS
from meshwright.config import Config
from meshwright.spec.groups import coordinates, loss_axes, members, reader, state_axes
from meshwright.spec.layout import Layout
from tests.house.source import PACKAGE, ROOT

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


@cache
def package_text() -> str:
    """The package's source, all files in one."""
    return "".join(path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py")))


@cache
def definitions(path: Path) -> frozenset[str]:
    """Names that a module defines: functions, classes, ``Class.method``, constants."""
    return frozenset(_defined(ast.parse(path.read_text(encoding="utf-8")))) if path.exists() else frozenset()


def _defined(module: ast.Module) -> Iterator[str]:
    for node in module.body:
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
    text = package_text()
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


PROGRAM = re.compile(r"python (-m (?!meshwright |pytest)[\w.]+|(?!-)[\w/]+\.py)((?: (?:\\\n *)?[^`\n|#]*)?)")
"""A command of this repository: its module or file, and the words that follow."""
COMMAND = re.compile(r"(?<![\w.])meshwright ([a-z-]+)((?:(?!\n\n|```|`|  +#).)*?)(?=[`#\n]|  +#|$)")
"""``meshwright VERB ...`` up to the end of its line, of its code, or a comment."""
FLAG = re.compile(r"(?<=\s)--([a-z][\w.-]*)")


def source_of(program: str) -> str:
    """The source behind ``-m tests.mutants`` or ``benchmarks/claims.py``; empty when there is none."""
    path = ROOT / program.removeprefix("-m ").replace(".", "/") if program.startswith("-m ") else ROOT / program
    files = [path] if path.suffix == ".py" else [path.with_suffix(".py"), *path.glob("*.py")]
    return "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())


def test_programs_that_the_docs_name_take_the_options_that_they_name() -> None:
    pages = [*PAGES, ROOT / "benchmarks" / "README.md"]
    found = [match for page in pages for match in PROGRAM.findall(page.read_text(encoding="utf-8"))]
    assert len(found) > 15
    assert sorted({program for program, _ in found if not source_of(program)}) == []
    wrong = {f"{program} --{flag}" for program, words in found for flag in FLAG.findall(words)}
    unknown = [item for item in wrong if not _takes(*item.rsplit(" --", 1))]
    assert sorted(unknown) == []


def _takes(program: str, flag: str) -> bool:
    source = source_of(program)
    return f"--{flag}" in source or re.search(rf"\b{flag.replace('-', '_')}: ", source) is not None


def flags_of(kind: type[Config], prefix: str = "") -> Iterator[str]:
    """The flags of a config and of those in it, without dashes."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        name = prefix + field.name.replace("_", "-")
        yield from (name, f"{prefix}no-{field.name.replace('_', '-')}")
        if isinstance(hints[field.name], type) and issubclass(hints[field.name], Config):
            yield from flags_of(hints[field.name], f"{name}.")


def test_commands_that_the_docs_name_are_there() -> None:
    kinds = [getattr(meshwright, name) for name in meshwright.__all__ if name.endswith("Config")]
    known = {flag for kind in kinds for flag in flags_of(kind)} | {flag.removeprefix("--") for flag in SHORT}
    spelled = package_text()
    for page in PAGES:
        for verb, words in COMMAND.findall(page.read_text(encoding="utf-8").replace("\\\n", " ")):
            if not words.strip().startswith(("-", "RUN", "recipe", "...")) and verb not in VERBS:
                continue  # a sentence about meshwright
            assert verb in VERBS, (page.name, verb)
            for flag in FLAG.findall(f" {words}"):
                option = flag.rstrip(".").replace("_", "-")
                if option in known or option.startswith("model.overrides.") or f"--{option}" in spelled:
                    continue
                # Generate and export have settings of their own, in the file of the verb.
                own = (PACKAGE / "cli" / f"{verb}.py").read_text(encoding="utf-8")
                assert f"    {option.replace('-', '_')}: " in own, (page.name, verb, flag)
