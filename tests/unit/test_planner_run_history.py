"""A machine's earlier runs scale its prices, once there are enough of them."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from meshwright.json_types import JsonObject
from meshwright.planner import run_history
from meshwright.planner.cost.prices import PARTS
from meshwright.planner.run_history import TRAFFIC, Correction, RunHistory
from meshwright.spec.layout import Layout

FLOPS = 1e12
"""Of a step of the job that is planned, and of runs unless a test says otherwise."""


def learn(path: Path, machine: str, precision: str = "float32") -> RunHistory:
    return run_history.learn(path, machine, FLOPS, precision)


def record(path: Path, machine: str, row: JsonObject) -> None:
    run_history.record(path, machine, {"flops": FLOPS, **row})


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
    note = lesson.note(Layout())
    assert lesson.runs == 3 and abs(lesson.eager.factor - 1.2) < 1e-9
    assert note.startswith("3 earlier runs here of like size") and "1.20 times" in note
    assert learn(path, "elsewhere") == RunHistory() and not learn(path, "elsewhere").note(Layout())


def test_a_large_step_is_not_scaled_by_tiny_ones(tmp_path: Path) -> None:
    """On one H100 runs of small models waited less for launches than priced, and made 96 ms of a plan of 286 ms."""
    path = tmp_path / "runs.jsonl"
    for _ in range(5):
        record(path, "here", {"layout": "replicate=1", "flops": FLOPS / 1000, "priced_s": 0.03, "measured_s": 0.01})
    record(path, "here", {"layout": "replicate=1", "priced_s": 0.03, "measured_s": 0.01, "flops": "many"})
    record(path, "here", {"layout": "replicate=1", "priced_s": 0.03, "measured_s": 0.01, "flops": None})
    assert seconds(learn(path, "here"), "replicate=1", matmul=0.286) == pytest.approx(0.286)
    assert not learn(path, "here").note(Layout())
    for size in (0.2, 1.0, 5.0):
        record(
            path, "here", {"layout": "replicate=1", "flops": FLOPS * size, "priced_s": size, "measured_s": 1.05 * size}
        )
    assert seconds(learn(path, "here"), "replicate=1", matmul=0.286) == pytest.approx(0.3003)
    assert learn(path, "here").note(Layout()).startswith("3 earlier runs here")
    # Nor is a tiny one by large ones.
    assert run_history.learn(path, "here", FLOPS / 1000, "float32").runs == 5


def test_runs_speak_of_their_own_precision_and_compilation(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    waits = {"priced_waits_s": 0.5, "waits_s": 1.0}
    for _ in range(3):
        record(path, "here", {"layout": "replicate=2", "priced_s": 1.5, "measured_s": 3.0, **waits})
        record(path, "here", {"layout": "replicate=2,precision=bf16", "priced_s": 1.0, "measured_s": 5.0})
    lesson = learn(path, "here")
    assert lesson.runs == 3 and of(lesson, "replicate=2") == pytest.approx((2.0, 2.0))
    assert of(learn(path, "here", "bf16"), "replicate=2,precision=bf16") == pytest.approx((5.0, 5.0))
    # A choice between both compares prices that are corrected alike, before either has run.
    assert of(lesson, "replicate=2,compile=true") == pytest.approx((2.0, 2.0))
    assert lesson.note(Layout.parse("replicate=2,compile=true")).startswith("3 earlier runs here of like size (eager, ")
    for _ in range(3):
        record(path, "here", {"layout": "replicate=2,compile=true", "priced_s": 1.0, "measured_s": 1.1})
    lesson = learn(path, "here")
    assert of(lesson, "replicate=2,compile=true") == pytest.approx((1.1, 1.1))
    assert of(lesson, "replicate=2") == pytest.approx((2.0, 2.0))
    assert lesson.note(Layout.parse("compile=true")).startswith("3 earlier runs here of like size (compiled, ")
    assert lesson.note(Layout()).startswith("3 earlier runs here of like size (within ")
    for _ in range(3):
        record(path, "there", {"layout": "replicate=2,compile=true", "priced_s": 1.0, "measured_s": 1.3})
    lesson = learn(path, "there")
    assert of(lesson, "replicate=2") == of(lesson, "replicate=2,compile=true") == pytest.approx((1.3, 1.3))
    assert lesson.note(Layout()).startswith("3 earlier runs here of like size (compiled, ")


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


@pytest.mark.parametrize("more", ["offload=optimizer", "precision=float64"])
def test_what_other_figures_price_teaches_nothing(tmp_path: Path, more: str) -> None:
    path = tmp_path / "runs.jsonl"
    for _ in range(3):
        record(path, "here", {"layout": f"replicate=2,{more}", "priced_s": 1.0, "measured_s": 3.0})
    assert not learn(path, "here", Layout.parse(more).precision).runs


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
    assert lesson.runs == 1, "what the user reads is of exact runs"
    assert lesson.eager.factor == pytest.approx(0.690 / 0.576)
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
