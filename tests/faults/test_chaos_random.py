"""Random faults in a real run: it survives them, and its curve is that of an undisturbed one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runs import Running, curve, last_step, wait_until, words, write_corpus

KINDS = ("kill", "nan", "slow", "pause")


@pytest.mark.long
def test_a_run_survives_random_faults_on_the_same_curve(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.txt")
    more = ("--train.steps", "2000", "--checkpoint.every", "300", "--recovery.attempts", "5")
    undisturbed = Running(words(tmp_path, "still", *more, layout="replicate=2", devices=2), tmp_path / "still.log")
    assert undisturbed.wait() == 0, undisturbed.text()
    # A slow rank leaves time for three faults before the end of the run, and changes no figure.
    slow = ("--recovery.faults", "slow:rank=0,step=1,seconds=0.02")
    running = Running(words(tmp_path, "run", *more, *slow, layout="replicate=2", devices=2), tmp_path / "run.log")
    wait_until(lambda: last_step(tmp_path / "run") > 2)
    run, draws = str(tmp_path / "run"), ("--random", "--every", "0.5s", "--seed", "8", "--count", "3")
    drawn = ("--kinds", ",".join(KINDS), "--json")
    listing = Running(["chaos", run, *draws, *drawn, "--dry-run"], tmp_path / "listed.json")
    assert listing.wait() == 0, listing.text()
    chaos = Running(["chaos", run, *draws, *drawn, "--wait", "120"], tmp_path / "answers")
    assert chaos.wait() == 0, chaos.text()
    assert running.wait() == 0, running.text()
    running.no_orphans()
    text = chaos.text()
    answers = json.loads(text[text.index("[\n") :])
    listed = json.loads(listing.text())
    assert [(row["at_s"], row["kind"], row["target"]) for row in answers] == [tuple(row.values()) for row in listed]
    assert len(answers) == 3 and {row["kind"] for row in answers} == {"pause", "kill", "nan"}
    for row in answers:
        expected = {"kill": ("recovered",), "nan": ("step_repeated",), "slow": ("none",), "pause": ("none",)}
        assert row["answer"] in expected[row["kind"]], answers
    assert curve(tmp_path / "run") == curve(tmp_path / "still")
