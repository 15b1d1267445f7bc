"""Embedding and head are FSDP units of their own where nothing else reads their weights, and bytes are planned so."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.errors import PlanError
from meshwright.models.analysis.objective_trial import try_forward
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.planner.memory import ModelParts, state_memory
from meshwright.proof.reference import OptimizerRecipe
from meshwright.proof.verify import Case, random_batches, verify
from meshwright.spec.end_units import EndUnits
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction
from meshwright.train.model_analysis import analyse_model
from meshwright.train.session import build_program
from tests.ranks.group import run_ranks
from tests.tiers import further

torch.set_num_threads(1)
VOCAB, CONTEXT = 61, 12


class Plain(nn.Module):
    """Tokens to logits through two layers."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, 16)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


class Cast(Plain):
    """Takes the type of its activations from its embedding."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens).to(self.embedding.weight.dtype)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


class Product(nn.Embedding):
    """Looks rows up by a product, whose backward reads its input, but not its weight; `scale` reads it."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(tokens, self.weight.square())


class Squared(Plain):
    """Has an embedding whose backward reads its weights."""

    def __init__(self, vocab: int) -> None:
        super().__init__(vocab)
        self.embedding = Product(vocab, 16)


class Early(Plain):
    """Calls its norm in front of the layers."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(tokens))
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Outside(Plain):
    """Multiplies by its head's weight without calling it."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.linear(self.norm(x), self.head.weight)


class Twice(Plain):
    """Looks its rows up in front of the layers and behind them."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x + self.embedding(tokens)))


class Asked(Plain):
    """Moves activations to the device of its head, and scales logits by the number of its head's rows."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x).to(self.head.weight.device)) / self.head.weight.shape[0]


class Typed(Plain):
    """Scales activations where its head's weight is a plain one, which a shard isn't."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x) * (2.0 if type(self.head.weight) is nn.Parameter else 1.0))


class Backward(Plain):
    """Has a hook on its head that takes logits, and makes a tensor like its weight in backward."""

    def __init__(self, vocab: int) -> None:
        super().__init__(vocab)
        self.head.register_forward_hook(self.watch)

    def watch(self, head: nn.Linear, _args: object, logits: torch.Tensor) -> None:
        if logits.requires_grad:
            logits.register_hook(lambda grad: grad + head.weight.new_zeros(grad.shape[-1]))


class Shortened(Plain):
    """Has an embedding whose rows are shortened as they are looked up."""

    def __init__(self, vocab: int) -> None:
        super().__init__(vocab)
        self.embedding = nn.Embedding(vocab, 16, max_norm=1.0)


class Divided(Plain):
    """Has an embedding whose gradient is divided by the number of times that a call looks each row up."""

    def __init__(self, vocab: int) -> None:
        super().__init__(vocab)
        self.embedding = nn.Embedding(vocab, 16, scale_grad_by_freq=True)


def shortened(vocab: int) -> nn.Module:
    return Shortened(vocab)


def divided(vocab: int) -> nn.Module:
    return Divided(vocab)


def plain(vocab: int) -> nn.Module:
    return Plain(vocab)


def cast(vocab: int) -> nn.Module:
    return Cast(vocab)


def squared(vocab: int) -> nn.Module:
    return Squared(vocab)


def early(vocab: int) -> nn.Module:
    return Early(vocab)


def outside(vocab: int) -> nn.Module:
    return Outside(vocab)


def twice(vocab: int) -> nn.Module:
    return Twice(vocab)


def asked(vocab: int) -> nn.Module:
    return Asked(vocab)


def typed(vocab: int) -> nn.Module:
    return Typed(vocab)


def backward(vocab: int) -> nn.Module:
    return Backward(vocab)


EXPECTED = {
    "plain": EndUnits(embedding="embedding", head=("norm", "head")),
    "cast": EndUnits(head=("norm", "head")),
    "squared": EndUnits(head=("norm", "head")),
    "early": EndUnits(embedding="embedding", head=("head",)),
    "outside": EndUnits(embedding="embedding"),
    "twice": EndUnits(head=("norm", "head")),
    "asked": EndUnits(embedding="embedding"),
    "typed": EndUnits(embedding="embedding"),
    "backward": EndUnits(embedding="embedding", head=("norm", "head")),
}


def build(name: str) -> Any:
    return build_meta(ModelConfig(name=f"{__name__}:{name}"), vocab=VOCAB, context=CONTEXT)


@pytest.mark.parametrize("name", EXPECTED)
def test_units_are_what_nothing_else_reads(name: str) -> None:
    trial = try_forward(build(name))
    assert trial.ends == EXPECTED[name]
    # A hook of the head takes logits: it can't be given the loss of a head that computes no whole ones.
    assert ("forward hook" in trial.head.refused) == (name == "backward")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", further(["plain", "cast", "squared", "outside", "typed", "backward"], ("plain", "outside"))
)
def test_a_model_equals_one_device_whatever_reads_its_ends(name: str) -> None:
    batches = random_batches(1, 8, CONTEXT, VOCAB, documents=False)
    case = Case(build=lambda: build(name), batches=batches, recipe=OptimizerRecipe(), timeout_s=200)
    (verdict,) = verify(case, [Layout.parse("shard=2,zero=3,microbatches=2,precision=float64")])
    assert verdict.passed and verdict.worst.error < 1e-9


@pytest.mark.parametrize(
    ("name", "refused", "allowed"),
    [
        (
            "shortened",
            ("replicate=2", "shard=2,zero=3", "shard=2,zero=1", "tp=2", "shard=2,cp=2,zero=1"),
            ("microbatches=2",),
        ),
        ("divided", ("replicate=2", "shard=2,zero=3", "shard=2,zero=1", "microbatches=2"), ("recompute=full",)),
    ],
)
def test_lookups_that_depend_on_the_rows_of_a_call_are_refused(
    name: str, refused: tuple[str, ...], allowed: tuple[str, ...]
) -> None:
    option = {"shortened": "max_norm=1", "divided": "scale_grad_by_freq=True"}[name]
    for text in refused:
        with pytest.raises(PlanError, match=f"'embedding' has {option}.*embedding.weight.*nearest that works"):
            analyse_model(build(name), Layout.parse(text))
    for text in allowed:
        analyse_model(build(name), Layout.parse(text))
    # A frozen embedding has no gradient to divide; its rows are shortened all the same.
    frozen = build(name)
    frozen.module.get_submodule("embedding").requires_grad_(False)
    if name == "divided":
        analyse_model(frozen, Layout.parse("replicate=2"))
    else:
        with pytest.raises(PlanError, match=option):
            analyse_model(frozen, Layout.parse("replicate=2"))


def test_shards_of_a_weight_that_two_layers_share_are_refused() -> None:
    shared = build("plain")
    first, second = (shared.module.get_submodule(name) for name in shared.structure.layers)
    second[0].weight = first[0].weight  # type: ignore[index]
    for text in ("shard=2,zero=1", "shard=2,zero=3"):
        with pytest.raises(PlanError, match=r"'layers.1.0.weight' is a weight of layer 'layers.0' too.*nearest"):
            analyse_model(shared, Layout.parse(text))
    analyse_model(shared, Layout.parse("replicate=2"))


@pytest.mark.slow
def test_lookups_that_are_allowed_equal_one_device() -> None:
    for name, text in (("shortened", "microbatches=2"), ("divided", "recompute=full")):
        batches = random_batches(2, 8, CONTEXT, VOCAB, documents=False)
        case = Case(build=partial(build, name), batches=batches, recipe=OptimizerRecipe(), timeout_s=200)
        (verdict,) = verify(case, [Layout.parse(f"{text},precision=float64")])
        assert verdict.passed and verdict.worst.error < 1e-9


def test_gathered_bytes_are_of_two_neighbours_and_the_rest() -> None:
    shapes: dict[str, tuple[int, ...]] = {
        "table.weight": (50, 2),
        "positions": (3, 2),
        "h.0.weight": (10, 2),
        "h.1.weight": (20, 2),
    }
    shapes |= {"norm.weight": (2,), "head.weight": (30, 2)}
    apart = EndUnits(embedding="table", head=("norm", "head"))
    sizes = {}
    for name, ends in (("one", EndUnits()), ("apart", apart), ("head", EndUnits(head=apart.head))):
        parts = ModelParts(shapes=shapes, layers=("h.0", "h.1"), ends=ends)
        sizes[name] = state_memory(Layout.parse("shard=2,zero=3"), parts)[0]["parameters"]
    # Padded to two shards: positions 4 rows. Alone: two layers beside all else. Apart: embedding and first layer.
    assert sizes["one"] == 4 * (100 + 8 + 2 + 60 + 20 + 40)
    assert sizes["apart"] == 4 * (8 + 100 + 20)
    assert sizes["head"] == 4 * (100 + 8 + 40 + 62)


@pytest.mark.slow
def test_a_freed_embedding_isnt_gathered_for_backward_and_the_head_stays_for_it() -> None:
    def work(_: int) -> list[tuple[Any, ...]]:
        layout, built = Layout.parse("shard=2,zero=3"), build("plain")
        plan = Plan(layout=layout, prediction=Prediction(memory={}), ranks=2, reason="")
        program = build_program(built, plan, torch.device("cpu"), facts=analyse_model(build("plain"), layout))
        module: Any = program.module
        seen: list[tuple[Any, ...]] = []

        def note(event: str) -> None:
            weights = (module.embedding.weight, module.head.weight)
            whole = [not isinstance(item, DTensor) for item in weights]
            seen.append((event, *whole))

        def behind_layers(_layer: nn.Module, _args: object, output: torch.Tensor) -> None:
            note("forward")
            output.register_hook(lambda _: note("backward"))

        assert isinstance(module.embedding, FSDPModule) and isinstance(module.head, FSDPModule)
        module.layers[0].register_forward_hook(behind_layers)
        # Behind FSDP2's own hooks, which would gather it.
        module.embedding.register_forward_hook(
            lambda _module, _args, output: output.register_hook(lambda _: note("lookup")) and None
        )
        module.head.register_forward_hook(lambda *_: note("head"))
        tokens = torch.randint(VOCAB, (2, CONTEXT))
        module(tokens).sum().backward()
        return seen

    for seen in run_ranks(2, work, timeout=100):
        assert seen[:2] == [("forward", False, False), ("head", False, True)]
        assert seen[2:] == [("backward", False, False), ("lookup", False, False)]
