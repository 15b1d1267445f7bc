"""Loops of fine-tuning equal one device: targets that don't count, rows without any, preferences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from meshwright.errors import DataError
from meshwright.spec.layout import Layout
from meshwright.strategy.hybrid import HybridParallelStrategy
from meshwright.strategy.loop_proof import LoopCase, LoopVerdict, verify_loop
from meshwright.strategy.one_device import OneDevice
from tests import masked_loops
from tests.ranks.group import run_ranks
from tests.tiers import further


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


Batches = list[tuple[torch.Tensor, torch.Tensor]]


def by_hand(loss: Callable[..., torch.Tensor], batches: Batches, with_head: bool) -> list[float]:
    model, optimizer = masked_loops.model_and_optimizer()
    if not with_head:
        model.head.weight.data.zero_()  # type: ignore[union-attr, operator]
    losses = []
    for tokens, labels in batches:
        whole = loss(model(tokens), labels)
        whole.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(whole.item())
    return losses


def train_on_ranks(
    _rank: int, text: str, microbatches: int, loss: Callable[..., torch.Tensor], batches: Batches, with_head: bool
) -> list[float] | str:
    torch.set_default_dtype(torch.float64)
    strategy = HybridParallelStrategy(text)
    try:
        return masked_loops.train_pairs(strategy, loss, batches, microbatches, with_head)
    except DataError as error:
        return str(error)


@pytest.mark.parametrize("with_head", [True, False])
@pytest.mark.parametrize(("text", "microbatches"), further([("pp=2", 4), ("replicate=2", 1), ("pp=2,replicate=2", 2)]))
@pytest.mark.parametrize("loss", [masked_loops.row_mean, masked_loops.entropy])
def test_a_mean_over_rows_and_one_over_targets_train_as_all_rows_at_once(
    loss: Callable[..., torch.Tensor], text: str, microbatches: int, with_head: bool
) -> None:
    # the first two batches can't tell the two apart; nor can outputs of a head of zeros, where no row is empty
    unequal = [masked_loops.labelled_rows(seed, with_empty=False) for seed in range(masked_loops.STEPS)]
    batches = masked_loops.mixed_batches() if with_head else unequal
    found = run_ranks(Layout.parse(text).world, train_on_ranks, text, microbatches, loss, batches, with_head)
    torch.set_default_dtype(torch.float64)
    try:
        expected = by_hand(loss, batches, with_head)
    finally:
        torch.set_default_dtype(torch.float32)
    assert [losses == pytest.approx(expected, rel=1e-10) for losses in found] == [True] * len(found), (found, expected)


@pytest.mark.parametrize(
    ("text", "microbatches"), further([("pp=2", 4), ("replicate=2", 1), ("pp=2,replicate=2", 2)], (0, 1))
)
@pytest.mark.parametrize("loss", [masked_loops.padding_mean, masked_loops.entropy_sum])
def test_a_loss_that_is_neither_is_refused_on_every_rank(
    loss: Callable[..., torch.Tensor], text: str, microbatches: int
) -> None:
    batches = [(tokens, labels.clamp(min=0)) for tokens, labels in masked_loops.mixed_batches()[2:]]
    found = run_ranks(Layout.parse(text).world, train_on_ranks, text, microbatches, loss, batches, True)
    assert all("by their rows or by their targets other than -100, and is neither" in str(text) for text in found), (
        found
    )


def test_micro_batches_without_a_target_by_a_mask_of_the_loss_are_refused() -> None:
    tokens = masked_loops.labelled_rows(0)[0].clamp(min=1)
    empty = tokens.clone()
    # neither the fullest nor the emptiest by -100: the trial of step 3 isn't made
    empty[4:6] = 0
    batches = [(tokens, tokens), (tokens, tokens), (tokens, empty)]
    found = run_ranks(2, train_on_ranks, "pp=2", 4, masked_loops.padding_mean, batches, True)
    assert all("it is NaN on some micro-batches and finite on others" in str(text) for text in found), found
