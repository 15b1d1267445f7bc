"""What the code around a list of experts may do, and what is refused: losses, evaluation, autocast, frozen weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional

from meshwright.errors import PlanError
from meshwright.models.analysis.experts import find_experts
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.parallel.expert_list import spread
from meshwright.parallel.moving_buffers import MovingBuffers
from meshwright.proof.reference import OptimizerRecipe
from meshwright.proof.verify import Case, random_batches, verify
from meshwright.spec.layout import Layout
from meshwright.train.model_analysis import analyse_model
from tests.contract.test_expert_lists import VOCAB, Expert, Mixture, Skipping
from tests.contract.test_shared_modules import WIDTH, Block, StackedModel, make_mlp
from tests.tiers import further

HERE = "tests.contract.test_expert_list_callers"


def stack(mixtures: list[nn.Module], vocab: int) -> StackedModel:
    return StackedModel(vocab, [Block(nn.LayerNorm(WIDTH), mixture) for mixture in mixtures])


class Balanced(Mixture):
    """Adds its balance to a list that belongs to nobody."""

    balances: ClassVar[list[torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        Balanced.balances.append(self.router(x).softmax(-1).square().mean())
        return super().forward(x)


class BalancedModel(StackedModel):
    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """tokens, targets: (B, S) int64 to logits (B, S, V) and the loss."""
        Balanced.balances.clear()
        logits = super().forward(tokens)
        entropy = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        return logits, entropy + 0.5 * torch.stack(Balanced.balances).sum()


class StoresBalance(Mixture):
    """Leaves its balance in an attribute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        self.balance = self.router(x).softmax(-1).square().mean()
        return super().forward(x)


class StoredBalanceModel(StackedModel):
    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """tokens, targets: (B, S) int64 to logits (B, S, V) and the loss."""
        logits = super().forward(tokens)
        entropy = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        return logits, entropy + 0.5 * torch.stack([block.mlp.balance for block in self.blocks]).sum()


def stored_balance(vocab: int = VOCAB) -> nn.Module:
    return StoredBalanceModel(vocab, [Block(nn.LayerNorm(WIDTH), StoresBalance()) for _ in range(2)])


class AppendsToArgument(Mixture):
    def forward(self, x: torch.Tensor, seen: dict[str, list[int]]) -> torch.Tensor:  # type: ignore[override]
        """x: (B, S, D) to the same shape."""
        seen["rows"].append(len(x))
        return super().forward(x)


class EvaluatedOtherwise(Mixture):
    """Its loop for inference feeds one expert's output to another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        return super().forward(x) if self.training else self.experts[1](self.experts[0](x))


class Autocast(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).to(x.dtype)


class ReadsAllWeights(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        return super().forward(x) * (1 + sum(item.square().sum() for item in self.experts.parameters()))


class WritesIntoParameter(Mixture):
    """A bias of the router that forward itself moves, held as a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        with torch.no_grad():
            self.bias.add_(0.1)
        return super().forward(x + self.bias)


class Subscripted(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(make_mlp() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        return sum((expert[2](expert[1](expert[0](x))) for expert in self.experts), start=x)  # type: ignore[index]


class MixtureOfMixtures(Mixture):
    def __init__(self) -> None:
        super().__init__(2)
        self.experts, self.top_k = nn.ModuleList(Mixture(2) for _ in range(2)), 1


class ListOfLists(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.ModuleList(Expert() for _ in range(2)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        return sum((self.experts[i][j](x) for i in range(2) for j in range(2)), start=x)  # type: ignore[index]


class SharesWeight(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.experts[0].down.weight = self.shared_experts.down.weight


class OfTheModel(StackedModel):
    """The experts are in no layer."""

    def __init__(self, vocab: int) -> None:
        super().__init__(vocab, [Block(nn.LayerNorm(WIDTH), make_mlp()) for _ in range(2)])
        self.router, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(Expert() for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (B, S) int64 to logits (B, S, V)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        weights = self.router(x).softmax(-1)
        mixed = sum((expert(x) * weights[..., number, None] for number, expert in enumerate(self.experts)), start=x)
        return self.head(self.norm(mixed))


def balanced(vocab: int = VOCAB) -> nn.Module:
    return BalancedModel(vocab, [Block(nn.LayerNorm(WIDTH), Balanced()) for _ in range(2)])


def of_the_model(vocab: int = VOCAB) -> nn.Module:
    return OfTheModel(vocab)


def list_of_two_layers(vocab: int = VOCAB) -> nn.Module:
    first, second = Mixture(), Mixture()
    second.experts = first.experts
    return stack([first, second], vocab)


class BalanceFirst(Skipping):
    """Returns its balance ahead of its output."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """x: (B, S, D) to a number and the same shape."""
        return self.router(x).mean(), super().forward(x)


class SecondOfTwo(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        x = x + self.attention(self.first_norm(x))
        return x + self.mlp(self.norm(x))[1]


def balance_first(vocab: int = VOCAB) -> nn.Module:
    return StackedModel(vocab, [SecondOfTwo(nn.LayerNorm(WIDTH), BalanceFirst()) for _ in range(2)])


class NormInside(Skipping):
    def __init__(self) -> None:
        super().__init__()
        self.inner_norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        return super().forward(self.inner_norm(x))


def frozen_below(vocab: int = VOCAB) -> nn.Module:
    """Trains nothing below the first mixture, and in a mixture the norm that its experts' rows come from."""
    mixtures: list[nn.Module] = [NormInside() for _ in range(2)]
    module = stack(mixtures, vocab).requires_grad_(False)
    for mixture in mixtures:
        mixture.get_submodule("inner_norm").requires_grad_(True)
        mixture.get_submodule("experts").requires_grad_(True)
    return module


REFUSED: dict[str, tuple[Callable[[], nn.Module] | None, str]] = {
    "balanced": (None, "the output is something else"),
    "EvaluatedOtherwise": (EvaluatedOtherwise, "to be evaluated, the output is something else"),
    "Autocast": (Autocast, "in an autocast of its own"),
    "ReadsAllWeights": (ReadsAllWeights, "reads their weights, of which each rank has some"),
    "WritesIntoParameter": (WritesIntoParameter, "writes into its tensor 'bias'"),
    "Subscripted": (Subscripted, "fails: TypeError"),
    "MixtureOfMixtures": (MixtureOfMixtures, "experts inside of an expert of blocks.0.mlp.experts"),
    "ListOfLists": (ListOfLists, "blocks.0.mlp.experts is a list of lists"),
    "SharesWeight": (SharesWeight, "experts.0.down.weight is a weight of blocks.0.mlp.shared_experts.down too"),
    "of_the_model": (None, "the list 'experts' is in no layer"),
}
"""What a model's mixtures are, or None for a function of this file, and a part of the sentence."""


def __getattr__(name: str) -> object:
    """Returns what makes a model of mixtures that are refused."""
    kind = REFUSED.get(name.removeprefix("make_"), (None, ""))[0] if name.startswith("make_") else None
    if kind is None:
        raise AttributeError(name)
    return lambda vocab=VOCAB: stack([kind(), kind()], vocab)


@pytest.mark.parametrize("name", REFUSED)
def test_code_that_cannot_call_experts_of_other_ranks_is_refused(name: str) -> None:
    kind, sentence = REFUSED[name]
    config = ModelConfig(name=f"{HERE}:{'make_' if kind else ''}{name}")
    with pytest.raises(PlanError) as caught:
        analyse_model(build_meta(config, VOCAB, 8), Layout.parse("shard=2,zero=1,ep=2,precision=float64"))
    assert sentence in str(caught.value), caught.value


def test_a_list_of_two_layers_is_refused() -> None:
    config = ModelConfig(name=f"{HERE}:list_of_two_layers")
    with pytest.raises(PlanError, match=r"blocks.0.mlp and blocks.1.mlp both have the list"):
        analyse_model(build_meta(config, VOCAB, 8), Layout.parse("tp=2,ep=2,precision=float64"))


@pytest.mark.parametrize("function", further(["frozen_below", "balance_first"]))
def test_ranks_without_calls_take_part_in_backward(function: str) -> None:
    """Each rank has one row of one token, so some call no expert."""
    case = Case(
        build=partial(build_meta, ModelConfig(name=f"{HERE}:{function}"), VOCAB, 1),
        batches=random_batches(2, 4, 1, VOCAB, documents=False),
        recipe=OptimizerRecipe(),
        timeout_s=100,
    )
    (verdict,) = verify(case, [Layout.parse("shard=4,zero=1,ep=4,precision=float64")])
    assert verdict.passed, verdict


def test_what_the_first_run_appends_to_an_argument_is_taken_back() -> None:
    module = AppendsToArgument()
    (rows,) = find_experts(nn.ModuleDict({"mlp": module}))
    spread(module, rows, (0, 4), MovingBuffers([], []), lambda: None, WIDTH)
    seen: dict[str, list[int]] = {"rows": []}
    module(torch.randn(2, 3, WIDTH), seen)
    assert seen == {"rows": [2]}


def test_a_loss_of_stored_tensors_trains_but_not_in_halves() -> None:
    case = Case(
        build=partial(build_meta, ModelConfig(name=f"{HERE}:stored_balance"), VOCAB, 8),
        batches=random_batches(2, 8, 8, VOCAB, documents=False),
        recipe=OptimizerRecipe(),
        timeout_s=100,
    )
    layout = "shard=2,zero=1,ep=2,precision=float64"
    (whole,), (halves,) = (verify(case, [Layout.parse(text)]) for text in (layout, f"{layout},ep_halves=true"))
    assert whole.passed, whole
    assert "each would find in 'blocks.0.mlp.balance' what the other stored" in halves.refused, halves
