"""What the benchmark of slow wires reads off a run: a step that was trained again counts once."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from meshwright.spec.layout import Layout

ROOT = Path(__file__).resolve().parents[2]
EVERY, JOIN_BYTES = 30, 3 * 5_380_440
"""Steps of a round, and bytes that each of four islands sends in a rounded join: its movement to three others."""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    return importlib.import_module("bench_slow_train")


@pytest.mark.parametrize("lost_after", [0, 6])
def test_a_rounds_mean_holds_its_own_join_alone(bench: ModuleType, tmp_path: Path, lost_after: int) -> None:
    """Of a run that lost a rank after six steps and began again there are 66 lines: the last 36 hold two joins."""
    steps = [*range(1, lost_after + 1), *range(1, 2 * EVERY + 1)]
    lines = [
        {
            "step": step,
            "step_s": 0.5,
            "processor_s": {"thread": 0.3, "rank": 0.4},
            "outer": {"version": 1} if step % EVERY == 0 else {},
            "comm": [{"bytes": JOIN_BYTES if step % EVERY == 0 else 0, "exposed_s": 0.0}],
        }
        for step in steps
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    plan = {"layout": Layout.parse("islands=4").to_json(), "prediction": {"step_s": 0.5}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert bench.read_run(tmp_path, EVERY)["sent_bytes"] == pytest.approx(JOIN_BYTES / EVERY)
