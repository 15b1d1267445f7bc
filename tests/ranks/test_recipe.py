"""``meshwright run``: all stages of a recipe, left out when done, and sweeps whose runs fail one by one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

RECIPE = """
[model]
name = "gpt2"
layers = 1
width = 16
heads = 2
[data]
paths = ["text.txt"]
tokenizer = "chars"
split = "tail"
validation_share = 0.2
sequence = 16
[train]
steps = 3
batch = 4
sample_tokens = 0
prove = false
[evaluation]
every = 0
[monitor]
report = false
tensorboard = false
display = "none"
"""


def run(folder: Path, *words: str) -> tuple[int, Any, str]:
    """Returns exit status, the JSON result and standard error of ``meshwright run``."""
    command = [sys.executable, "-m", "meshwright", "run", "tiny.toml", "--layout", "replicate=2", "--json", *words]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    return ended.returncode, json.loads(ended.stdout or "null"), ended.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with a recipe and its text."""
    (tmp_path / "tiny.toml").write_text(RECIPE)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    return tmp_path


@pytest.mark.long
def test_stages_are_done_once(folder: Path) -> None:
    """A second command does nothing, one with more steps trains these and exports again."""
    status, first, errors = run(folder)
    assert status == 0, errors
    names = [stage["name"] for stage in first["stages"]]
    assert names == ["prepare", "plan", "train", "evaluate", "export"]
    assert first["finished"] and not any(stage["was_done"] for stage in first["stages"])
    run_dir = folder / "runs/tiny"
    weights, metrics = run_dir / "export/model.safetensors", run_dir / "metrics.jsonl"
    written, lines = weights.stat().st_mtime_ns, metrics.read_text()
    with safe_open(weights, "pt") as file:
        exported = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    status, second, errors = run(folder)
    assert status == 0, errors
    assert all(stage["was_done"] for stage in second["stages"])
    assert "3 steps are done, and train.steps = 3 asks for no more" in errors
    assert second["validation_loss"] == first["validation_loss"]
    assert (weights.stat().st_mtime_ns, metrics.read_text()) == (written, lines)
    status, third, errors = run(folder, "--train.steps", "5")
    assert status == 0, errors
    assert [stage["was_done"] for stage in third["stages"]] == [True, True, False, False, False]
    assert len(metrics.read_text().splitlines()) == 5
    with safe_open(weights, "pt") as file:
        assert any(bool((file.get_tensor(name) != before).any()) for name, before in exported.items())


@pytest.mark.long
def test_a_sweep_goes_on_past_a_run_that_fails(folder: Path) -> None:
    """Three rows over two copies are refused in their run alone; the table and the status tell it."""
    status, rows, errors = run(folder, "--no-export", "--sweep", "train.batch=3,4", "--run", "sweep")
    assert status == 1, errors
    assert [(row["settings"], row["state"]) for row in rows] == [
        ({"train.batch": "4"}, "finished"),
        ({"train.batch": "3"}, "failed"),
    ]
    assert "3" in rows[1]["message"] and rows[0]["validation_loss"] is not None
    assert json.loads((folder / "sweep/sweep.json").read_text()) == rows
    # A wrong key is known before anything trains.
    status, rows, errors = run(folder, "--sweep", "optimizer.rl=1,2", "--run", "other")
    assert (status, rows) == (2, None) and "optimizer.lr" in errors and not (folder / "other").exists()
