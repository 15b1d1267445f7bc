"""Sweeps: which combinations of values are run, and in which order they are told."""

from __future__ import annotations

import pytest

from meshwright.errors import ConfigError
from meshwright.jobs.sweep import SweepRow, parse_sweep, sort_rows


def test_combinations_are_all_pairs_first_key_slowest() -> None:
    """Two keys of two and three values make six runs."""
    combinations = parse_sweep(["optimizer.lr=1e-3,3e-4", "--train.batch=4,8,16"])
    pairs = [(item["optimizer.lr"], item["train.batch"]) for item in combinations]
    assert pairs == [(rate, batch) for rate in ("1e-3", "3e-4") for batch in ("4", "8", "16")]


@pytest.mark.parametrize("word", ["optimizer.lr", "=1", "optimizer.lr=", "optimizer.lr=1,1", "optimizer.lr=1,,2"])
def test_other_forms_are_refused(word: str) -> None:
    """A key without values, or a value that is there twice, names what to write."""
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        parse_sweep([word])


def test_a_key_twice_is_refused() -> None:
    """The second would replace the first in silence."""
    with pytest.raises(ConfigError, match="each key once"):
        parse_sweep(["train.batch=4", "train.batch=8"])


def test_best_loss_first_and_failed_runs_last() -> None:
    """A run without a validation loss isn't the best one."""
    rows = [
        SweepRow(settings={}, run=name, state="finished", step=1, loss=1.0, validation_loss=validation, step_s=1.0)
        for name, validation in (("worse", 2.0), ("failed", None), ("best", 0.0))
    ]
    assert [row.run for row in sort_rows(rows)] == ["best", "worse", "failed"]
