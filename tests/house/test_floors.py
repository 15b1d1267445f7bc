"""A module imports only lower floors, and the contract that says so catches one that doesn't."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source import PACKAGE, ROOT


def _lint(folder: Path) -> subprocess.CompletedProcess[str]:
    tool = Path(sys.executable).with_name("lint-imports")
    return subprocess.run(
        [str(tool), "--no-cache", "--config", str(folder / "pyproject.toml")],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=folder,
    )


def test_floors_are_kept():
    done = _lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def copy(tmp_path) -> Path:
    """The package's folders with empty modules, under the same contract."""
    for path in PACKAGE.rglob("__init__.py"):
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("")
    for name in ("__main__", "config", "events", "units", "errors"):
        (tmp_path / "meshwright" / f"{name}.py").write_text("")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("parallel/gradient_reducer.py", "import meshwright.train"),
        ("planner/search.py", "import meshwright.models"),
        ("train/trainer.py", "def f():\n    import meshwright.proof"),
        ("events.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import meshwright.config"),
        ("attic/__init__.py", ""),
    ],
    ids=["upward", "sideways", "hidden", "for types", "a room without a floor"],
)
def test_the_contract_sees(copy, module, line):
    path = copy / "meshwright" / module
    path.parent.mkdir(exist_ok=True)
    path.write_text(line)
    done = _lint(copy)
    assert done.returncode != 0, done.stdout


def test_the_contract_takes_a_house_in_order(copy):
    (copy / "meshwright" / "train" / "trainer.py").write_text("import meshwright.parallel\nimport meshwright.errors")
    done = _lint(copy)
    assert done.returncode == 0, done.stdout
