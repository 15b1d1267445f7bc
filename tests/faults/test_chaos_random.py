"""Random faults in a real run: they strike where the seed says, and its curve is that of an undisturbed one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runs import Running, curve, events, last_step, wait_until, words, write_corpus

KINDS = ("kill", "nan", "pause", "exit")
SEED = "5"
DRAWN = [(42, "pause", 0), (87, "nan", 0), (128, "kill", 1)]
"""Written down before any run: the same for the same seed, interval, kinds and ranks."""


@pytest.mark.long
def test_a_run_survives_random_faults_on_the_same_curve(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.txt")
    more = ("--train.steps", "170", "--checkpoint.every", "100", "--recovery.attempts", "5")
    undisturbed = Running(words(tmp_path, "still", *more, layout="replicate=2", devices=2), tmp_path / "still.log")
    assert undisturbed.wait() == 0, undisturbed.text()
    # A slow rank leaves time to ask before the first of them, and changes no figure.
    slow = ("--recovery.faults", "slow:rank=0,step=1,seconds=0.1,generation=0")
    running = Running(words(tmp_path, "run", *more, *slow, layout="replicate=2", devices=2), tmp_path / "run.log")
    wait_until(lambda: last_step(tmp_path / "run") > 2)
    words_of_chaos = ["chaos", str(tmp_path / "run"), "--random", "--every", "40steps", "--seed", SEED, "--count", "3"]
    words_of_chaos += ["--kinds", ",".join(KINDS), "--json"]
    chaos = Running([*words_of_chaos, "--wait", "120"], tmp_path / "answers")
    assert chaos.wait() == 0, chaos.text()
    assert running.wait() == 0, running.text()
    running.no_orphans()
    text = chaos.text()
    answers = json.loads(text[text.index("[\n") :])
    assert [(row["step"], row["kind"], row["target"]) for row in answers] == DRAWN
    # The ranks themselves marked where a fault struck.
    marks = {path.name for path in (tmp_path / "run" / "chaos").iterdir() if path.suffix != ".ask"}
    names = {"pause": "stop"}
    expected = {f"{names.get(kind, kind)}-rank={rank}-step={step}" for step, kind, rank in DRAWN}
    assert {mark for mark in marks if not mark.startswith("slow")} == expected
    assert [row["answer"] for row in answers] == ["recovered", "step_repeated", "recovered"], answers
    assert len(events(tmp_path / "run", "recovered")) == 2
    assert curve(tmp_path / "run") == curve(tmp_path / "still")
