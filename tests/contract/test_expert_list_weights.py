"""Weights of experts in a list: trained on one rank alone, read or called elsewhere, adapted, of other types."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from meshwright.errors import PlanError
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.structure import read_structure
from meshwright.proof.reference import OptimizerRecipe
from meshwright.proof.verify import Case, random_batches, verify
from meshwright.spec.layout import Layout
from meshwright.train.model_analysis import analyse_model
from tests.contract.test_expert_lists import EXPERTS, VOCAB, Expert, Mixture
from tests.contract.test_shared_modules import WIDTH, Block, StackedModel

HERE = "tests.contract.test_expert_list_weights"


def stack(mixtures: list[nn.Module], vocab: int) -> StackedModel:
    return StackedModel(vocab, [Block(nn.LayerNorm(WIDTH), mixture) for mixture in mixtures])


def head_and_one_expert(vocab: int = VOCAB) -> nn.Module:
    """One expert of the second rank is trained, and what lies behind it."""
    module = stack([Mixture(), Mixture()], vocab).requires_grad_(False)
    module.get_submodule("blocks.1.mlp.experts.2").requires_grad_(True)
    module.head.requires_grad_(True)
    return module


class PeftLike(nn.Module):
    """Hands on all arguments to a model of one's own, as peft's PeftModel does, beside adapters of low rank."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_model = base.requires_grad_(False)
        for module in list(base.modules()):
            if isinstance(module, Expert):
                module.down = Adapter(module.down)  # type: ignore[assignment]

    def get_base_model(self) -> nn.Module:
        """Returns what is wrapped."""
        return self.base_model

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the model's."""
        return self.base_model(*args, **kwargs)


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.low, self.high = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., K) to (..., N)."""
        return self.base_layer(x) + self.high(self.low(x))


def adapted(vocab: int = VOCAB) -> nn.Module:
    return PeftLike(stack([Mixture(), Mixture()], vocab))


class ByChildren(Mixture):
    """Goes through the modules below the list, not through the list."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        weights = self.router(x).softmax(-1)
        outputs = (expert(x) * weights[..., i, None] for i, expert in enumerate(self.experts.children()))
        return sum(outputs, start=torch.zeros_like(x))


class KeptElsewhere(Mixture):
    """Has the experts in a plain list as well."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = list(self.experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        weights = self.router(x).softmax(-1)
        return sum((expert(x) * weights[..., i, None] for i, expert in enumerate(self.pool)), start=x)


class CountsModules(Mixture):
    """Asks how many linear layers there are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        return super().forward(x) / sum(isinstance(module, nn.Linear) for module in self.modules())


class OwnCheckpoint(Mixture):
    """Computes itself again in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        result = torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)
        assert isinstance(result, torch.Tensor)
        return result


class ReadingBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        return super().forward(x) * (1 + self.mlp.get_parameter("experts.0.down.weight").square().mean())


class Penalised(StackedModel):
    """Adds to its loss the squares of its experts' weights."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """tokens, targets: (B, S) int64 to logits (B, S, V) and the loss."""
        logits = super().forward(tokens)
        entropy = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        penalty = sum(item.square().sum() for block in self.blocks for item in block.mlp.experts.parameters())
        return logits, entropy + 1e-3 * penalty


class Rows(nn.Module):
    """Experts that are rows of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 8) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, 8, WIDTH) / 4)

    def forward(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x: (T, D), indices and weights: (T, k), to the shape of x."""
        out = torch.zeros_like(x)
        for number in range(self.num_experts):
            token, slot = (indices == number).nonzero(as_tuple=True)
            y = functional.gelu(x[token] @ self.up[number]) @ self.down[number]
            out.index_add_(0, token, y * weights[token, slot, None])
        return out


class MixtureOfRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Rows()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        rows = x.reshape(-1, WIDTH)
        weights, chosen = self.router(rows).softmax(-1).topk(2, dim=-1)
        return self.experts(rows, chosen, weights).view_as(x)


class Widening(Expert):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., D) to the same shape, in float32."""
        return super().forward(x).float()


class WidensRows(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Widening() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        weights = self.router(x).softmax(-1)
        mixed = sum((e(x) * weights[..., i, None] for i, e in enumerate(self.experts)), start=torch.zeros_like(x))
        return mixed.to(x.dtype)


NOT_OF_THE_LIST = "doesn't take them from the list by its index, its name or iteration"
REFUSED: dict[str, tuple[Callable[[int], nn.Module], str, str]] = {
    "children": (lambda vocab: stack([ByChildren(), ByChildren()], vocab), "", NOT_OF_THE_LIST),
    "kept_elsewhere": (lambda vocab: stack([KeptElsewhere(), Mixture()], vocab), "", NOT_OF_THE_LIST),
    "modules": (lambda vocab: stack([CountsModules(), Mixture()], vocab), "", "asks for their modules"),
    "checkpoint": (lambda vocab: stack([Mixture(), OwnCheckpoint()], vocab), "", "layouts have recompute=full"),
    "block": (
        lambda vocab: StackedModel(vocab, [ReadingBlock(nn.LayerNorm(WIDTH), Mixture()) for _ in range(2)]),
        "",
        "'blocks.0.mlp.experts.0.down.weight' is read while 'blocks.0.mlp.experts.0' isn't called",
    ),
    "penalty": (
        lambda vocab: Penalised(vocab, [Block(nn.LayerNorm(WIDTH), Mixture()) for _ in range(2)]),
        "",
        "is read while 'blocks.0.mlp.experts.0' isn't called, as by a penalty on weights",
    ),
    "penalty_of_rows": (
        lambda vocab: Penalised(vocab, [Block(nn.LayerNorm(WIDTH), MixtureOfRows()) for _ in range(2)]),
        "",
        "'blocks.0.mlp.experts.up' is read while 'blocks.0.mlp.experts' isn't called",
    ),
    "types": (
        lambda vocab: stack([WidensRows(), WidensRows()], vocab),
        "bf16",
        "returns float32 for rows of bfloat16, and ranks exchange one type; let it return y.to(x.dtype)",
    ),
}
"""What makes a model, a precision and a part of the sentence, by name."""


def __getattr__(name: str) -> object:
    """Returns what makes a model that is refused."""
    if not name.startswith("make_") or name.removeprefix("make_") not in REFUSED:
        raise AttributeError(name)
    return lambda vocab=VOCAB: REFUSED[name.removeprefix("make_")][0](vocab)


@pytest.mark.parametrize("name", REFUSED)
def test_what_ranks_with_some_experts_would_compute_otherwise_is_refused(name: str) -> None:
    _, precision, sentence = REFUSED[name]
    layout = Layout.parse(f"shard=2,zero=1,ep=2,precision={precision or 'float64'}")
    with pytest.raises(PlanError) as caught:
        analyse_model(build_meta(ModelConfig(name=f"{HERE}:make_{name}"), VOCAB, 8), layout)
    assert sentence in str(caught.value) and "nearest that works" in str(caught.value)


def test_experts_of_one_type_are_accepted_in_any_precision() -> None:
    model = build_meta(ModelConfig(name=f"{HERE}:adapted"), VOCAB, 8)
    for precision in ("float32", "bf16", "fp16"):
        assert analyse_model(model, Layout.parse(f"shard=2,zero=1,ep=2,precision={precision}")).experts


@pytest.mark.parametrize("function", ["head_and_one_expert", "adapted"])
def test_weights_that_few_ranks_train_are_as_on_one_device(function: str) -> None:
    """Ranks whose experts are frozen run backward through the exchange as the others do."""
    case = Case(
        build=partial(build_meta, ModelConfig(name=f"{HERE}:{function}"), VOCAB, 8),
        batches=random_batches(2, 8, 8, VOCAB, documents=False),
        recipe=OptimizerRecipe(),
        timeout_s=50,
    )
    (verdict,) = verify(case, [Layout.parse("shard=2,zero=1,ep=2,precision=float64")])
    assert verdict.passed, verdict


def test_arguments_are_those_of_the_model_that_a_wrapper_hands_them_to() -> None:
    structure = read_structure(PeftLike(stack([nn.Identity()], VOCAB)))
    assert structure.token_argument == "tokens" and structure.arguments == {"tokens"}


def test_more_ranks_than_experts_are_refused_before_one_starts() -> None:
    model = build_meta(ModelConfig(name=f"{HERE}:adapted"), VOCAB, 8)
    with pytest.raises(PlanError, match="has 4 experts, and each rank holds one at least; nearest that works: ep=4"):
        analyse_model(model, Layout.parse("shard=8,ep=8"))
