"""Layers move away from a slow rank of a pipeline that trains, by a new start of its ranks; training stays the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from meshwright.spec.layout import Layout
from tests.runs import call, curve, events, rows, words, write_corpus

pytestmark = [pytest.mark.slow, pytest.mark.long]
LAYER_S = 0.05
"""Seconds that a layer's forward of a micro-batch takes on a fast rank: far above what the tiny model takes."""

STEPS = 60


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("replan")
    write_corpus(root / "corpus.txt")
    return root


def slowed(factor: float) -> Callable[[], None]:
    """Returns what makes every layer cost time, a multiple of it on rank 1."""

    def plant() -> None:
        forward = GPT2Block.forward

        def forward_slowly(self: GPT2Block, *args, **named):  # type: ignore[no-untyped-def]
            if dist.is_initialized():
                time.sleep(LAYER_S * (factor if dist.get_rank() == 1 else 1.0))
            return forward(self, *args, **named)

        GPT2Block.forward = forward_slowly

    return plant


def run(root: Path, name: str, steps: int, factor: float, *more: str) -> Path:
    options = ("--model.layers", "6", "--train.steps", str(steps), "--checkpoint.every", "0", *more)
    layout = "pp=2,microbatches=4,precision=float64"
    argv = words(root, name, *options, layout=layout, devices=2)
    assert call(argv, root / f"{name}.log", before=slowed(factor))[0] == 0, (root / f"{name}.log").read_text()
    return root / name


def test_layers_move_away_from_a_slow_rank_once_and_the_curve_stays(root: Path) -> None:
    # Long enough that the gain exceeds twice what a start takes on a loaded machine.
    moved = run(root, "moved", STEPS, 2.0, "--train.replan", "5")
    even = run(root, "even", STEPS, 0.0)
    replanned = events(moved, "replanned")
    assert len(replanned) == 1, replanned
    layers = Layout.parse(replanned[0]["layout"]).split.layers
    assert sum(layers) == 6 and layers[0] > layers[1], layers
    assert replanned[0]["gain_s"] > 2.0 * replanned[0]["cost_s"] > 0.0
    # What was expected is held against what came, and it is faster.
    (came,) = events(moved, "replan_measured")
    assert came["layout"] == replanned[0]["layout"] and came["measured_s"] < came["before_s"]
    assert came["cost_s"] > 0.0
    assert {row["layout"] for row in rows(moved)} > {replanned[0]["layout"]}
    # No step was lost or done again, and the same training: the order of a sum in float64 is all that differs.
    assert [row["step"] for row in rows(moved)] == list(range(1, STEPS + 1))
    np.testing.assert_allclose(list(curve(moved).values()), list(curve(even).values()), rtol=1e-9)


def test_nothing_moves_where_it_does_not_pay(root: Path) -> None:
    # Equal ranks; and a slow one in a run that ends before a new start would pay.
    assert not events(run(root, "equal", 40, 1.0, "--train.replan", "5"), "replanned")
    assert not events(run(root, "short", 7, 2.0, "--train.replan", "5"), "replanned")
