"""How sure predictions are: against known populations, plain numpy, and the rows that were never fitted."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fit_uncertainty import ERRORS, Weighted, fit_memory, fit_time, regrets
from benchmarks.published.held_out import HeldOut
from meshwright.cluster.cluster import Cluster
from meshwright.errors import ConfigError
from meshwright.jobs.plan import plan
from meshwright.jobs.plan_model import model_of_sizes, plan_model
from meshwright.jobs.requests import PlanConfig
from meshwright.planner.chances import candidate_chances
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.question import Question
from meshwright.planner.uncertainty import Evidence, MemorySpread, Shape, TimeSpread, fitted_spreads
from meshwright.spec.plan import Prediction

NORMAL = Shape(wide_share=0.0, wide_factor=3.0)
WIDE = Shape(wide_share=0.1, wide_factor=3.0)
UNSEEN = Evidence(framework=False, device=True)


def held_out(**fields: object) -> HeldOut:
    """Returns a row of which nothing but some fields is known."""
    known: dict[str, object] = {
        "population": "framework", "framework": "f", "device": "h100", "generation": "hopper", "devices": 8,
        "experts": False, "products": "bf16", "job": "j", "mesh": "m", "layout": "l", "time_s": None,
        "time_error": None, "memory_error": None, "room": None, "fits": None,
    }  # fmt: skip
    return HeldOut(**(known | fields))  # type: ignore[arg-type]


def test_the_contaminated_normal_is_that_of_a_million_draws() -> None:
    generator = np.random.default_rng(3)
    draws = np.where(generator.random(10**6) < 0.1, 3.0, 1.0) * generator.standard_normal(10**6)
    for probability in (0.01, 0.2, 0.5, 0.9, 0.99):
        assert WIDE.quantile(probability) == pytest.approx(np.quantile(draws, probability), abs=0.03)
        assert WIDE.cdf(WIDE.quantile(probability)) == pytest.approx(probability, abs=1e-9)
    ours = WIDE.draw(np.random.default_rng(4), (10**5,))
    assert np.quantile(ours, 0.99) == pytest.approx(np.quantile(draws, 0.99), abs=0.1)


def test_parts_of_a_known_population_are_found_again() -> None:
    """Sixty frameworks of ten jobs of three meshes of three layouts, drawn from scales that are known."""
    draw, rows = np.random.default_rng(1), []
    scales = {"device": 0.12, "framework": 0.1, "job": 0.05, "mesh": 0.04, "layout": 0.02}
    for framework in range(60):
        shared = {name: draw.normal(0, scales[name]) for name in ("framework", "device")}
        for job in range(10):
            job_error = draw.normal(0, scales["job"])
            for mesh in range(3):
                mesh_error = draw.normal(0, scales["mesh"])
                for _ in range(3):
                    own = job_error + mesh_error + draw.normal(0, scales["layout"])
                    names = {"framework": str(framework), "job": f"{framework}/{job}", "mesh": str(mesh)}
                    for population, more in (
                        ("model", 0.0),
                        ("framework", shared["framework"]),
                        ("device", shared["framework"] + shared["device"]),
                    ):
                        rows.append(held_out(population=population, time_error=own + more, **names))
    found = fit_time(rows)
    known = math.hypot(scales["job"], scales["mesh"], scales["layout"])
    wholes = {"model": known, "framework": math.hypot(known, scales["framework"])}
    wholes["device"] = math.hypot(wholes["framework"], scales["device"])
    for name, scale in (wholes | {"mesh": scales["mesh"], "layout": scales["layout"]}).items():
        assert getattr(found, name) == pytest.approx(scale, rel=0.2), name
    # The interval of the whole holds 80 % of other rows of the same population.
    others = draw.normal(0, math.hypot(*(scales[name] for name in scales if name != "device")), 10**5)
    assert np.mean(np.abs(others) < math.log(found.factor(UNSEEN))) == pytest.approx(0.8, abs=0.05)


def test_the_scale_of_memory_is_found_again_from_what_ran_out() -> None:
    draw = np.random.default_rng(2)
    room, error = draw.uniform(-0.5, 0.8, 1500), draw.normal(0, 0.1, 1500)
    rows = [held_out(population="model", room=float(one), fits=bool(other < one)) for one, other in zip(room, error)]
    middles = (0.0, 0.04, 0.06, 0.1, 0.3)
    rows += [
        held_out(framework=f"f{middle}", memory_error=middle + float(one), room=0.1, fits=True)
        for middle in middles
        for one in draw.normal(0, 0.02, 200)
    ]
    # What is small says nothing.
    rows += [held_out(framework="f0.0", memory_error=2.0, room=2.0, fits=True)] * 300
    counted = draw.normal(0, 0.01, 99)
    rows += [held_out(population="model", framework="SimuMax", memory_error=float(one)) for one in counted]
    own = draw.normal(0, 0.03, 400)
    found = fit_memory(rows, Weighted.of(own, [""] * len(own)))
    assert found.job == pytest.approx(0.1, rel=0.25) and found.counted == pytest.approx(0.01, rel=0.3)
    assert found.missing == pytest.approx(0.06, abs=0.01) and abs(found.job_missing) < 0.02
    assert found.own == pytest.approx(0.03, rel=0.15)
    assert found.framework == pytest.approx(np.std(middles, ddof=1), abs=0.01)


def test_regret_is_that_of_the_layout_that_is_predicted_first() -> None:
    def run(job: str, layout: str, measured_s: float, predicted_s: float, **fields: object) -> HeldOut:
        error = math.log(measured_s / predicted_s)
        return held_out(job=job, layout=layout, time_s=measured_s, time_error=error, **fields)

    rows = [
        run("a", "x", 1.0, 2.0), run("a", "y", 1.5, 1.0),  # y is said to be the fastest, and takes 1.5 of x
        run("b", "x", 2.0, 1.0), run("b", "y", 3.0, 2.0),  # both too fast, in the right order
        run("c", "x", 1.0, 1.0), run("c", "x", 3.0, 1.0), run("c", "y", 1.6, 2.0),  # two runs of x take 2 in the mean
        run("d", "x", 5.0, 1.0), run("d", "x", 9.0, 1.0),  # one layout alone
        run("e", "x", 5.0, 1.0, population="model"), run("e", "y", 4.0, 2.0, population="model"),
    ]  # fmt: skip
    assert regrets(rows, "framework") == {"f": [pytest.approx(0.5), 0.0, pytest.approx(0.25)]}
    assert regrets(rows, "model") == {"f": [pytest.approx(0.25)]}


def raw_rows(population: str) -> list[dict[str, str]]:
    with Path(ERRORS).open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row["population"] == population]


@pytest.mark.parametrize("population", ["framework", "device"])
def test_four_fifths_of_rows_that_were_not_fitted_lie_in_the_interval(population: str) -> None:
    """Recomputed from the raw errors by numpy: frameworks count alike, as `docs/predictions.md` says."""
    rows = [row for row in raw_rows(population) if row["time_error"]]
    spread, seen = fitted_spreads().time, Evidence(framework=False, device=population == "framework")
    factor = spread.factor(seen)
    shares = []
    for name in {row["framework"] for row in rows}:
        ratios = np.exp([float(row["time_error"]) for row in rows if row["framework"] == name])
        shares.append(np.mean((ratios >= 1 / factor) & (ratios <= factor)))
    assert len(shares) == 10 and np.mean(shares) == pytest.approx(0.8, abs=0.06)


def test_what_is_said_to_fit_with_99_percent_ran_out_at_most_once_in_a_hundred() -> None:
    for population, framework in (("model", True), ("framework", False)):
        rows = [row for row in raw_rows(population) if row["room"]]
        share = fitted_spreads().memory.share(0.99, Evidence(framework=framework, device=True), counted=False)
        room, fits = (np.array([float(row[name]) for row in rows]) for name in ("room", "fits"))
        sure = np.exp(-room) <= share
        assert len(rows) > 1000 and sure.sum() > 300 and (fits == 0).sum() > 100
        assert np.mean(fits[sure]) >= 0.99, population
        assert np.mean(fits[~sure]) < 0.9, "the limit isn't so low that everything above it would fit too"


def test_the_chance_of_being_first_follows_from_what_layouts_do_not_share() -> None:
    spread = TimeSpread(model=0.5, framework=0.5, device=0.5, mesh=0.04, layout=0.03, shape=NORMAL)
    times, meshes = [1.0, 1.05], ["a", "b"]
    one, other = spread.chances_best(times, meshes)
    scale = math.sqrt(2 * (0.03**2 + 0.04**2))
    expected = 0.5 * (1 + math.erf(math.log(1.05) / scale / math.sqrt(2)))
    assert one == pytest.approx(expected, abs=0.02) and one + other == pytest.approx(1)
    assert spread.chance_faster(1.0, 1.05, same_mesh=False) == pytest.approx(expected, abs=1e-9)
    # What a mesh has in common says nothing of which of its layouts is faster.
    assert spread.chances_best(times, ["a", "a"])[0] > one + 0.05
    assert spread.chance_faster(1.0, 1.05, same_mesh=True) > expected + 0.05
    # Of many equals each is first as often.
    many = spread.chances_best([1.0] * 50, [str(number) for number in range(50)])
    assert many.sum() == pytest.approx(1) and many.max() < 0.04


def question(cluster: str, **fields: object) -> Question:
    shape = shape_from_sizes(TableSizes(name="sizes", layers=8, width=1024, heads=8, vocab=32000))
    return Question(job=PricedJob(shape=shape, sequence=2048, rows=64), cluster=Cluster.parse(cluster), **fields)  # type: ignore[arg-type]


def test_a_plan_may_fill_what_fits_with_the_chance_that_is_asked() -> None:
    asked = question("8xh100")
    assert asked.chance_fits(asked.usable_bytes, asked.cluster.memory_bytes) == pytest.approx(0.99, abs=1e-6)
    assert asked.usable_share < question("8xh100", fits=0.9).usable_share < 0.94
    assert question("8xh100", usable=0.85).usable_bytes == pytest.approx(0.85 * asked.cluster.memory_bytes)
    # What is counted by the byte stays tight: cores, and machines that were calibrated.
    assert question("8xcpu").usable_share == 0.94 and question("8xcpu").chance_fits(1.0, 2.0**30) == pytest.approx(1.0)
    unmeasured = question("8xh100").time_spread.factor(Evidence(framework=False, device=False))
    measured = question("8xh100").time_spread.factor(Evidence(framework=True, device=True))
    assert 1.0 < measured < unmeasured
    with pytest.raises(ConfigError, match=r"fits = 1\.0: .* under 1, as 0\.99"):
        PlanConfig(fits=1.0).check()


def test_a_stage_is_held_against_the_memory_of_its_own_device() -> None:
    """The fullest rank stands on a large device and needs more than a small one has."""
    sizes = "layers=32,width=4096,heads=32,vocab=32000"
    result = plan(sizes=sizes, cluster="8xh100+3xv100", batch=64, sequence=4096)
    asked, best = result.question, result.choice.best[0]
    large, small = (asked.cluster.device_of(rank).memory_bytes for rank in (0, 10))
    assert best.price.peak > small
    needed = [stage.peak for stage in best.price.stages]
    assert all(size < room for size, room in zip(needed, [large] * 8 + [small] * 3, strict=True))
    assert candidate_chances(asked, best).fits >= asked.fits
    index, room = asked.tightest_stage(best)
    assert needed[index] / room == max(max(needed[:8]) / large, max(needed[8:]) / small)


def test_a_plan_says_its_chances() -> None:
    config = PlanConfig(sizes="layers=8,width=1024,heads=8,vocab=32000", cluster="8xh100", batch=64, show=3)
    result = plan_model(config, model_of_sizes(config.sizes))
    answer = json.loads(json.dumps(result.to_json()))
    best, chances = answer["best"], answer["chances"]
    low, high = best[0]["step_range_s"]
    assert low < best[0]["price"]["step_s"] < high and best[0]["fits"] >= 0.99
    assert 0 < chances["best"] <= 1 and 1 <= chances["ties"] <= chances["of"] and chances["of"] > 10
    assert all(0 <= option["chance_best"] <= 1 for option in best)
    assert f"of the {chances['of']} best it is the fastest with" in answer["reason"]
    kept = dataclasses.replace(Prediction(memory={}), step_range_s=(1.0, 2.0), fits=0.99)
    assert kept.step_range_s == (1.0, 2.0)


def test_an_unseen_framework_adds_its_own_part_to_the_tails_of_a_job() -> None:
    shape = Shape(wide_share=0.2, wide_factor=3.0)
    spread = MemorySpread(framework=0.09, missing=0.02, job=0.06, job_missing=0.0, own=0.03, counted=0.01, shape=shape)
    generator = np.random.default_rng(3)
    errors = 0.02 + 0.09 * generator.standard_normal(400_000) + 0.06 * shape.draw(generator, (400_000,))
    for room in (0.0, 0.1, 0.3, 0.5):
        chance = spread.chance(room, Evidence(framework=False, device=True), counted=False)
        assert chance == pytest.approx(float((errors < room).mean()), abs=0.003)
