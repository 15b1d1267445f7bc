"""Loops of fine-tuning equal one device: targets that don't count, rows without any, preferences."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshwright.spec.layout import Layout
from meshwright.strategy.loop_proof import LoopCase, LoopVerdict, verify_loop
from meshwright.strategy.one_device import OneDevice
from tests import masked_loops


def prove(function: str, *texts: str) -> list[LoopVerdict]:
    case = LoopCase(source=f"{Path(masked_loops.__file__)}:{function}", timeout_s=50)
    return verify_loop(case, [Layout.parse(text) for text in texts])


def test_steps_weigh_micro_batches_and_readers_by_their_targets() -> None:
    verdicts = prove("steps", "pp=2", "replicate=2", "shard=2,zero=3", "tp=2", "replicate=2,pp=2")
    assert [verdict for verdict in verdicts if not verdict.passed] == []


def test_preferences_train_as_on_one_device() -> None:
    verdicts = prove("preferences", "replicate=2", "shard=2,zero=1", "shard=2,zero=3", "tp=2")
    assert [verdict for verdict in verdicts if not verdict.passed] == []


def test_one_device_trains_as_a_loop_by_hand() -> None:
    """The reference's own `step` is held against plain torch, so that the proof isn't of itself."""
    torch.set_default_dtype(torch.float64)
    try:
        losses = masked_loops.steps(OneDevice())
        model, optimizer = masked_loops.model_and_optimizer()
        for step, loss in enumerate(losses):
            tokens, labels = masked_loops.labelled_rows(step)
            logits, total, count = model(tokens), 0.0, 0
            for row in range(len(tokens)):
                for place in range(tokens.shape[1] - 1):
                    if labels[row, place + 1] != -100:
                        total = total - logits[row, place].log_softmax(-1)[labels[row, place + 1]]
                        count += 1
            expected = total / count  # type: ignore[operator]
            expected.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            assert loss == pytest.approx(float(expected.detach()), rel=1e-12)
    finally:
        torch.set_default_dtype(torch.float32)
