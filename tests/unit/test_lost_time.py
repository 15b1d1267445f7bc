"""Where a broken run's time went: made-up files whose losses are known."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def lost_time(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    return importlib.import_module("lost_time")


def row(step: int, step_s: float = 0.1, layout: str = "shard=2", snapshot: float = 0.0) -> dict[str, Any]:
    return {"step": step, "step_s": step_s, "layout": layout, "parts": {"snapshot": snapshot} if snapshot else {}}


def write(run: Path, rows: list[dict], events: list[dict], marks: dict[str, float]) -> None:
    (run / "chaos").mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    (run / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    for name, at in marks.items():
        for path in (run / "chaos" / name, run / "chaos" / f"{name}.ask"):
            path.touch()
            os.utime(path, (at, at))


def lost(at: float, step: int, phase: str, seen: float) -> list[dict[str, Any]]:
    return [
        {"kind": "rank_lost", "time": at, "step": step, "phase": phase},
        {"kind": "fenced", "time": at, "seconds": at - seen},
    ]


def test_each_second_has_its_cause(tmp_path: Path, lost_time: ModuleType) -> None:
    # 20 steps to 2.0; step 21 dies at 2.05 after two steps since the state of 18; seen at 2.55, going on from 3.05.
    rows = [row(step) for step in range(1, 19)] + [row(19, 0.3)] + [row(step) for step in range(20, 30)]
    rows[5] = row(6, 0.15, snapshot=0.05)
    # Left out at step 29: on fewer ranks until 39, then growing, 0.4 s.
    rows += [row(step, 0.2 if step > 30 else 0.25, "shard=1") for step in range(30, 40)]
    rows += [row(step) for step in range(40, 61)]
    events = [
        *lost(2.75, 21, "backward", 2.65),
        {"kind": "restored", "time": 3.2, "step": 18},
        {"kind": "recovered", "time": 3.45, "step": 19},
        *lost(5.0, 29, "record", 4.55),
        {"kind": "restored", "time": 5.2, "step": 29},
        {"kind": "recovered", "time": 5.45, "step": 30},
        {"kind": "growing", "time": 7.25, "step": 39},
        {"kind": "restored", "time": 7.4, "step": 39},
        {"kind": "recovered", "time": 7.75, "step": 40},
    ]
    write(tmp_path, rows, events, {"kill-rank=0-step=21": 2.15, "hang-rank=1-step=29": 4.45})
    found = lost_time.account(tmp_path, 0.0, 9.75, 0, 60)
    assert found.step_s == pytest.approx(0.1) and found.goodput == pytest.approx(6.0 / 9.75)
    wanted = {
        "detect": 0.5 + 0.1,
        "start": 3.45 - 0.3 - 2.65 + 5.45 - 0.25 - 4.55,
        "first step": 0.2 + 0.15,
        "redo": 0.25,
        "grow": 0.4,
        "fewer ranks": 9 * 0.1,
        "copies": 0.05,
        "slower steps": 0.05,
    }
    assert {name: found.lost_s[name] for name in wanted} == pytest.approx(wanted)
    assert sum(found.lost_s.values()) == pytest.approx(9.75 - 6.0) and abs(found.lost_s["between"]) < 0.06
    assert sorted(found.by_kind) == ["grow", "hang", "kill"] and found.by_kind["kill"] == [pytest.approx(1.25)]


def test_faster_steps_on_fewer_ranks_earn_nothing(tmp_path: Path, lost_time: ModuleType) -> None:
    rows = [row(step) for step in range(1, 11)] + [row(step, 0.04, "shard=1") for step in range(11, 21)]
    write(tmp_path, rows, [], {})
    found = lost_time.account(tmp_path, 0.0, 2.0, 0, 20)
    assert found.goodput == pytest.approx(1.4 / 2.0) and found.lost_s["between"] == pytest.approx(0.6)
    assert not found.lost_s["fewer ranks"]


def test_a_first_step_that_was_lost_again_is_a_step_done_again(tmp_path: Path, lost_time: ModuleType) -> None:
    events = [
        *lost(1.0, 11, "data", 1.0),
        *lost(1.2, 0, "start", 1.2),
        {"kind": "restored", "time": 1.3, "step": 10},
        {"kind": "recovered", "time": 1.5, "step": 11},
        *lost(1.6, 12, "data", 1.6),
        {"kind": "restored", "time": 1.8, "step": 10},
        {"kind": "recovered", "time": 2.0, "step": 11},
        *lost(3.0, 20, "data", 3.0),
    ]
    write(tmp_path, [row(step) for step in range(1, 20)], events, {})
    first, second, open_ended = lost_time.find_breaks(events, [])
    assert (first.kind, first.at, first.ended) == ("other", 1.0, 1.5), "a start that failed is part of its break"
    assert (second.done, second.base, second.first) == (11, 10, 11) and open_ended.ended == 0.0
    found = lost_time.account(tmp_path, 0.0, 3.5, 0, 19)
    assert found.lost_s["start"] == pytest.approx(0.4 + 0.3 + 0.5) and found.lost_s["redo"] == pytest.approx(0.2)
