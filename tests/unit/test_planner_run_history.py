"""A machine's earlier runs scale its prices, once there are enough of them."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from meshwright.planner.cost.prices import PARTS
from meshwright.planner.run_history import TRAFFIC, Correction, RunHistory, learn, record
from meshwright.spec.layout import Layout


def of(history: RunHistory, layout: str) -> tuple[float, float]:
    """Returns a layout's factors on compute and on traffic."""
    correction = history.of(Layout.parse(layout))
    return correction.compute, correction.traffic


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
    assert of(lesson, "replicate=8") == pytest.approx((1.2, 1.2)), "the newest three"
    assert of(lesson, "shard=4,zero=3") == pytest.approx((1.5, 1.5))
    assert of(lesson, "shard=4,zero=1") == pytest.approx((1.2, 1.2))
    assert of(lesson, "shard=2,tp=2") == pytest.approx((2.0, 2.0)), "the slower of the two"
    assert of(lesson, "cp=2") == (1.0, 1.0), "axes that never ran here: nothing tells what of them was mispriced"
    assert of(lesson, "pp=4") == (1.0, 1.0), "nor often enough"


def test_one_run_beside_the_pace_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    record(path, "here", {"layout": "tp=2", "priced_s": 1.0, "measured_s": 1.3})
    assert not learn(path, "here").runs
    record(path, "here", {"layout": "shard=2,zero=3", "priced_s": 1.0, "measured_s": 1.1, "paced": True})
    lesson = learn(path, "here")
    assert lesson.runs == 2 and of(lesson, "shard=2,zero=3") == pytest.approx((1.1, 1.1))
    assert of(lesson, "tp=2") == (1.0, 1.0), "that was at whatever speed the machine had"


@pytest.mark.parametrize("more", ["compile=true", "offload=optimizer", "precision=float64"])
def test_what_other_figures_price_teaches_nothing(tmp_path: Path, more: str) -> None:
    path = tmp_path / "runs.jsonl"
    for _ in range(3):
        record(path, "here", {"layout": f"replicate=2,{more}", "priced_s": 1.0, "measured_s": 3.0})
    assert not learn(path, "here").runs


SLOW_WIRE = {"layout": "replicate=2", "priced_s": 0.616, "measured_s": 1.001, "priced_waits_s": 0.076, "waits_s": 0.441}
"""Sums over a wire that is slower than catalogued: six times the waits, and compute nearly as priced."""


def seconds(history: RunHistory, layout: str, **parts: float) -> float:
    return sum(history.of(Layout.parse(layout)).of_parts(parts).values())


def test_a_slow_wire_raises_a_price_by_what_is_sent_on_it(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    for _ in range(3):
        record(path, "here", SLOW_WIRE)
    lesson = learn(path, "here")
    # What ran is priced at what it took, and half of its traffic raises a price by half as much.
    assert seconds(lesson, "replicate=2", matmul=0.540, reduce=0.076) == pytest.approx(1.001)
    assert seconds(lesson, "replicate=4", matmul=0.540, reduce=0.038) == pytest.approx(0.560 + 0.441 / 2)
    # Islands send nothing in most steps: these took 0.576 s, and the run's factor alone would have said 0.878.
    assert seconds(lesson, "islands=2", matmul=0.540) == pytest.approx(0.560)
    assert seconds(lesson, "islands=2,replicate=2", matmul=0.540, reduce=0.076) == pytest.approx(1.001)
    assert seconds(lesson, "cp=2", matmul=0.540, cp=0.076) == pytest.approx(1.001), "by the same wire"
    # Without measured waits the run speaks of its own axes alone.
    for _ in range(3):
        record(path, "there", {name: SLOW_WIRE[name] for name in ("layout", "priced_s", "measured_s")})
    lesson = learn(path, "there")
    assert seconds(lesson, "replicate=2", matmul=0.540, reduce=0.076) == pytest.approx(1.001)
    assert seconds(lesson, "islands=2", matmul=0.540) == pytest.approx(0.540)


def test_what_rounding_costs_raises_the_price_of_layouts_that_round_alike_alone(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    # Two machines at 1 Gbit/s, a core each, which rounds as well: waits as priced, a step far longer.
    record(path, "here", {"layout": "replicate=2", "paced": True, **_core(0.576, 0.690)})
    for layout, measured_s in (("replicate=2,compress=bf16", 0.936), ("replicate=2,compress=int8", 0.909)):
        for _ in range(2):
            record(path, "here", {"layout": layout, "paced": True, **_core(0.570, measured_s)})
    lesson = learn(path, "here")
    assert lesson.runs == 1 and lesson.factor == pytest.approx(0.690 / 0.576), "what the user reads is of exact runs"
    exact = 0.670 / 0.556
    assert of(lesson, "replicate=2")[0] == pytest.approx(exact)
    assert of(lesson, "islands=2")[0] == pytest.approx(exact), "no axis of it ran: as runs that don't round"
    assert of(lesson, "replicate=4,compress=int8")[0] == pytest.approx(0.889 / 0.550)
    assert of(lesson, "replicate=2,compress=fp8")[0] == pytest.approx(exact), "its axis ran, its rounding didn't"


def _core(priced_s: float, measured_s: float) -> dict[str, float]:
    return {"priced_s": priced_s, "measured_s": measured_s, "priced_waits_s": 0.020, "waits_s": 0.020}


def test_traffic_priced_as_hidden_corrects_its_own_axes_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    for _ in range(3):
        record(path, "here", SLOW_WIRE | {"priced_s": 0.541, "priced_waits_s": 0.001})
    lesson = learn(path, "here")
    assert seconds(lesson, "replicate=2", matmul=0.540, reduce=0.001) == pytest.approx(1.001)
    assert seconds(lesson, "islands=2", matmul=0.540) == pytest.approx(0.560)

    # A wire that is thirty times slower than catalogued is no outlier while the step isn't.
    for _ in range(3):
        record(path, "there", SLOW_WIRE | {"priced_s": 0.555, "priced_waits_s": 0.015})
    assert seconds(learn(path, "there"), "cp=2", matmul=0.540, cp=0.015) == pytest.approx(1.001)


def test_a_right_price_stays(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    for layout in ("replicate=2", "shard=2,zero=3", "tp=2"):
        for _ in range(3):
            right = {"measured_s": SLOW_WIRE["priced_s"], "waits_s": SLOW_WIRE["priced_waits_s"]}
            record(path, "here", SLOW_WIRE | right | {"layout": layout})
    lesson = learn(path, "here")
    for layout in ("replicate=4", "shard=2,tp=2", "cp=2", "pp=2", "islands=2"):
        assert of(lesson, layout) == (1.0, 1.0)


def test_a_correction_never_reorders_layouts_that_differ_in_one_term() -> None:
    random = Random(0)
    for _ in range(300):
        correction = Correction(compute=random.uniform(0.2, 8.0), traffic=random.uniform(0.2, 8.0))
        fewer = {name: random.uniform(0.0, 1.0) for name in PARTS}
        traffic = random.random() < 0.5
        grown = [name for name in PARTS if name != "bubble" and (name in TRAFFIC) == traffic]
        more = fewer | {name: fewer[name] + random.uniform(0.0, 1.0) for name in grown} | {"bubble": 0.0}
        fewer |= {"bubble": 0.0}
        assert sum(correction.of_parts(fewer).values()) < sum(correction.of_parts(more).values())
        restored = correction.inverse.of_parts(correction.of_parts(fewer))
        assert restored == pytest.approx(fewer)


def test_a_correction_follows_a_pass() -> None:
    correction = Correction(compute=2.0, traffic=10.0)
    # A pass of three parts compute and one part traffic takes four times as long, and so does what it lets others wait.
    corrected = correction.of_parts({"matmul": 3.0, "tp": 1.0, "reduce": 1.0, "bubble": 1.0, "optimizer": 1.0})
    assert corrected == {"matmul": 6.0, "tp": 10.0, "reduce": 10.0, "bubble": 4.0, "optimizer": 2.0}
