"""The files that the docs name are there."""

from __future__ import annotations

import re

from tests.house.source import PACKAGE, ROOT

FILE = re.compile(r"`((?:[\w*]+/)*[\w*]+\.py)`")
"""A path of Python in backticks; it may have stars."""


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
    pages = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    assert {page.name: names for page in pages if (names := missing(page.read_text(encoding="utf-8")))} == {}


def test_a_file_that_is_gone_is_seen() -> None:
    text = "read `spec/layout.py`, `build.py` and `parallel/*.py`, not `axes/tp.py` or `chance.py`"
    assert missing(text) == ["axes/tp.py", "chance.py"]
