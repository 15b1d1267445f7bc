"""A run without a layout takes the planner's, tries some when asked to, and ends with planned beside measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.launch.machine import calibration_folder
from meshwright.planner.run_history import NAME
from meshwright.spec.layout import Layout
from tests.runs import call, curve, words, write_corpus

pytestmark = pytest.mark.slow


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_corpus(tmp_path / "corpus.txt")
    return tmp_path


def test_the_planner_chooses_and_the_run_says_how_far_off_it_was(root: Path) -> None:
    argv = words(root, "auto", "--train.steps", "6", layout="auto", devices=2)
    status, text = call(argv, root / "log")
    assert status == 0, text
    plan = json.loads((root / "auto" / "plan.json").read_text())
    layout = Layout.from_json(plan["layout"])
    assert layout.world == 2 and "of" in plan["reason"] and plan["rejected"]
    assert plan["prediction"]["step_s"] > 0 and {"forward", "backward"} & set(plan["prediction"]["parts"])
    assert "a step took" in text and "planned" in text
    assert sorted(curve(root / "auto")) == list(range(1, 7))
    (row,) = (json.loads(line) for line in (calibration_folder() / NAME).read_text().splitlines())
    assert row["priced_s"] == pytest.approx(plan["prediction"]["step_s"]) and row["measured_s"] > 0
    assert row["flops"] == plan["prediction"]["flops"] > 0
    # What its rank waited for traffic is told apart, but for stages that wait for each other.
    assert ("waits_s" in row) == (layout.degree("pp") == 1)
    assert 0 <= row.get("waits_s", 0.0) < row["measured_s"] and row.get("priced_waits_s", 0.0) < row["priced_s"]


def test_trials_keep_the_fastest(root: Path) -> None:
    argv = words(root, "tried", "--train.steps", "4", "--trials", "2", layout="auto", devices=2)
    status, text = call(argv, root / "log")
    assert status == 0, text
    rows = json.loads((root / "tried" / "trials.json").read_text())
    ran = [row for row in rows if row.get("measured_s")]
    assert len(rows) == 2 and ran and all(row["planned_s"] > 0 for row in rows)
    plan = json.loads((root / "tried" / "plan.json").read_text())
    assert plan["layout"]["text"] == min(ran, key=lambda row: row["measured_s"])["layout"]
    assert plan["reason"].startswith("fastest of 2 that were tried")
    assert sorted(curve(root / "tried")) == [1, 2, 3, 4]


def test_trials_need_a_free_choice(root: Path) -> None:
    status, text = call(words(root, "named", "--trials", "2", layout="replicate=1"), root / "log")
    assert status == 2 and "trials = 2" in text
