"""Losses that aren't means over tokens, over two models: equal to one device under every layout."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div
from transformers import T5Config, T5ForConditionalGeneration

from examples import dpo, grpo
from meshwright.errors import ConfigError
from meshwright.strategy import HybridParallelStrategy, shared_analysis
from meshwright.strategy.loop_proof import ExactDevice
from tests.ranks.group import run_ranks
from tests.tiers import further

LAYOUTS = (
    "tp=2,sequence=true",
    "shard=2,zero=3",
    "replicate=2",
    "shard=2,zero=1",
    "shard=2,zero=2",
    "tp=2",
    "shard=2,zero=3,tp=2",
)


def preference(strategy: Any, other: Any) -> list[torch.Tensor]:
    return [item for pair in dpo.train(strategy, other) for item in pair]


def distillation(strategy: Any, other: Any) -> list[torch.Tensor]:
    student, teacher = dpo.build(), dpo.build().requires_grad_(False).eval()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.5)
    teacher = other.shard(teacher)
    student, optimizer = strategy.shard(student, torch.optim.SGD(student.parameters(), lr=0.5))
    index, count = strategy.reader
    ids = dpo.pairs()[0][0].chunk(count)[index]
    losses = []
    for _ in range(3):
        with torch.no_grad():
            wanted = teacher(input_ids=ids).logits.log_softmax(-1)
        scores = student(input_ids=ids).logits.log_softmax(-1)
        loss = kl_div(scores, wanted, reduction="none", log_target=True).sum(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


class Translator(torch.nn.Module):
    """An encoder with a decoder that can be called with tokens alone."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
        self.t5 = T5ForConditionalGeneration(T5Config(vocab_size=54, decoder_start_token_id=0, **sizes))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        decoded = (tokens if targets is None else targets).roll(1, 1)
        return self.t5(input_ids=tokens, decoder_input_ids=decoded).logits


def translation(strategy: Any, _other: Any) -> list[torch.Tensor]:
    torch.manual_seed(7)
    model = Translator().double()
    tokens, targets = torch.randint(54, (4, 16)), torch.randint(54, (4, 12))
    model, optimizer = strategy.shard(model, torch.optim.SGD(model.parameters(), lr=0.05))
    index, count = strategy.reader
    losses = []
    for _ in range(3):
        own = targets.chunk(count)[index]
        loss = cross_entropy(model(tokens.chunk(count)[index], own).flatten(0, 1), own.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def policy_gradients(strategy: Any, _other: Any) -> list[torch.Tensor]:
    return [item for pair in islice(grpo.train(strategy), 4) for item in pair]


LOOPS = (preference, distillation, policy_gradients)


def reference(_rank: int, loop: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    device = ExactDevice()
    losses = [float(loss) for loss in loop(device, ExactDevice())]
    assert device.model is not None
    return losses, {name: item.detach().clone() for name, item in device.model.named_parameters()}


def on_ranks(
    _rank: int, text: str, wanted: dict[str, Any], loops: tuple[Any, ...] = LOOPS
) -> dict[str, tuple[list[float], float]]:
    """Returns the losses of each loop and the largest error of this rank's parts of weights."""
    outcome = {}
    for loop in loops:
        strategy = HybridParallelStrategy(text)
        losses = [strategy.mean(loss) for loss in loop(strategy, HybridParallelStrategy(text))]
        weights = [item for item in strategy.weights if item.local.numel()]
        gaps = [item.local - item.extract_shard(wanted[loop.__name__][item.name]) for item in weights]
        outcome[loop.__name__] = losses, max(float(gap.abs().max()) for gap in gaps)
    return outcome


@pytest.mark.parametrize("text", further(LAYOUTS))
def test_losses_of_pairs_and_of_a_teacher_equal_one_device(text: str) -> None:
    expected = {loop.__name__: run_ranks(1, reference, loop)[0] for loop in LOOPS}
    weights = {name: item[1] for name, item in expected.items()}
    for outcome in run_ranks(4 if "shard" in text and "tp" in text else 2, on_ranks, text, weights):
        for name, (losses, gap) in outcome.items():
            assert losses == pytest.approx(expected[name][0], rel=1e-9, abs=1e-12), name
            assert gap < 1e-9, name


def unwrapped(_rank: int) -> str:
    with pytest.raises(ConfigError) as refusal:
        HybridParallelStrategy("tp=2").shard(Translator().t5)
    return str(refusal.value)


def test_an_encoder_with_a_decoder_equals_one_device_inside_a_module_of_tokens() -> None:
    (losses, weights), *_ = run_ranks(1, reference, translation)
    for outcome in run_ranks(2, on_ranks, "tp=2", {"translation": weights}, (translation,)):
        measured, gap = outcome["translation"]
        assert measured == pytest.approx(losses, rel=1e-9)
        assert gap < 1e-9
    assert "a module around it whose forward computes logits of tokens (B, S) alone" in run_ranks(2, unwrapped)[0]


def failing_analysis(rank: int) -> str:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a layer divides by zero")

    shared_analysis._analyse = fail  # type: ignore[assignment]
    try:
        HybridParallelStrategy("tp=2").shard(dpo.build())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_failure_of_the_first_rank_alone_ends_the_others() -> None:
    first, second = run_ranks(2, failing_analysis, timeout=40)
    assert first == "ZeroDivisionError: a layer divides by zero"
    assert second.startswith("PlanError: the first rank couldn't read the model for tp=2")
    assert second.endswith("ZeroDivisionError: a layer divides by zero")
