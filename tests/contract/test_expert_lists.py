"""Experts that are modules of a list, spread over ranks: the model's own loop over them, as on one device to 1e-9."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from meshwright.errors import PlanError
from meshwright.models.analysis.expert_list_trial import try_expert_lists
from meshwright.models.analysis.experts import find_experts
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.parallel import expert_list
from meshwright.parallel.moving_buffers import MovingBuffers
from meshwright.proof.reference import OptimizerRecipe
from meshwright.proof.verify import Case, Verdict, random_batches, verify
from meshwright.spec.layout import Layout
from meshwright.strategy import HybridParallelStrategy
from meshwright.train.model_analysis import analyse_model
from tests import traced_graphs
from tests.contract.test_shared_modules import WIDTH, Block, StackedModel
from tests.ranks.group import run_ranks
from tests.runs import call, curve, warm_compiler, words, write_corpus
from tests.tiers import further

HERE = "tests.contract.test_expert_lists"
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
        self.router, self.top_k = nn.Linear(WIDTH, experts, bias=False), 2
        self.experts, self.shared_experts = nn.ModuleList(Expert() for _ in range(experts)), Expert()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        rows = x.reshape(-1, WIDTH)
        weights, chosen = self.router(rows).softmax(-1).topk(self.top_k, dim=-1)
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
        weights, chosen = logits.softmax(-1).topk(self.top_k, dim=-1)
        out = torch.zeros_like(x)
        self.last_load = functional.one_hot(chosen, len(self.experts)).flatten(0, -2).sum(0)
        self.loads = [*self.loads[-3:], int(self.last_load[0])]
        for slot in range(2):
            for number, (name, _) in enumerate(self.experts.items()):
                mask = chosen[..., slot] == number
                out[mask] = out[mask] + self.experts[name](x[mask]) * weights[..., slot][mask][:, None]
        return out


class Noisy(Mixture):
    """The router's input is noisy in training, and calls are counted."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__(experts)
        self.loads: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        noise = torch.rand_like(x) if self.training else torch.zeros_like(x)
        self.loads.append(len(x))
        return super().forward(x * (1 + 0.1 * noise))


class TokenByToken(Mixture):
    """A loop over tokens, each a vector."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        weights, chosen = self.router(x).softmax(-1).max(-1)
        pairs = zip(x.flatten(0, 1), chosen.flatten().tolist(), weights.flatten())
        return torch.stack([self.experts[number](token) * weight for token, number, weight in pairs]).view_as(x)


class Dropping(Expert):
    """Drops out of its rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., D) to the same shape."""
        return super().forward(functional.dropout(x, 0.1, self.training))


class DropsRows(Mixture):
    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__(experts)
        self.experts = nn.ModuleList(Dropping() for _ in range(experts))


class Skipping(Mixture):
    """Tokens of which the router isn't sure visit no expert."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, D) to the same shape."""
        rows = x.reshape(-1, WIDTH)
        is_sure = self.router(rows)[:, 0] > 0
        return (
            x
            if not bool(is_sure.any())
            else x.masked_scatter(is_sure.view(*x.shape[:-1], 1), super().forward(rows[is_sure]))
        )


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


def token_by_token(vocab: int = VOCAB) -> nn.Module:
    return model(TokenByToken, vocab)


def noisy(vocab: int = VOCAB) -> nn.Module:
    return model(Noisy, vocab)


def drops_rows(vocab: int = VOCAB) -> nn.Module:
    return model(DropsRows, vocab)


def skipping(vocab: int = VOCAB) -> nn.Module:
    return model(Skipping, vocab)


def capacity(vocab: int = VOCAB) -> nn.Module:
    return model(Capacity, vocab)


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


def verdicts(function: str, *layouts: str, rows: int = 8, sequence: int = 8) -> list[Verdict]:
    config = ModelConfig(name=f"{HERE}:{function}")
    case = Case(
        build=partial(build_meta, config, VOCAB, sequence),
        batches=random_batches(2, rows, sequence, VOCAB, documents=False),
        recipe=OptimizerRecipe(),
        timeout_s=200,
    )
    return verify(case, [Layout.parse(f"{layout},precision=float64") for layout in layouts])


def prove(function: str, *layouts: str, rows: int = 8, sequence: int = 8) -> None:
    for verdict in verdicts(function, *layouts, rows=rows, sequence=sequence):
        assert verdict.passed, verdict


@pytest.mark.parametrize("kind", REFUSED)
def test_lists_that_cannot_be_spread_are_refused(kind: type[nn.Module]) -> None:
    config = ModelConfig(name=f"{HERE}:make_{kind.__name__}")
    with pytest.raises(PlanError) as caught:
        try_expert_lists(build_meta(config, VOCAB, 8), [])
    assert REFUSED[kind] in str(caught.value) and "nearest that works" in str(caught.value)


@pytest.mark.parametrize("function", further(["noisy", "called_always", "capacity", "token_by_token"]))
def test_experts_in_a_list_train_as_on_one_device(function: str) -> None:
    prove(function, "shard=2,zero=3,ep=2,microbatches=2,recompute=full", "shard=2,zero=1,ep=2")


@pytest.mark.parametrize(
    ("function", "layouts"),
    further(
        [
            ("mixture", ("tp=2,ep=2", "cp=2,ep=2")),
            (
                "mixture",
                ("tp=2,sequence=true,ep=2", "shard=2,zero=1,ep=2,ep_overlap=2", "shard=2,zero=2,ep=2,microbatches=2"),
            ),
            ("mixture", ("pp=2,shard=2,zero=1,ep=2,microbatches=2", "replicate=2,shard=2,zero=2,ep=2")),
            ("mixture", ("shard=2,zero=1,ep=2,ep_halves=true", "shard=2,ep=2,recompute=full,ep_keep=true")),
            ("capacity", ("tp=2,ep=2", "shard=2,tp=2,ep=4,zero=1")),
            (
                "called_always",
                ("shard=2,zero=3,ep=2,recompute=selective", "pp=2,shard=2,ep=2,schedule=zbv,microbatches=2"),
            ),
        ]
    ),
)
def test_lists_compose_with_the_other_axes(function: str, layouts: tuple[str, ...]) -> None:
    prove(function, *layouts)


@pytest.mark.extended("test_experts_in_a_list_train_as_on_one_device")
def test_ranks_that_call_no_expert_and_hold_unequal_numbers() -> None:
    prove("skipping", "shard=4,zero=1,ep=4", "shard=4,zero=3,ep=2", rows=4, sequence=1)
    prove("many", "shard=4,zero=1,ep=4", "shard=4,zero=3,ep=2", rows=4, sequence=1)


@pytest.mark.extended("test_experts_in_a_list_train_as_on_one_device")
def test_compiled_layers_run_their_lists_as_they_are(tmp_path: Path) -> None:
    warm_compiler()
    write_corpus(tmp_path / "corpus.txt", 60)
    rest = ("--model", f"{HERE}:mixture", "--train.steps", "3", "--checkpoint.every", "0")
    curves, graphs = [], tmp_path / "graphs"

    def note(graph: Any) -> None:
        with graphs.open("a", encoding="ascii") as file:
            file.write(f"{len(graph.nodes)}\n")

    layout = "shard=2,zero=3,ep=2,recompute=selective,precision=float64"
    for name, written in (("plain", layout), ("compiled", f"{layout},compile=true")):
        argv = words(tmp_path, name, *rest, layout=written, devices=2)
        # the sizes of a type of transformers, which a function hasn't
        argv = [word for word, flag in zip(argv, ["", *argv]) if "--model." not in f"{word} {flag}"]
        status, text = call(argv, tmp_path / "log", before=partial(traced_graphs.install, note, whole=False))
        assert status == 0, text
        curves.append(curve(tmp_path / name))
    assert graphs.read_text()
    assert sorted(curves[0]) == sorted(curves[1])
    assert all(curves[1][step] == pytest.approx(values, rel=1e-9) for step, values in curves[0].items())


def test_experts_that_draw_are_refused_on_their_ranks() -> None:
    (verdict,) = verdicts("drops_rows", "shard=2,zero=1,ep=2")
    assert "its tokens are those that a router chose" in verdict.refused


def test_the_first_run_leaves_no_trace() -> None:
    whole = Noisy().train()
    spreads = copy.deepcopy(whole)
    (rows,) = find_experts(nn.ModuleDict({"mlp": spreads}))
    assert rows.experts == EXPERTS and rows.caller == "mlp"
    expert_list.spread(spreads, rows, (0, EXPERTS), MovingBuffers([], []), lambda: None, WIDTH)
    x, found = torch.randn(2, 3, WIDTH), []
    for module in (whole, spreads):
        torch.manual_seed(3)
        found.append((module(x), torch.rand(4), module.loads))
    torch.testing.assert_close(found[0], found[1])


def test_a_token_sent_once_to_a_node_is_refused() -> None:
    config = ModelConfig(name=f"{HERE}:mixture")
    with pytest.raises(PlanError, match="leave ep_node out"):
        analyse_model(build_meta(config, VOCAB, 8), Layout.parse("shard=2,ep=2,ep_node=1"))


def _custom_loop(_: int) -> str:
    try:
        HybridParallelStrategy("shard=2,ep=2,zero=1").shard(mixture())
    except PlanError as error:
        return str(error)
    return "accepted"


def test_custom_loops_over_weights_of_which_each_rank_has_others_are_refused() -> None:
    assert all("ep=2 in a custom loop" in text for text in run_ranks(2, _custom_loop))
