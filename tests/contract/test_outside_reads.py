"""Code that reads a layer's weights while the layer isn't running is refused where shards are gathered by layer."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from meshwright.errors import PlanError
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.proof.reference import OptimizerRecipe
from meshwright.proof.verify import Case, random_batches, verify
from meshwright.spec.layout import Layout
from meshwright.strategy import HybridParallelStrategy
from meshwright.train.model_analysis import ModelAnalysis, analyse_model
from tests.objectives import Backbone, entropy
from tests.ranks.group import run_ranks
from tests.tiers import further

VOCAB, CONTEXT = 61, 12


class Behind(Backbone):
    """Balances a gate of its last block by what comes out of it."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor):  # type: ignore[no-untyped-def]
        x = self.hidden(tokens)
        logits = self.head(x)
        spread = self.blocks[1].up(x).logsumexp(-1).square().mean()
        return {"logits": logits, "loss": entropy(logits, targets) + 0.1 * spread, "spread": spread}


class Ahead(Backbone):
    """Asks its last block before that runs."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        hint = self.blocks[1].down(self.blocks[1].up(x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + hint))


class Unhooked(Backbone):
    """Calls the forward of its blocks past all their hooks."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block.forward(x)
        return self.head(self.norm(x))


class Viewed(Backbone):
    """Reads a view of a weight that its first block has left there, and no module of it."""

    def __init__(self, vocab: int) -> None:
        super().__init__(vocab)
        self.blocks[0].register_forward_hook(self.keep)

    def keep(self, block: nn.Module, _args: object, _output: object) -> None:
        self.view = block.out.weight[:2]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(tokens)) * (1 + self.view.mean())


class Asking(Backbone):
    """Asks for the type and the width of a block's weights, of which a shard knows too."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weight = self.blocks[1].up.weight
        x = self.embedding(tokens).to(weight.dtype).to(weight.device) * weight.shape[1] / weight.size(1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def behind(vocab: int = VOCAB) -> nn.Module:
    return Behind(vocab)


def ahead(vocab: int = VOCAB) -> nn.Module:
    return Ahead(vocab)


def unhooked(vocab: int = VOCAB) -> nn.Module:
    return Unhooked(vocab)


def viewed(vocab: int = VOCAB) -> nn.Module:
    return Viewed(vocab)


def asking(vocab: int = VOCAB) -> nn.Module:
    return Asking(vocab)


def build(name: str) -> BuiltModel:
    return build_meta(ModelConfig(name=f"{__name__}:{name}"), vocab=VOCAB, context=CONTEXT)


BEHIND = (
    ("shard=2,zero=3", "shard=2,zero=3,offload=parameters", "shard=2,tp=2,zero=3"),
    ("replicate=2", "shard=2,zero=2", "shard=2,zero=1", "offload=parameters", "pp=2,shard=2,zero=3,microbatches=2"),
)
AHEAD = (
    ("shard=2,zero=3", "shard=2,zero=1", "offload=parameters", "shard=2,zero=2,precision=bf16"),
    ("replicate=2", "replicate=2,precision=bf16"),
)
CASES = {
    "behind": ("'blocks.1.up.weight' is read after the call of its layer 'blocks.1'.*nearest.*zero=2", *BEHIND),
    "viewed": ("'blocks.0.out.weight' is read after the call of its layer 'blocks.0'.*nearest.*zero=2", *BEHIND),
    "ahead": ("'blocks.1.up.weight' is read before a call of its layer 'blocks.1'.*nearest.*replicate", *AHEAD),
    "unhooked": (
        "'blocks.0.norm.weight' is read before a call of its layer 'blocks.0' .its forward alone is none",
        *AHEAD,
    ),
    "asking": ("", (), (*BEHIND[0], *AHEAD[0])),
}


@pytest.mark.parametrize("name", CASES)
def test_reads_outside_of_a_layer_are_refused_where_it_has_shards(name: str) -> None:
    reason, refused, allowed = CASES[name]
    built, analysis = build(name), ModelAnalysis(trial=analyse_model(build(name), Layout()).trial)
    for text in refused:
        with pytest.raises(PlanError, match=reason):
            analyse_model(built, Layout.parse(text), analysis)
    for text in allowed:
        if "pp" not in text or name == "behind":
            analyse_model(built, Layout.parse(text), analysis)


def custom_loop(_rank: int, name: str, text: str) -> float:
    """Trains a step in a loop of one's own; returns the loss over all readers."""
    torch.manual_seed(0)
    tokens, targets = torch.randint(0, VOCAB, (2, 4, CONTEXT))
    strategy = HybridParallelStrategy(text)
    module = strategy.shard(globals()[name]().double())
    index, count = strategy.reader
    mine, wanted = tokens.chunk(count)[index], targets.chunk(count)[index]
    output = module(mine, wanted) if name == "behind" else module(mine)
    loss = output["loss"] if name == "behind" else entropy(output, wanted)
    loss.backward()
    return strategy.mean(loss.detach())


@pytest.mark.parametrize("name", further(CASES, (0, 4)))
def test_a_custom_loop_refuses_them_in_its_first_forward(name: str) -> None:
    reason, refused, allowed = CASES[name]
    told = "a view of a layer's weight.* is read after the call.*nearest.*zero=2" if name == "viewed" else reason
    for text in ("shard=2,zero=3", "shard=2,zero=1"):
        if text in refused:
            with pytest.raises(PlanError, match=told):
                run_ranks(2, custom_loop, name, text)
        else:
            assert text in allowed
            whole = run_ranks(1, custom_loop, name, "replicate=1")
            assert run_ranks(2, custom_loop, name, text) == pytest.approx([*whole, *whole], rel=1e-12)


@pytest.mark.slow
def test_a_read_behind_a_layer_equals_one_device_where_it_is_allowed() -> None:
    batches = random_batches(1, 8, CONTEXT, VOCAB, documents=False)
    case = Case(build=partial(build, "behind"), batches=batches, recipe=OptimizerRecipe(), timeout_s=50)
    layouts = [Layout.parse(f"{text},precision=float64") for text in ("shard=2,zero=2", BEHIND[1][-1])]
    assert [(v.layout, v.refused, v.worst) for v in verify(case, layouts) if not v.passed] == []
