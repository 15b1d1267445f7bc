"""A wrong verdict names tensor, layer, layout and what its pattern of errors points at."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.cli.verify_output import show
from meshwright.errors import LaunchError
from meshwright.proof.compare import EXACT, Deviation, merge_ranks, one_line
from meshwright.proof.reference import measure_batch_spread
from meshwright.proof.verify import random_batches

NAMES = ("embedding.weight", "blocks.0.mix.weight", "blocks.1.mix.weight", "head.weight")


def rank(
    loss: float, gradients: dict[str, float], weights: dict[str, float] | None = None, bound: float = EXACT
) -> dict[str, Any]:
    def gaps(errors: dict[str, float]) -> dict[str, Deviation]:
        return {name: Deviation(error=errors.get(name, 0.0), bound=bound) for name in NAMES}

    one = Deviation(error=loss, bound=bound)
    return {"loss": one, "norm": one, "gradients": gaps(gradients), "weights": gaps(weights or {})}


class SometimesNotANumber(nn.Module):
    """Its output has a NaN under some random states alone; everything else of it is always the same."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = torch.ones(*tokens.shape, 5)
        logits[0, 0, 0] = torch.where(torch.rand(()) < 0.5, torch.nan, 1.0)
        return logits


def test_a_forward_that_sometimes_gives_nan_is_random() -> None:
    batch = random_batches(1, 2, 4, 5, documents=False)[0]
    assert measure_batch_spread(SometimesNotANumber(), lambda module, item: module(item.tokens), batch) == math.inf
    always_nan = nn.Identity()
    assert measure_batch_spread(always_nan, lambda _, item: torch.full((*item.tokens.shape, 5), torch.nan), batch) == 0


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (rank(0.1, dict.fromkeys(NAMES, 0.3)), ["'embedding.weight'", "4 of 4", "its forward computes"]),
        (rank(0.0, {NAMES[1]: 0.38}), ["in blocks.0.mix", "3.8e-01", "1 of 4", "ranks: blocks.0.mix.weight"]),
        (rank(0.0, dict.fromkeys(NAMES, 0.3)), ["its backward does something else"]),
        (rank(0.0, {}, {NAMES[2]: 0.2}), ["trained value of 'blocks.1.mix.weight'", "the optimizer's step differs"]),
        (rank(0.1, {}), ["the loss is off by 1.0e-01", "every gradient and weight agrees"]),
    ],
)
def test_it_says_what_differs_and_what_that_points_at(found: dict[str, Any], words: list[str]) -> None:
    verdict = merge_ranks("tp=2", [rank(0.0, {}), found])
    assert verdict.outcome == "wrong" and verdict.wrong.startswith("under tp=2 ")
    for word in words:
        assert word in verdict.wrong
    assert merge_ranks("tp=2", [rank(0.0, {})]).wrong == ""


def test_outside_of_float64_a_wrong_verdict_names_error_and_allowance_and_each_kind_its_bound() -> None:
    good, bad = rank(0.01, {}, bound=0.02), rank(0.01, {NAMES[1]: 0.38}, bound=0.02)
    verdict = merge_ranks("tp=2", [good, bad])
    assert "'blocks.0.mix.weight' (in blocks.0.mix) is off by 3.8e-01 (allowed 2.0e-02)" in verdict.wrong
    assert "1 of 4 weights are off by more than rounding explains" in verdict.wrong
    assert verdict.to_json()["bounds"] == dict.fromkeys(("loss", "gradient", "norm", "weight"), 0.02)
    assert "bounds" not in merge_ranks("tp=2", [rank(0.0, {})]).to_json()


def test_a_printed_line_has_errors_and_outside_of_float64_their_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    show(merge_ranks("tp=2", [rank(0.01, {NAMES[1]: 0.38}, bound=0.02)]), 4)
    line = capsys.readouterr().err.splitlines()[0]
    assert line.startswith("  FAIL     tp=2  loss 1.0e-02<=2.0e-02  gradient 3.8e-01>2.0e-02  norm 1.0e-02<=2.0e-02  ")
    show(merge_ranks("tp=2", [rank(0.0, {})]), 4)
    line = capsys.readouterr().err.splitlines()[0]
    assert line.startswith("  pass     tp=2  loss 0.0e+00  gradient 0.0e+00  norm 0.0e+00  weight 0.0e+00  worst ")


def test_the_worst_of_all_ranks_is_the_one_that_takes_most_of_its_bound() -> None:
    one, other = rank(0.0, {NAMES[0]: 0.3}, bound=1.0), rank(0.0, {NAMES[0]: 0.2, NAMES[1]: 0.1}, bound=0.25)
    verdict = merge_ranks("tp=2", [one, other])
    assert verdict.passed and verdict.worst.name == NAMES[0]
    assert (verdict.grad_error, verdict.bounds["gradient"]) == (0.2, 0.25)
    assert not merge_ranks("tp=2", [one, rank(math.inf, {}, bound=1.0)]).passed
    assert not merge_ranks("tp=2", [one, rank(math.nan, {}, bound=1.0)]).passed


def test_an_error_of_many_lines_is_told_by_its_first() -> None:
    text = "rank 1 failed\nTraceback:\n  x = 1\nCheckpointError: 3 tensors, then 2\nmany\nexamples."
    assert one_line(LaunchError(text)) == "LaunchError: CheckpointError: 3 tensors, then 2"
    assert one_line(ValueError()) == "ValueError: no message"
