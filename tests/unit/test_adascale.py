"""AdaScale against its paper's algorithm, written here a second time in float64, and against whole runs."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import ConfigError
from meshwright.jobs.kubernetes import is_finished
from meshwright.jobs.run_control import run_status
from meshwright.jobs.runs import list_runs
from meshwright.train.config import OptimizerConfig, OuterConfig, ScheduleConfig, TrainConfig
from meshwright.train.copies import as_values
from meshwright.train.noise_scale import NoiseScale
from meshwright.train.rate import RateSchedule, learning_rate, scale_gain
from meshwright.train.run_config import RunConfig
from tests.runs import call, curve, events, rows, words, write_corpus

STEPS, BATCH, BASE = 40, 16, 2


def config_of(rule: str = "adascale", batch: int = BATCH, **more: Any) -> RunConfig:
    return RunConfig(
        optimizer=OptimizerConfig(lr=1e-2, lr_batch=BASE, lr_rule=rule),
        schedule=ScheduleConfig(shape="cosine", warmup=5),
        train=TrainConfig(**{"steps": STEPS, "batch": batch, "noise_scale": 3} | more),
    )


def papers_rates(measured: dict[int, tuple[float, float]], power: float = 1.0) -> list[float]:
    """Algorithm 1 of Johnson et al. (2020): tau and r step by step, until tau has come to the steps of B1 rows.

    Args:
        measured: step to (|G|^2, V of a row) that the 50 measurements up to it have as means; the next step uses them.
        power: of the gain in the rate.
    """
    tau, ratio, rates = 0.0, 1.0, []
    scale = BATCH / BASE
    while tau < STEPS:
        rates.append(ratio**power * learning_rate(math.floor(tau), STEPS, 1e-2, ScheduleConfig(warmup=5)))
        tau += ratio
        if len(rates) in measured:
            mu2, row_variance = measured[len(rates)]
            sigma2 = row_variance / BASE  # of the gradient of B1 rows
            ratio = (sigma2 + mu2) / (sigma2 / scale + mu2)
    return rates


def trained_rates(schedule: RateSchedule, noise: NoiseScale, norms: Sequence[tuple[float, float]]) -> list[float]:
    """Rates of a run whose measurements see these (norm of the small batch, norm of the batch)."""
    rates: list[float] = []
    while not schedule.is_over(step := len(rates)):
        rates.append(schedule.rate(step))
        if noise.is_due(step):
            small, large = norms[step]
            noise.observe((small, 2.0), (large, float(BATCH)))
            schedule.take_measurement(step + 1, noise.means)
    return rates


def drawn_norms(seed: int) -> list[tuple[float, float]]:
    draw = random.Random(seed)
    return [(math.sqrt(1 + draw.uniform(1.0, 9.0)), math.sqrt(1 + draw.uniform(0.1, 0.9))) for _ in range(STEPS)]


@pytest.mark.parametrize(("rule", "power"), [("adascale", 1.0), ("adascale_sqrt", 0.5)])
def test_rates_are_those_of_the_papers_algorithm(rule: str, power: float) -> None:
    for seed in range(5):
        norms, means, pairs = drawn_norms(seed), {}, []
        for step in range(2, STEPS, 3):
            # |g_n|^2 = |G|^2 + V / n of 2 and of 16 rows.
            variance = (norms[step][0] ** 2 - norms[step][1] ** 2) / (1 / 2 - 1 / 16)
            pairs.append((norms[step][1] ** 2 - variance / 16, variance))
            means[step + 1] = tuple(math.fsum(one) / len(pairs) for one in zip(*pairs))
        found = trained_rates(RateSchedule(config_of(rule)), NoiseScale(3, BATCH), norms)
        wanted = papers_rates(means, power)
        assert found == pytest.approx(wanted, rel=1e-12) and STEPS / (BATCH / BASE) <= len(found) < STEPS
        # Whatever the gain, the first steps had none.
        assert found[:3] == pytest.approx([1e-2 * (step + 1) / 6 for step in range(3)])


def test_the_gain_is_between_no_noise_and_nothing_else() -> None:
    assert scale_gain(1.0, 0.0, BASE, BATCH) == scale_gain(1.0, -1.0, BASE, BATCH) == scale_gain(0.0, 0.0, 2, 16) == 1.0
    assert scale_gain(0.0, 3.0, BASE, BATCH) == scale_gain(-2.0, 3.0, BASE, BATCH) == 8.0
    # sigma^2 = 6 / 2 of the small batch, 3 / 8 of the large one, beside mu^2 = 1.
    assert scale_gain(1.0, 6.0, BASE, BATCH) == pytest.approx(4 / (3 / 8 + 1))


def test_the_last_step_is_told_ahead() -> None:
    schedule, plain = RateSchedule(config_of()), RateSchedule(config_of("sqrt"))
    assert [plain.last_step(step) for step in (0, 7, STEPS)] == [STEPS] * 3
    schedule.take_measurement(10, (1.0, 16.0))  # a gain of (8 + 1) / (1 + 1) steps a step
    last = schedule.last_step(10)
    assert last == 10 + math.ceil(30 / 4.5) and schedule.is_over(last) and not schedule.is_over(last - 1)


def test_nothing_is_left_where_steps_are_worth_as_many() -> None:
    schedule, plain = RateSchedule(config_of()), RateSchedule(config_of("sqrt"))
    assert plain.nothing_left(STEPS - 1) == "" and f"set train.steps above {STEPS}" in plain.nothing_left(STEPS)
    schedule.take_measurement(10, (1.0, 16.0))
    last = schedule.last_step(10)
    assert schedule.nothing_left(last - 1) == ""
    worth = 10 + 4.5 * (last - 10)
    assert f"{last} steps are done, worth {worth:.1f}, and" in schedule.nothing_left(last)
    assert schedule.nothing_left(last).endswith(f"set train.steps above {math.floor(worth)}")


def test_a_run_has_at_least_the_steps_of_the_largest_gain() -> None:
    assert config_of().least_steps == STEPS / (BATCH / BASE) and config_of("linear").least_steps == STEPS
    assert config_of(batch=3).least_steps == 27


def test_state_is_compared_between_ranks_down_to_its_numbers() -> None:
    noise, schedule = NoiseScale(3, BATCH), RateSchedule(config_of())
    noise.observe((2.0, 2.0), (1.0, float(BATCH)))
    schedule.take_measurement(3, noise.means)
    values = as_values({**noise.state(), **schedule.state(), "passed_over": 1, "text": "a", "loss": None})
    assert len(values) == 2 + 1 + 3 and values[2] == 1.0


def test_a_state_goes_on_to_the_bit() -> None:
    norms = drawn_norms(7)
    schedule, noise = RateSchedule(config_of()), NoiseScale(3, BATCH)
    whole, step = trained_rates(schedule, noise, norms), 10
    schedule, noise = RateSchedule(config_of()), NoiseScale(3, BATCH)
    for number in range(step):
        if noise.is_due(number):
            noise.observe((norms[number][0], 2.0), (norms[number][1], float(BATCH)))
            schedule.take_measurement(number + 1, noise.means)
    restored, restored_noise = RateSchedule(config_of()), NoiseScale(3, BATCH)
    values = {**schedule.state(), **noise.state()}
    restored.restore(values)
    restored_noise.restore(values)
    assert restored.rate(step) == whole[step] and restored.progress(step) == schedule.progress(step)
    assert restored_noise.means == noise.means
    # Without a state the steps are those of the schedule.
    assert RateSchedule(config_of()).progress(step) == step
    assert RateSchedule(config_of("linear")).state() == {} and NoiseScale(0, 4).state() == {}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (config_of(noise_scale=0), "needs train.noise_scale"),
        (config_of(batch=1, noise_scale=1), "give 2 rows or more"),
        (RunConfig(optimizer=OptimizerConfig(lr_rule="adascale")), "no effect without optimizer.lr_batch"),
        (
            RunConfig(
                optimizer=OptimizerConfig(lr_batch=64, lr_rule="adascale"), train=TrainConfig(batch=32, noise_scale=1)
            ),
            "take lr_rule = sqrt or linear",
        ),
        (
            RunConfig(
                optimizer=OptimizerConfig(lr_batch=4, lr_rule="adascale"),
                train=TrainConfig(batch=32, noise_scale=1),
                outer=OuterConfig(meet="host:1", sites=2),
            ),
            "each site of host:1 end after other steps",
        ),
    ],
)
def test_what_has_no_gain_is_refused(config: RunConfig, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        config.check_all()


def test_a_run_ends_early_and_goes_on_to_the_bit(tmp_path: Path) -> None:
    """Its rates are the paper's, from what its metrics say was measured; a killed rank changes no digit."""
    write_corpus(tmp_path / "corpus.txt")
    more = (
        "--train.steps",
        str(STEPS),
        "--train.batch",
        str(BATCH),
        "--schedule.warmup",
        "5",
        "--optimizer.lr",
        "1e-2",
    )
    rule = ("--optimizer.lr-batch", str(BASE), "--optimizer.lr-rule", "adascale", "--train.noise-scale", "3")
    faults = ("--recovery.faults", "kill:rank=0,step=8,phase=backward", "--recovery.snapshot-every", "1")
    for name, extra in (("whole", ()), ("killed", faults)):
        argv = words(tmp_path, name, *more, *rule, *extra)
        status, text = call(argv, tmp_path / f"{name}.log")
        assert status == 0, text
    lines = rows(tmp_path / "whole")
    pairs: list[tuple[float, float]] = []
    means = {}
    for line in lines:
        if "noise/variance" in line["scalars"]:
            pairs.append((line["scalars"]["noise/signal"], line["scalars"]["noise/variance"]))
            means[line["step"]] = tuple(max(0.0, math.fsum(one) / len(pairs)) for one in zip(*pairs))
    assert [line["lr"] for line in lines] == pytest.approx(papers_rates(means), rel=1e-12)
    assert 5 <= len(lines) < STEPS and max(line["scalars"].get("adascale/gain", 0.0) for line in lines) > 1.5
    (end,) = events(tmp_path / "whole", "run_finished")
    assert STEPS <= end["scaled_steps"] < STEPS + 8 and end["step"] == len(lines)
    # Where the run will end is known from the first measurement on, and least from the last.
    ends = [line["last_step"] for line in lines]
    assert (
        ends[:2] == [STEPS] * 2 and ends[-1] == len(lines) and all(line["step"] <= at for line, at in zip(lines, ends))
    )
    status, (row,) = run_status(tmp_path / "whole"), list_runs(tmp_path / "whole")
    assert (status.step, status.steps) == (row.step, row.steps) == (len(lines), len(lines))
    said: list[str] = []
    assert is_finished(RunConfig(run=str(tmp_path / "whole"), train=TrainConfig(steps=STEPS)), said.append)
    assert not is_finished(RunConfig(run=str(tmp_path / "whole"), train=TrainConfig(steps=2 * STEPS)), said.append)
    assert events(tmp_path / "killed", "restored") and curve(tmp_path / "killed") == curve(tmp_path / "whole")
    rates = {line["step"]: line["lr"] for line in rows(tmp_path / "killed")}
    assert rates == {line["step"]: line["lr"] for line in lines}
