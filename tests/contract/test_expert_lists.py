"""Experts that are modules of a list, spread over ranks: the model's own loop over them, as on one device to 1e-9."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from meshwright.errors import PlanError
from meshwright.models.analysis.expert_list_trial import try_expert_lists
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.proof.reference import OptimizerRecipe
from meshwright.proof.verify import Case, random_batches, verify
from meshwright.spec.layout import Layout
from tests.contract.test_shared_modules import WIDTH, Block, StackedModel
from tests.tiers import further

VOCAB, EXPERTS, HIDDEN = 31, 4, 12


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., D) to the same shape."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """Each expert gets the rows of its tokens, and one without any isn't called; a shared expert gets all."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.experts, self.shared_experts = nn.ModuleList(Expert() for _ in range(experts)), Expert()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        rows = x.reshape(-1, WIDTH)
        weights, chosen = self.router(rows).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, slot = (chosen == number).nonzero(as_tuple=True)
            if len(token):
                y = expert(rows[token])
                y *= weights[token, slot, None]
                out.index_add_(0, token, y)
        return (out + self.shared_experts(rows)).view_as(x)


class CalledAlways(Mixture):
    """Experts in a dict, called with no rows too, by columns of k; the router's logits are noisy in training."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__(experts)
        self.experts = nn.ModuleDict({f"e{number}": Expert() for number in range(experts)})
        self.last_load: torch.Tensor | None = None
        self.loads: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        logits = self.router(x)
        weights, chosen = logits.softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        self.last_load = functional.one_hot(chosen, len(self.experts)).flatten(0, -2).sum(0)
        self.loads = [*self.loads[-3:], int(self.last_load[0])]
        for slot in range(2):
            for number, (name, _) in enumerate(self.experts.items()):
                mask = chosen[..., slot] == number
                out[mask] = out[mask] + self.experts[name](x[mask]) * weights[..., slot][mask][:, None]
        return out


class Capacity(Mixture):
    """Each expert gets a fixed number of places; what doesn't fit is dropped, and the layer itself has the list."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        weights, chosen = self.router(x).softmax(-1).max(-1)
        rank = functional.one_hot(chosen, len(self.experts)).cumsum(1)
        place = rank.gather(-1, chosen[..., None])[..., 0] - 1
        fits = place < 3
        slots = functional.one_hot(place.clamp(max=2), 3) * fits[..., None]
        send = functional.one_hot(chosen, len(self.experts))[..., None] * slots[..., None, :]
        given = torch.einsum("bsec,bsd->ebcd", send.to(x.dtype), x)
        made = torch.stack([expert(rows) for expert, rows in zip(self.experts, given)])
        return torch.einsum("bsec,ebcd->bsd", send.to(x.dtype) * weights[..., None, None], made)


def model(kind: type[Mixture], vocab: int = VOCAB, experts: int = EXPERTS) -> nn.Module:
    return StackedModel(vocab, [Block(nn.LayerNorm(WIDTH), kind(experts)) for _ in range(2)])


def mixture(vocab: int = VOCAB) -> nn.Module:
    return model(Mixture, vocab)


def many(vocab: int = VOCAB) -> nn.Module:
    return model(Mixture, vocab, 23)


def called_always(vocab: int = VOCAB) -> nn.Module:
    return model(CalledAlways, vocab)


def capacity(vocab: int = VOCAB) -> nn.Module:
    return model(Capacity, vocab)


def prove(function: str, *layouts: str, rows: int = 8, sequence: int = 8) -> None:
    config = ModelConfig(name=f"tests.contract.test_expert_lists:{function}")
    case = Case(
        build=partial(build_meta, config, VOCAB, sequence),
        batches=random_batches(2, rows, sequence, VOCAB, documents=False),
        recipe=OptimizerRecipe(),
        timeout_s=200,
    )
    for verdict in verify(case, [Layout.parse(f"{layout},precision=float64") for layout in layouts]):
        assert verdict.passed, verdict


class ReadsWeights(Mixture):
    """A penalty on the experts' weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        return super().forward(x) + sum(expert.down.weight.mean() for expert in self.experts)


class WritesIntoInput(Mixture):
    """Works in the memory of its caller."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        return super().forward(x.mul_(0.5))


class Chained(Mixture):
    """One expert reads what another returned."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        return self.experts[1](self.experts[0](x))


class Depending(Mixture):
    """A second expert is called where the first returns little."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        first = self.experts[0](x)
        return first + self.experts[1](x) if bool(first.abs().mean() > 0) else first


class Mixing(Expert):
    """Centres its rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., D) to the same shape."""
        return super().forward(x - x.mean(0))


class MixesRows(Mixture):
    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__(experts)
        self.experts = nn.ModuleList(Mixing() for _ in range(experts))


class Weighing(Expert):
    """Weighs its rows by itself."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """x: (..., D) to the same shape, by weight: (..., 1)."""
        return super().forward(x) * weight


class SecondArgument(Mixture):
    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__(experts)
        self.experts = nn.ModuleList(Weighing() for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        weights = self.router(x).softmax(-1)
        return sum((e(x, weights[..., i, None]) for i, e in enumerate(self.experts)), start=torch.zeros_like(x))


class Holder(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        return x


class CalledFromOutside(nn.Module):
    """Another module than the list's parent calls the experts."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.holder = Holder(experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        return sum((expert(x) for expert in self.holder.experts), start=self.holder(x))


REFUSED = {
    ReadsWeights: "reads 'down' of an expert",
    WritesIntoInput: "writes into its input",
    Chained: "something else",
    Depending: "depends on what others returned",
    MixesRows: "something else",
    SecondArgument: "called with (Tensor, Tensor), not with one tensor of rows",
    CalledFromOutside: "another module's forward than its parent's calls them",
}


def __getattr__(name: str) -> object:
    """Returns what makes a model of a kind that is refused."""
    kind = next((kind for kind in REFUSED if f"make_{kind.__name__}" == name), None)
    if kind is None:
        raise AttributeError(name)
    return lambda vocab=VOCAB: model(kind, vocab)


@pytest.mark.parametrize("kind", REFUSED)
def test_lists_that_cannot_be_spread_are_refused(kind: type[nn.Module]) -> None:
    config = ModelConfig(name=f"tests.contract.test_expert_lists:make_{kind.__name__}")
    with pytest.raises(PlanError) as caught:
        try_expert_lists(build_meta(config, VOCAB, 8), [])
    assert REFUSED[kind] in str(caught.value) and "nearest that works" in str(caught.value)


@pytest.mark.parametrize("function", further(["mixture", "called_always", "capacity"]))
def test_experts_in_a_list_train_as_on_one_device(function: str) -> None:
    prove(function, "shard=2,zero=3,ep=2,microbatches=2,recompute=full", "shard=2,zero=1,ep=2")
