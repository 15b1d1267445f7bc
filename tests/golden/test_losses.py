"""Losses of small runs as they were once: a change of numbers is a change that somebody must want.

``python -m tests.golden.test_losses`` writes them anew.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from tests.runs import call, rows, words, write_corpus

GOLDEN = Path(__file__).with_name("losses.json")
RUNS = {
    # Measuring the noise scale changes no number of training.
    "gpt2": ("--model", "gpt2", "--train.noise-scale", "2"),
    "llama": ("--model", "llama", "--schedule.shape", "wsd"),
    "qwen3-accumulated": ("--model", "qwen3", "--layout", "replicate=1,microbatches=2,recompute=full"),
}


def losses(name: str, root: Path) -> list[float]:
    """Trains one of `RUNS` for some steps and returns its losses."""
    write_corpus(root / "corpus.txt")
    status, text = call(words(root, name, "--train.steps", "8", "--checkpoint.every", "0", *RUNS[name]), root / "log")
    assert status == 0, text
    return [row["loss"] for row in rows(root / name)]


@pytest.mark.parametrize("name", RUNS)
def test_losses_are_what_they_were(name: str, tmp_path: Path) -> None:
    # Kernels of other torch versions and processors round otherwise.
    assert losses(name, tmp_path) == pytest.approx(json.loads(GOLDEN.read_text())[name], rel=1e-4)
    measured = [row["step"] for row in rows(tmp_path / name) if "noise/variance" in row["scalars"]]
    assert measured == ([2, 4, 6, 8] if name == "gpt2" else [])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for key in RUNS:
            (Path(folder) / key).mkdir()
            found[key] = losses(key, Path(folder) / key)
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
