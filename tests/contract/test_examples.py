"""Every example runs as its docstring says, and none is longer than 80 lines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {"train_from_python.py": ["8"], "hooks.py": []}


def test_all_are_short_and_known() -> None:
    found = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "examples").glob("*.py")}
    assert set(found) == {*SCRIPTS, "my_model.py"}
    assert max(found.values()) <= 80


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_runs(name: str, tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "examples" / name), *SCRIPTS[name]]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=58)
    assert done.returncode == 0, done.stderr
    assert "steps" in done.stdout or "stopped after step" in done.stdout


@pytest.mark.slow
def test_own_model_is_proven(tmp_path: Path) -> None:
    words = ["-m", "meshwright", "verify", "--model", "examples.my_model:build", "--layout", "shard=2", "--steps", "1"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=58)
    assert done.returncode == 0, done.stderr
    assert "PASS" in done.stderr
