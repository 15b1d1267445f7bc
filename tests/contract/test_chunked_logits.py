"""Logits in chunks: every layout equals one device with whole logits, and models whose head isn't linear keep them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshwright.errors import PlanError
from meshwright.jobs.train import logits_header_row
from meshwright.models.analysis.clone import make_clone
from meshwright.models.analysis.head_trial import HeadTrial
from meshwright.models.analysis.logit_map import LogitMap
from meshwright.models.analysis.objective_trial import try_forward
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.parallel.head_cut import HeadCut
from meshwright.proof.reference import OptimizerRecipe
from meshwright.proof.verify import Case, random_batches, verify
from meshwright.spec.layout import Layout
from meshwright.train.chunked_loss import head_cross_entropy_sums
from meshwright.train.model_analysis import analyse_model
from tests.tiers import cases

torch.set_num_threads(1)

SEQUENCE, VOCAB, ROWS = 12, 61, 8
SIZES = {"layers": 4, "width": 32, "heads": 4}
MODELS = {
    "llama": ModelConfig(name="llama", **SIZES),
    "gpt2": ModelConfig(name="gpt2", **SIZES),
    "gemma2": ModelConfig(name="gemma2", **SIZES),
    "cohere": ModelConfig(name="cohere", **SIZES),
}
"""A plain head, a tied one, one behind a soft limit, a tied one with a factor."""
LAYOUTS = (
    "loss_chunk=5", "loss_chunk=7,recompute=full,microbatches=2", "shard=2,zero=3,loss_chunk=6",
    "shard=2,zero=1,loss_chunk=5,microbatches=2", "replicate=2,loss_chunk=11", "tp=2,loss_chunk=7",
    "tp=2,sequence=true,loss_chunk=7", "cp=2,loss_chunk=3", "pp=2,microbatches=2,loss_chunk=4",
    "pp=2,microbatches=4,schedule=gpipe,loss_chunk=4", "pp=2,microbatches=4,schedule=zbv,loss_chunk=4",
    "pp=2,microbatches=4,schedule=zerobubble,loss_chunk=4", "tp=2,loss_chunk=off",
)  # fmt: skip
MANY = ("pp=2,shard=2,zero=2,microbatches=2,loss_chunk=4", "tp=2,shard=2,zero=3,loss_chunk=5", "cp=2,tp=2,loss_chunk=5")
FIRST = {"llama": LAYOUTS, "gemma2": ("loss_chunk=5", "tp=2,loss_chunk=7"), "gpt2": LAYOUTS[5:10:2]}
"""What is tried each time."""


def build(name: str) -> BuiltModel:
    config = MODELS.get(name) or ModelConfig(name=f"{__name__}:{name}")
    return build_meta(config, vocab=VOCAB, context=SEQUENCE)


@pytest.mark.parametrize(
    ("name", "texts"),
    cases([*FIRST.items(), *((name, (*LAYOUTS, *MANY)) for name in MODELS)], (1, 2), extended=(0,)),
    ids=lambda item: item if isinstance(item, str) else str(len(item)),
)
def test_every_layout_equals_one_device_with_whole_logits(name: str, texts: tuple[str, ...]) -> None:
    batches = random_batches(1, ROWS, SEQUENCE, VOCAB, documents=True)
    case = Case(build=lambda: build(name), batches=batches, recipe=OptimizerRecipe(), timeout_s=250)
    verdicts = verify(case, [Layout.parse(f"{text},precision=float64") for text in texts])
    assert [(verdict.layout, verdict.refused) for verdict in verdicts if not verdict.passed] == []
    assert all(verdict.worst.error < 1e-9 for verdict in verdicts)


class Tail(nn.Module):
    """Tokens to logits through one layer and a head; ``tail`` is what its code does to the head's product."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, 16)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(16, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.tail(self.head(x), tokens)

    def tail(self, product: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return product.float()


class Scaled(Tail):
    """Multiplies and limits."""

    def tail(self, product: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return 5.0 * torch.tanh(product * 0.5 / 5.0)


class Shifted(Tail):
    """Adds what depends on the tokens."""

    def tail(self, product: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return product + 1e-3 * nn.functional.one_hot(tokens, product.shape[-1])


class Squashed(Tail):
    """Looks linear where logits are small."""

    def tail(self, product: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.asinh(product)


class Twice(Tail):
    """Adds its head's product of another state."""

    def tail(self, product: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return product + self.head(self.embedding(tokens))


class Headless(Tail):
    """Multiplies by its embedding without a module."""

    def __init__(self, vocab: int) -> None:
        super().__init__(vocab)
        del self.head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return x @ self.embedding.weight.T


def tail(vocab: int) -> nn.Module:
    return Tail(vocab)


def scaled(vocab: int) -> nn.Module:
    return Scaled(vocab)


def shifted(vocab: int) -> nn.Module:
    return Shifted(vocab)


def squashed(vocab: int) -> nn.Module:
    return Squashed(vocab)


def twice(vocab: int) -> nn.Module:
    return Twice(vocab)


def headless(vocab: int) -> nn.Module:
    return Headless(vocab)


def trial_of(name: str) -> HeadTrial:
    return try_forward(build(name)).head


@pytest.mark.parametrize(
    ("name", "factor", "limit"),
    [
        ("llama", 1.0, 0.0),
        ("gemma2", 1.0, 30.0),
        ("cohere", 0.0625, 0.0),
        ("tail", 1.0, 0.0),
        ("scaled", 0.5, 5.0),
    ],
)
def test_factor_and_limit_are_those_of_the_models_code(name: str, factor: float, limit: float) -> None:
    head = trial_of(name)
    assert not head.refused and head.name
    assert (head.logit_map.factor, head.logit_map.limit) == pytest.approx((factor, limit), rel=1e-12)


@pytest.mark.parametrize("name", ["shifted", "squashed", "twice", "headless"])
def test_other_code_keeps_whole_logits(name: str) -> None:
    head = trial_of(name)
    assert head.refused and not head.name
    model = build(name)
    with pytest.raises(PlanError, match=r"loss_chunk=4 computes .* leave loss_chunk out"):
        analyse_model(model, Layout.parse("loss_chunk=4"))
    facts = analyse_model(model, Layout.parse("replicate=1"))
    assert head.refused in logits_header_row(Layout(), facts)["logits"]


def test_the_factor_is_the_full_models_not_its_narrow_clones() -> None:
    wide: Any = build_meta(
        ModelConfig(name="granite", layers=2, width=1024, heads=16, ffn=4096), vocab=32000, context=64
    )
    assert not make_clone(wide).full_size and wide.module.config.logits_scaling == 1.0
    # A factor that follows from the width: the clone, built anew from its config, keeps 1.
    wide.module.config.logits_scaling = 8.0
    head = try_forward(wide).head
    assert not head.refused and head.logit_map == LogitMap(0.125)


def test_a_cut_is_off_but_while_it_runs() -> None:
    module = Tail(VOCAB)
    tokens = torch.randint(VOCAB, (2, 5))
    expected = module(tokens)
    cut = HeadCut(module, "head")
    assert torch.equal(module(tokens), expected)
    logits, _ = cut.run(
        lambda: module(tokens),
        lambda head: (nn.functional.linear(head.hidden, head.weight, head.bias), head.hidden),
    )
    assert torch.allclose(logits, expected)
    assert torch.equal(module(tokens), expected)
    with pytest.raises(RuntimeError, match="without calling its head"):
        cut.run(lambda: None, lambda head: (head.hidden, head.hidden))


def test_a_models_own_autocast_is_for_its_product_alone() -> None:
    torch.manual_seed(3)
    module = Tail(VOCAB)
    tokens, targets = torch.randint(VOCAB, (2, 2, 5))

    def call() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module(tokens)

    expected = nn.functional.cross_entropy(call().float().flatten(0, 1), targets.flatten())
    expected.backward()
    gradients = [weight.grad.clone() for weight in module.parameters()]  # type: ignore[union-attr]
    module.zero_grad()
    cut = HeadCut(module, "head")
    loss, _ = cut.run(call, lambda head: head_cross_entropy_sums(head, targets, 0.1, 3, LogitMap()))
    loss.backward()
    # The logits are the same numbers of 16 bits; their gradients are rounded once, to 8 bits of a mantissa.
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for weight, gradient in zip(module.parameters(), gradients, strict=True):
        assert weight.grad is not None and weight.grad.dtype == torch.float32
        assert float((weight.grad - gradient).norm() / gradient.norm()) < 2**-7
