"""A wrong verdict names tensor, layer, layout and what its pattern of errors points at."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.errors import LaunchError
from meshwright.proof.compare import merged, one_line

NAMES = ("embedding.weight", "blocks.0.mix.weight", "blocks.1.mix.weight", "head.weight")


def rank(loss: float, gradients: dict[str, float], weights: dict[str, float] | None = None) -> dict[str, Any]:
    clean = dict.fromkeys(NAMES, 0.0)
    return {"loss": loss, "norm": loss, "gradients": clean | gradients, "weights": clean | (weights or {})}


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
    verdict = merged("tp=2", [rank(0.0, {}), found], 1e-9)
    assert verdict.outcome == "wrong" and verdict.wrong.startswith("under tp=2 ")
    for word in words:
        assert word in verdict.wrong
    assert merged("tp=2", [rank(0.0, {})], 1e-9).wrong == ""


def test_an_error_of_many_lines_is_told_by_its_first() -> None:
    text = "rank 1 failed\nTraceback:\n  x = 1\nCheckpointError: 3 tensors, then 2\nmany\nexamples."
    assert one_line(LaunchError(text)) == "LaunchError: CheckpointError: 3 tensors, then 2"
    assert one_line(ValueError()) == "ValueError: no message"
