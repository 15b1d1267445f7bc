"""Limits learned from a run's own past: wide enough for what training does, narrow enough for a flipped exponent."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshwright.checkpoint.agreement import Agreement
from meshwright.train.config import RecoveryConfig
from meshwright.train.damage import COPIES, Damage
from meshwright.train.health import LEAST, Health
from meshwright.train.integrity import Integrity
from meshwright.train.step import StepOutcome


def run(losses: list[float], norms: list[float], warmup: int = 0) -> list[str | None]:
    health = Health(RecoveryConfig(), warmup)
    found = []
    for step, pair in enumerate(zip(losses, norms)):
        found.append(health.suspect(step, *pair))
        assert health.judge(*pair) is None
    return found


@pytest.mark.parametrize("seed", range(20))
def test_what_training_does_is_not_suspect(seed: int) -> None:
    """A falling loss with noise, warm-up, norms over a decade, and spikes as large runs report them."""
    draw = random.Random(seed)
    losses = [2.5 + 6.0 * math.exp(-step / 60) + draw.gauss(0, 0.15) for step in range(600)]
    norms = [draw.lognormvariate(math.log(0.5 + 4 * math.exp(-step / 30)), 0.4) for step in range(600)]
    for at in draw.sample(range(100, 600), 6):
        losses[at] *= draw.uniform(1.5, 2.5)
        norms[at] *= draw.uniform(5, 20)
    assert run(losses, norms, warmup=50) == [None] * 600


def test_a_loss_and_a_norm_far_out_are_suspect_once_there_is_a_past() -> None:
    losses, norms = [5.2 - 0.01 * step for step in range(60)], [1.0 + 0.1 * (step % 3) for step in range(60)]
    health = Health(RecoveryConfig())
    for step, pair in enumerate(zip(losses, norms)):
        assert (health.suspect(step, 2.9e13, 1.0) is None) is (step < LEAST)
        health.judge(*pair)
    assert "the loss 2.9e+13 is over" in str(health.suspect(60, 2.9e13, 1.0))
    assert "the gradient norm 1000 is over" in str(health.suspect(60, 4.6, 1e3))
    assert health.suspect(60, 4.6, 20.0) is None
    assert "isn't finite" in str(health.suspect(0, math.nan, 1.0))
    again = Health(RecoveryConfig())
    again.restore(health.state())
    assert again.learned(60) == health.learned(60)
    health.accept()
    assert health.suspect(61, 1e9, 1e9) is None and health.suspect(61, math.nan, 1.0) is None
    off = Health(RecoveryConfig(learned_limits=False))
    assert off.suspect(60, math.nan, 1.0) is None


@pytest.mark.parametrize("seed", range(5))
def test_a_text_learned_by_heart_is_not_suspect(seed: int) -> None:
    """As seen of a small text: losses of 1e-5 nats, among which a row's first visit has hundreds of times as much."""
    draw = random.Random(seed)
    losses = [5.7 * math.exp(-step / 25) + draw.lognormvariate(math.log(1e-4), 1.0) for step in range(600)]
    norms = [4.0 * math.exp(-step / 25) + draw.lognormvariate(math.log(1e-4), 0.5) for step in range(600)]
    for at in draw.sample(range(200, 600), 6):
        losses[at], norms[at] = draw.uniform(0.01, 0.3), draw.uniform(0.05, 1.0)
    assert run(losses, norms) == [None] * 600
    assert run([*losses, 2.0], [*norms, 0.1])[-1] is not None
    assert run([*losses, 0.1], [*norms, 1e3])[-1] is not None


def test_limits_are_wide_until_the_schedule_has_warmed_up() -> None:
    """Of steps that are worth four of the schedule's each, 50 of its steps of warm-up end after 13."""
    plain, gaining = (Health(RecoveryConfig(), 50, progress) for progress in (float, lambda step: 4.0 * step))
    for health in (plain, gaining):
        for _ in range(LEAST):
            health.judge(4.0, 1.0)
    assert [plain.learned(step).loss for step in (12, 13, 49, 50)] == [20.0] * 3 + [12.0]
    assert [gaining.learned(step).loss for step in (12, 13, 49, 50)] == [20.0] + [12.0] * 3


def test_an_island_whose_numbers_recur_keeps_the_damage_at_which_all_compare() -> None:
    """Others know nothing of its step: all ranks must compare at the same ones."""
    damage = Damage(kind=COPIES, step=9, keep=8, why="copies differ")
    told: list[str] = []
    nobody: Any = None
    integrity = Integrity(
        Health(RecoveryConfig(compare=False)),
        *(nobody, nobody, Agreement(None), SimpleNamespace(damage=damage)),
        lambda kind, **_fields: told.append(kind),
        lambda kind, **_fields: told.append(f"island: {kind}"),
        rewinds_steps=False,
    )
    integrity._copy_check = cast(Any, SimpleNamespace(due=lambda step: False))
    nan = {"loss": math.nan, "grad_norm": math.nan, "finite": 0.0}
    outcome = cast(StepOutcome, SimpleNamespace(read=lambda: dict(nan), lr=0.1))
    integrity.settled(5, outcome, False, lambda _limits: outcome)
    assert told == ["island: limits_left"] and integrity.due(9) and not integrity.due(8)
