"""Every example runs as its docstring says, and none is longer than 80 lines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import call
from tests.tiers import cases

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {
    "quickstart.py": ([], "after 40 steps"),
    "train_from_python.py": (["8"], "steps"),
    "hooks.py": ([], "stopped after step"),
    "data_and_tensor.py": ([], "4 steps equal to one device"),
    "three_dims.py": ([], "an epoch equal to one device"),
    "four_dims_with_experts.py": ([], "losses of one device"),
    "conv_pipeline.py": ([], "epochs equal to one device"),
    "gpt3_on_fake_ranks.py": (["replicate=8,shard=128,zero=3", "1023"], "5454091008 bytes of 174.6 billion weights"),
    "grpo.py": ([], "shard=2,zero=3: mean reward 0.4250 in the first round, 0.9"),
    "dpo.py": ([], "shard=2,zero=3: reward margin 0.0000 before, 2."),
    "sketch_hybrid.py": ([], "the loop equals one device"),
    "sketch_four_dims.py": ([], "losses of one device"),
    "sketch_pipeline.py": ([], "epochs equal to one device"),
    "sketch_layers.py": ([], "a linear layer equals the whole one"),
    "tensor_parallel_layers.py": ([], "equal to one device; 23488 of 91648 weights"),
}
"""Arguments of each script, and what it prints."""


def test_all_are_short_and_known() -> None:
    found = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "examples").glob("*.py")}
    assert set(found) == {*SCRIPTS, "my_model.py", "my_loop.py", "sketch_ranks.py"}
    assert max(found.values()) <= 80


def test_the_readme_shows_the_first_of_them() -> None:
    program = (ROOT / "examples" / "quickstart.py").read_text().partition('"""\n\n')[2]
    assert program.startswith("import meshwright\n") and len(program.splitlines()) <= 15
    assert f"```python\n{program}```" in (ROOT / "README.md").read_text()


def test_all_import_the_public_api_alone() -> None:
    for path in (ROOT / "examples").glob("*.py"):
        rooms = re.findall(r"(?:from|import) (meshwright\.[\w.]+)", path.read_text())
        assert rooms == [], path.name


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", cases(SCRIPTS, ("quickstart.py",), extended=("grpo.py", "sketch_hybrid.py", "sketch_pipeline.py"))
)
def test_script_runs(name: str, tmp_path: Path) -> None:
    arguments, result = SCRIPTS[name]
    words = [sys.executable, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert result in done.stdout


@pytest.mark.extended("test_own_loop_is_proven")
@pytest.mark.slow
def test_own_model_is_proven(tmp_path: Path) -> None:
    words = ["-m", "meshwright", "verify", "--model", "examples.my_model:build", "--layout", "shard=2", "--steps", "1"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert "PASS" in done.stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # a sequence that ends in a view, of which a user is warned
def test_own_loop_is_proven(tmp_path: Path) -> None:
    words = ["verify", "--loop", "examples/my_loop.py:loop", "--layout", "replicate=2", "shard=2"]
    status, text = call(words, tmp_path / "verify.log", before=lambda: os.chdir(ROOT))
    assert status == 0, text
    assert text.count("pass ") == 2
