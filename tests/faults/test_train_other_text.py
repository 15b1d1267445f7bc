"""A run whose text changed meanwhile: refused where it has a checkpoint, else begun anew with the new tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.runs import call, last_step, words, write_corpus


@pytest.mark.slow
def test_a_text_that_changed_is_named_before_a_rank_starts(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.txt")
    text = corpus.read_text()
    assert call(words(tmp_path, "run", "--train.steps", "3"), tmp_path / "log")[0] == 0
    run, more = tmp_path / "run", ("--train.steps", "6")
    corpus.write_text(text.replace("cat", "dogs"))
    status, said = call(words(tmp_path, "run", *more), tmp_path / "log")
    assert status == 2 and "rank lost" not in said
    assert "the tokenizer and the training text and the held-out text changed since" in " ".join(said.split())
    assert "meshwright export" in said and last_step(run) == 3
    corpus.write_text(text)
    assert call(words(tmp_path, "run", *more), tmp_path / "log")[0] == 0
    assert last_step(run) == 6


@pytest.mark.slow
def test_a_run_that_begins_anew_on_another_text_keeps_its_tokenizer(tmp_path: Path) -> None:
    corpus, run = write_corpus(tmp_path / "corpus.txt"), tmp_path / "run"
    assert call(words(tmp_path, "run", "--train.steps", "3"), tmp_path / "log")[0] == 0
    # As if it had died before its first checkpoint.
    shutil.rmtree(run / "checkpoints")
    corpus.write_text(corpus.read_text().replace("cat", "QQQ"))
    assert call(words(tmp_path, "run", "--train.steps", "3"), tmp_path / "log")[0] == 0
    vocabulary = json.loads((run / "tokenizer" / "tokenizer.json").read_text())["model"]["vocab"]
    assert "Q" in vocabulary
    (prepared,) = [path for path in (tmp_path / "prepared").glob("*/tokenizer.json") if "Q" in path.read_text()]
    fingerprint = json.loads((prepared.parent / "manifest.json").read_text())["fingerprint"]
    assert json.loads((run / "text.json").read_text())["fingerprint"] == fingerprint
