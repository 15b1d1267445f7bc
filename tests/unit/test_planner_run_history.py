"""A machine's earlier runs scale its prices, once there are enough of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.run_history import learn, record
from meshwright.spec.layout import Layout


def test_runs_teach_a_factor(tmp_path: Path) -> None:
    path = tmp_path / "a" / "runs.jsonl"
    assert learn(path, "here").runs == 0
    for measured in (1.0, 1.2, 1.4):
        record(path, "here", {"layout": "replicate=1", "priced_s": 1.0, "measured_s": measured})
        record(path, "there", {"layout": "replicate=1", "priced_s": 1.0, "measured_s": 3.0})
    record(path, "here", {"priced_s": 1.0, "measured_s": 100.0})
    with path.open("a") as file:
        file.write("torn {\n")
    lesson = learn(path, "here")
    assert lesson.runs == 3 and abs(lesson.factor - 1.2) < 1e-9 and "1.20 times" in lesson.note
    assert learn(path, "elsewhere").factor == 1.0 and not learn(path, "elsewhere").note


def test_layouts_are_scaled_by_runs_with_their_axes(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    taken = {
        "replicate=2": (1.0, 1.1, 1.2, 1.3),
        "shard=2,zero=3": (1.5, 1.5, 1.5),
        "shard=2,zero=2": (1.2, 1.2, 1.2),
        "tp=2": (2.0, 2.0, 2.0),
        "pp=2": (9.0, 7.9),
    }
    for layout, times in taken.items():
        for measured in times:
            record(path, "here", {"layout": layout, "priced_s": 1.0, "measured_s": measured})
    lesson = learn(path, "here")
    assert lesson.of(Layout.parse("replicate=8")) == pytest.approx(1.2), "the newest three"
    assert lesson.of(Layout.parse("shard=4,zero=3")) == 1.5 and lesson.of(Layout.parse("shard=4,zero=1")) == 1.2
    assert lesson.of(Layout.parse("shard=2,tp=2")) == 2.0, "the slower of the two"
    assert lesson.of(Layout.parse("cp=2")) == lesson.factor, "axes that never ran here"
    assert lesson.of(Layout.parse("pp=4")) == lesson.factor, "nor often enough"


def test_one_run_beside_the_pace_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    record(path, "here", {"layout": "tp=2", "priced_s": 1.0, "measured_s": 1.3})
    assert not learn(path, "here").runs
    record(path, "here", {"layout": "shard=2,zero=3", "priced_s": 1.0, "measured_s": 1.1, "paced": True})
    lesson = learn(path, "here")
    assert lesson.runs == 2 and lesson.of(Layout.parse("shard=2,zero=3")) == pytest.approx(1.1)
    assert lesson.of(Layout.parse("tp=2")) == lesson.factor, "that was at whatever speed the machine had"


@pytest.mark.parametrize("more", ["compile=true", "offload=optimizer", "precision=float64"])
def test_what_other_figures_price_teaches_nothing(tmp_path: Path, more: str) -> None:
    path = tmp_path / "runs.jsonl"
    for _ in range(3):
        record(path, "here", {"layout": f"replicate=2,{more}", "priced_s": 1.0, "measured_s": 3.0})
    assert not learn(path, "here").runs
