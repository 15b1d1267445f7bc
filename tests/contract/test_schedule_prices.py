"""A schedule is priced by what it is, whatever its name: a copy of its file as the original, actions as the forms."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from meshwright import schedules as folder
from meshwright.cluster.cluster import Cluster
from meshwright.errors import PlanError
from meshwright.planner import candidate_prices
from meshwright.planner.candidate_prices import price_candidate, price_candidates
from meshwright.planner.choose import choose
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.cost import pipeline_simulation
from meshwright.planner.cost.layout_batch import LayoutBatch, PricedJob, schedule_names
from meshwright.planner.cost.price import price_of
from meshwright.planner.cost.prices import Price
from meshwright.planner.cost.ranks import RankTimes
from meshwright.planner.cost.timing import in_flight_microbatches
from meshwright.planner.question import Question
from meshwright.schedules.closed_form import PassSums
from meshwright.schedules.costs import ActionCosts
from meshwright.schedules.evaluate import held_microbatches, step_seconds
from meshwright.schedules.simulate import simulate
from meshwright.schedules.spec import ScheduleSpec, known_schedules
from meshwright.spec.layout import Layout

SIZES = TableSizes(name="small", layers=16, width=2048, heads=16, vocab=32000, ffn=5632)
ORIGINALS = tuple(known_schedules())


@pytest.fixture(scope="module", autouse=True)
def copies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Copies of every schedule's file, under other names, added the documented way; ``aaa`` comes first."""
    place = tmp_path_factory.mktemp("schedules")
    for path in Path(next(iter(folder.__path__))).glob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "SCHEDULE = ScheduleSpec(" in text:
            name = known_name(text)
            (place / f"aaa{path.stem}.py").write_text(text.replace(f'name="{name}"', f'name="aaa{name}"'))
    folder.__path__.append(str(place))
    known_schedules.cache_clear()
    yield
    folder.__path__.remove(str(place))
    known_schedules.cache_clear()
    for name in [name for name in sys.modules if name.startswith("meshwright.schedules.aaa")]:
        module: ModuleType = sys.modules.pop(name)
        delattr(folder, module.__name__.rpartition(".")[2])


def known_name(text: str) -> str:
    return text.partition('name="')[2].partition('"')[0]


def slow_pipeline(device: str) -> tuple[Price, float]:
    """A price of 16 micro-batches over a wire of 1 Gbit/s, and by hand the seconds of one send of float32 or bf16."""
    cluster, precision = Cluster.parse(f"2x1x{device}@ethernet-1g"), "float32" if device == "cpu" else "bf16"
    link = cluster.groups[0].node.outside
    assert link is not None
    job = PricedJob(shape=shape_from_sizes(SIZES), sequence=2048, rows=16, precision=precision)
    layout = Layout.parse(f"pp=2,microbatches=16,schedule=1f1b,precision={precision}")
    sent_bytes = (4.0 if device == "cpu" else 2.0) * 2048 * SIZES.width
    return price_candidate(Question(job=job, cluster=cluster), layout).price, sent_bytes / link.rate


def test_a_gpu_sends_and_receives_in_turn() -> None:
    """The first stage has 16 sends and 16 receives one by one, after its first forward and before its last backward."""
    price, send_s = slow_pipeline("a100-40")
    parts = price.parts
    computed_s = sum(parts[name] for name in ("matmul", "attention", "elementwise", "host"))
    assert computed_s < 16 * send_s, "the wire is what takes long"
    pipeline_s = price.step_s - sum(parts[name] for name in ("optimizer", "step", "stragglers"))
    assert pipeline_s == pytest.approx(32 * send_s + computed_s / 16, rel=0.01)


def test_a_core_works_on_what_it_sends() -> None:
    """Nothing says that a core's wire hides: a micro-batch is sent once and received once, for half of either."""
    price, send_s = slow_pipeline("cpu")
    assert price.parts["send"] == pytest.approx(16 * send_s, rel=0.01)


def question(devices: int = 8, rows: int = 64) -> Question:
    job = PricedJob(shape=shape_from_sizes(SIZES), sequence=2048, rows=rows)
    return Question(job=job, cluster=Cluster.parse(f"{devices}xh100"), base=Layout(precision="bf16"))


def priced(schedule: str, microbatches: int, stages: int = 0) -> Price:
    degrees = {"pp": 4, "shard": 2}
    layout = Layout(
        degrees=degrees, zero=1, microbatches=microbatches, schedule=schedule, stages=stages, precision="bf16"
    )
    return price_candidate(question(), layout).price


@pytest.mark.parametrize("microbatches", [8, 16, 32])
@pytest.mark.parametrize("name", ORIGINALS)
def test_a_copy_is_priced_as_the_original(name: str, microbatches: int) -> None:
    assert priced(f"aaa{name}", microbatches) == priced(name, microbatches)


def test_gpipe_holds_every_microbatch_and_1f1b_few() -> None:
    in_flight_by = {name: priced(name, 32).stages[0].held for name in ("gpipe", "aaagpipe", "1f1b")}
    assert in_flight_by == {"gpipe": 32, "aaagpipe": 32, "1f1b": 4}


def test_codes_begin_with_the_default_and_join_the_search() -> None:
    assert schedule_names()[0] == "1f1b" and "aaazbv" in schedule_names()
    plain = question()
    alone = dataclasses.replace(plain, limits={"fixed": {"pp": 4}, "schedules": ("zbv",)})
    copy = dataclasses.replace(plain, limits={"fixed": {"pp": 4}, "schedules": ("aaazbv",)})
    first, second = (choose(one, 3).best for one in (alone, copy))
    assert [str(one.layout).replace("aaazbv", "zbv") for one in second] == [str(one.layout) for one in first]
    assert [one.price for one in second] == [one.price for one in first]
    found = choose(dataclasses.replace(plain, limits={"fixed": {"pp": 4}}), 10)
    assert found.considered > choose(alone, 1).considered


def sizes_of(spec: ScheduleSpec) -> list[tuple[int, int, int]]:
    found = []
    for ranks in (2, 3, 4, 8):
        for stages in (spec.least_stages, spec.least_stages + 1):
            for microbatches in (1, ranks, ranks + 1, 2 * ranks, 4 * ranks):
                try:
                    spec.check(ranks, stages, microbatches)
                except PlanError:
                    continue
                found.append((ranks, stages, microbatches))
    return found


@pytest.mark.parametrize("name", ORIGINALS)
def test_what_a_form_says_is_held_covers_the_actions(name: str) -> None:
    spec = known_schedules()[name]
    bare = dataclasses.replace(spec, in_flight=None, step_s=None)
    for ranks, stages, microbatches in sizes_of(spec):
        v, m = np.array([float(stages)]), np.array([float(microbatches)])
        stated, counted = (held_microbatches(one, ranks, v, m)[0] for one in (spec, bare))
        schedule = spec.build(ranks, stages, microbatches)
        seen = simulate(schedule, ActionCosts.uniform(schedule.stages)).peak_live_rank
        assert np.allclose(counted * stages, seen)
        assert np.all(stated * stages >= np.array(seen) - 1e-9), (ranks, stages, microbatches)


@pytest.mark.parametrize("name", ORIGINALS)
def test_a_schedule_without_forms_takes_what_its_actions_take(name: str) -> None:
    spec = dataclasses.replace(known_schedules()[name], in_flight=None, step_s=None)
    for ranks, stages, microbatches in sizes_of(spec):
        v, m = np.array([float(stages)]), np.array([float(microbatches)])
        each = np.array([3.0 * stages])
        sums = PassSums(slowest_rank=each, all_ranks=ranks * each, forward=each / 3, weight=each / 3)
        schedule = spec.build(ranks, stages, microbatches)
        run = simulate(schedule, ActionCosts.uniform(schedule.stages))
        assert step_seconds(spec, ranks, v, m, sums)[0] == pytest.approx(run.makespan_s, rel=1e-12)


@pytest.mark.parametrize("name", ["gpipe", "zbv"])
def test_a_file_is_priced_by_its_actions(name: str, tmp_path: Path) -> None:
    spec = known_schedules()[name]
    path = tmp_path / "mine.csv"
    path.write_text(spec.build(4, spec.least_stages, 8).to_csv())
    file, known = priced(f"file:{path}", 8), priced(name, 8)
    assert file.step_s == pytest.approx(known.step_s, rel=1e-9)
    assert file.memory == known.memory and [one.layers for one in file.stages] == [one.layers for one in known.stages]
    assert Layout.parse(f"pp=4,microbatches=8,schedule=file:{path}").stages_per_rank == spec.least_stages
    with pytest.raises(PlanError, match="runs 8 micro-batches, the step has 16"):
        priced(f"file:{path}", 16)


def test_prices_are_kept_but_of_a_file_that_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan compares its best layouts several times."""
    computed: list[Price] = []
    monkeypatch.setattr(pipeline_simulation, "price_of", lambda *args: computed.append(price_of(*args)) or computed[-1])
    parts_of = RankTimes.parts
    closed_forms: list[RankTimes] = []
    monkeypatch.setattr(RankTimes, "parts", lambda ranks: closed_forms.append(ranks) or parts_of(ranks))
    pipeline_simulation.known_price.cache_clear()
    first = [priced(name, 8) for name in ("gpipe", "1f1b", "gpipe", "1f1b")]
    assert len(computed) == len(closed_forms) == 2
    assert first[0] == first[2] != first[1] == first[3]
    path, prices = tmp_path / "mine.csv", []
    for microbatches in (8, 4):
        path.write_text(known_schedules()["gpipe"].build(4, 1, microbatches).to_csv())
        prices.append(priced(f"file:{path}", microbatches))
    path.write_text(known_schedules()["gpipe"].build(4, 1, 8).to_csv())
    assert priced(f"file:{path}", 8) == prices[0] != prices[1]
    assert len(computed) == 5


def test_layouts_are_priced_at_once_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By pipeline length and the runtime's profile; whatever else differs, schedules and forms of exchange too."""
    texts = (
        "shard=8,zero=1", "replicate=2,shard=4,zero=3,recompute=full", "shard=8,zero=2,compile=true",
        "tp=2,shard=4,zero=1",
        "pp=2,shard=4,zero=1,microbatches=4", "pp=2,tp=2,shard=2,zero=1,microbatches=8,schedule=zbv",
        "pp=4,shard=2,zero=1,microbatches=8,recompute=selective",
        "pp=4,replicate=2,microbatches=4,schedule=gpipe,compress=int8",
    )  # fmt: skip
    layouts = [Layout.parse(f"{text},precision=bf16") for text in texts]
    runs: list[int] = []
    plain = RankTimes.__init__

    def record(ranks: RankTimes, *args: Any, **more: Any) -> None:
        plain(ranks, *args, **more)
        runs.append(ranks.count)

    monkeypatch.setattr(RankTimes, "__init__", record)
    pipeline_simulation.known_price.cache_clear()
    together = price_candidates(question(8), [*layouts, layouts[0]])
    assert sorted(runs) == [1, 2, 2, 3]
    assert price_candidates(question(8), layouts) == together[:-1] and len(runs) == 4
    pipeline_simulation.known_price.cache_clear()
    for layout, candidate in zip(layouts, together):
        alone = price_candidate(question(8), layout)
        assert candidate.layout == layout and candidate.price.parts == pytest.approx(alone.price.parts, rel=1e-12)
        assert [stage.memory for stage in candidate.price.stages] == [
            pytest.approx(stage.memory, rel=1e-12) for stage in alone.price.stages
        ]


def test_a_plan_prices_its_finalists_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch of layouts once: finalists, the front of time and memory, and forms of the finalists."""
    asked: list[int] = []
    prices = candidate_prices.simulated_prices
    monkeypatch.setattr(
        candidate_prices,
        "simulated_prices",
        lambda job, layouts, *rest: asked.append(len(layouts)) or prices(job, layouts, *rest),
    )
    answer = choose(question(8))
    assert asked == [
        len({*(option.layout for option in answer.best), *(Layout.parse(text) for _, _, text in answer.front)})
    ]


def test_stages_of_a_file_may_stand_on_any_rank(tmp_path: Path) -> None:
    """The first stage on rank 1: it holds what the first stage holds."""
    path = tmp_path / "swapped.csv"
    path.write_text("\n".join(reversed(known_schedules()["1f1b"].build(2, 1, 4).to_csv().splitlines())) + "\n")
    layout = Layout.parse(f"pp=2,microbatches=4,schedule=file:{path}")
    degrees = LayoutBatch.from_layouts([layout], 16)
    assert in_flight_microbatches(degrees, 2).tolist() == [[1.0, 2.0]]
    assert degrees.schedules[int(degrees.schedule[0])].owners == (1, 0)
    there = price_candidate(question(2), dataclasses.replace(layout, precision="bf16")).price
    usual = price_candidate(question(2), Layout.parse("pp=2,microbatches=4,precision=bf16")).price
    assert [stage.memory for stage in there.stages] == [stage.memory for stage in reversed(usual.stages)]
    assert there.step_s == pytest.approx(usual.step_s, rel=0.02)
