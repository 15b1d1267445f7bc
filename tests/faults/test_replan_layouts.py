"""A rank that is slowed changes the layout of a run of one node or two; training stays the same."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from meshwright.spec.layout import Layout
from tests.runs import Running, call, curve, events, rows, words, write_corpus

pytestmark = [pytest.mark.slow, pytest.mark.long]
ROW_S = 0.01
"""Seconds that a layer's forward of a row takes on a fast rank: far above what the tiny model takes."""
STEPS = 60


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("layouts")
    write_corpus(root / "corpus.txt")
    return root


@pytest.fixture(scope="module")
def alone(root: Path) -> dict[int, tuple[float, float]]:
    """The curve of one undisturbed rank."""
    argv = words(root, "alone", "--model.layers", "4", "--train.steps", str(STEPS), "--checkpoint.every", "0")
    assert call(argv, root / "alone.log")[0] == 0, (root / "alone.log").read_text()
    return curve(root / "alone")


def slow_down() -> None:
    """Makes every layer cost time for each row, three times as much on rank 1."""
    forward = GPT2Block.forward

    def forward_slowly(self: GPT2Block, hidden_states: torch.Tensor, *args, **named):  # type: ignore[no-untyped-def]
        if dist.is_initialized():
            time.sleep(ROW_S * hidden_states.shape[0] * (3.0 if dist.get_rank() == 1 else 1.0))
        return forward(self, hidden_states, *args, **named)

    GPT2Block.forward = forward_slowly


def check_run(run: Path, alone: dict[int, tuple[float, float]], ranks: int) -> None:
    """Checks that the layout changed for the better, and that nothing else did."""
    replanned = events(run, "replanned")[0]
    before, after = Layout.parse(replanned["before"]), Layout.parse(replanned["layout"])
    assert before != after and after.world == ranks and len(replanned["speeds"]) == ranks
    present_s, priced_s = replanned["priced_s"]
    assert priced_s < 0.9 * present_s and replanned["gain_s"] > 2.0 * replanned["cost_s"] > 0.0
    # What a rank computed is in the price of the present layout, so it is near what was measured.
    assert present_s == pytest.approx(replanned["step_s"], rel=0.35)
    came = events(run, "replan_measured")[0]
    assert came["layout"] == str(after) and came["measured_s"] < 0.85 * came["before_s"]
    # No step was lost or done again; each trained the same global batch.
    assert [row["step"] for row in rows(run)] == list(range(1, STEPS + 1))
    assert {row["layout"] for row in rows(run)} >= {str(before), str(after)}
    np.testing.assert_allclose(list(curve(run).values()), list(alone.values()), rtol=2e-4)


def test_a_slow_rank_changes_the_layout(root: Path, alone: dict[int, tuple[float, float]]) -> None:
    options = ("--model.layers", "4", "--train.steps", str(STEPS), "--checkpoint.every", "0", "--train.replan", "5")
    argv = words(root, "node", *options, layout="auto", devices=2)
    assert call(argv, root / "node.log", before=slow_down)[0] == 0, (root / "node.log").read_text()
    check_run(root / "node", alone, 2)


def test_a_slow_rank_of_another_node_changes_the_layout(root: Path, alone: dict[int, tuple[float, float]]) -> None:
    # Rank 1 is the follower's: the leader knows its speed by message alone.
    options = ("--model.layers", "4", "--train.steps", str(STEPS), "--checkpoint.every", "0", "--train.replan", "5")
    nodes = []
    for node in (0, 1):
        place = ("--nodes", "2", "--node", str(node), "--meet", "127.0.0.1")
        argv = words(root, "nodes", *place, *options, layout="auto", devices=2)
        nodes.append(Running(argv, root / f"nodes-{node}.log", before=slow_down))
    try:
        assert [node.wait() for node in nodes] == [0, 0], (root / "nodes-0.log").read_text()
    finally:
        for node in nodes:
            if node.status is None:
                node.kill()
    check_run(root / "nodes", alone, 2)
