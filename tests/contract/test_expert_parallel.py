"""Experts spread over ranks give what one device gives, in float64 to 1e-9; and the proof finds every planted fault."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.errors import PlanError
from meshwright.models.analysis.experts import find_experts, require_experts
from meshwright.models.analysis.small_config import shrink_config
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.parallel import data_parallel, expert, row_exchange, token_dispatch
from meshwright.parallel.axis_group import AxisGroup, TrafficLog
from meshwright.parallel.token_dispatch import ExpertGroups, ExpertNode
from meshwright.proof.reference import OptimizerRecipe
from meshwright.proof.verify import Case, random_batches, verify
from meshwright.spec.layout import Layout
from tests.ranks.group import run_ranks
from tests.tiers import further

SEQUENCE, VOCAB = 8, 61


def config(name: str, layers: int = 2, experts: int | None = None) -> ModelConfig:
    small = shrink_config(ModelConfig(name=name), layers=layers, width=16).to_dict()
    return ModelConfig.from_dict(small | ({"experts": experts} if experts else {}))


def case(model: ModelConfig, rows: int = 8, steps: int = 2, sequence: int = SEQUENCE) -> Case:
    def make() -> BuiltModel:
        return build_meta(model, vocab=VOCAB, context=sequence)

    return Case(
        build=make,
        batches=random_batches(steps, rows, sequence, VOCAB, False),
        recipe=OptimizerRecipe(),
        timeout_s=250,
    )


def layouts(*texts: str) -> list[Layout]:
    return [Layout.parse(text + ",precision=float64") for text in texts]


def prove(proof: Case, *texts: str) -> None:
    for verdict in verify(proof, layouts(*texts)):
        assert verdict.passed, verdict
        assert verdict.worst.error < 1e-9


TWO = ("shard=2,zero=3,ep=2,microbatches=2,recompute=full", "shard=2,zero=1,ep=2", "shard=2,zero=2,ep=2,microbatches=2")


@pytest.mark.parametrize(("model", "number"), further([("mixtral", 3), ("qwen3_moe", 1), ("deepseek_v2", 2)]))
def test_two_ranks_with_half_the_experts_each(model: str, number: int) -> None:
    prove(case(config(model)), *TWO[:number])


def test_experts_are_sharded_and_copied_too() -> None:
    prove(
        case(config("mixtral")),
        "shard=4,zero=3,ep=2,microbatches=2",
        "replicate=2,shard=2,zero=2,ep=2,microbatches=2",
    )


@pytest.mark.extended("test_experts_are_sharded_and_copied_too")
def test_experts_of_all_ranks_and_of_stages() -> None:
    prove(case(config("mixtral")), "shard=4,zero=1,ep=4", "pp=2,shard=2,zero=1,ep=2,microbatches=2")


def test_tokens_that_are_equal_on_ranks_are_sent_once() -> None:
    prove(case(config("mixtral"), sequence=7), "tp=2,ep=2")


@pytest.mark.extended("test_tokens_that_are_equal_on_ranks_are_sent_once")
def test_tokens_that_are_equal_on_some_ranks_are_sent_once_by_each_group() -> None:
    prove(case(config("mixtral"), sequence=7), "replicate=2,tp=2,ep=2", "shard=2,tp=2,ep=4,zero=3")


def test_experts_with_biases_and_uneven_runs_of_experts() -> None:
    prove(case(config("gpt_oss", experts=3)), "shard=2,zero=3,ep=2")


def test_ranks_whose_experts_get_no_token() -> None:
    few = case(config("qwen3_moe", experts=24), rows=4, sequence=1)
    prove(few, "shard=4,zero=3,ep=4,recompute=full", "shard=4,zero=2,ep=2")


def _detached_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router learns nothing."""
    routed = token_dispatch.Dispatch._route
    monkeypatch.setattr(token_dispatch.Dispatch, "_route", lambda s, x, index, w: routed(s, x, index, w.detach()))


def _unweighted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of experts are added up as they are."""
    routed = token_dispatch.Dispatch._route
    monkeypatch.setattr(
        token_dispatch.Dispatch, "_route", lambda s, x, index, w: routed(s, x, index, torch.ones_like(w))
    )


def _forgotten_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of experts aren't summed over the copies of their shards."""
    apart = data_parallel._expert_fsdp_group

    def alone(*args: Any) -> Any:
        found = apart(*args)
        return None if found is None else dataclasses.replace(found, axis_groups=found.axis_groups[:1])

    monkeypatch.setattr(data_parallel, "_expert_fsdp_group", alone)


def _forgotten_holders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shard of an expert keeps what its own rank computed."""
    scatter = AxisGroup.reduce_scatter

    def own(self: AxisGroup, output: torch.Tensor, tensor: torch.Tensor, of: str = ""):  # type: ignore[no-untyped-def]
        if self.axis != "ep_shard":
            return scatter(self, output, tensor, of)
        output.copy_(tensor.view(self.size, -1)[self.index])
        return self.all_gather(torch.empty_like(tensor), output)

    monkeypatch.setattr(AxisGroup, "reduce_scatter", own)


def _mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes back isn't put back in the tokens' order."""
    by_token = token_dispatch._by_token
    monkeypatch.setattr(token_dispatch, "_by_token", lambda slots, place, k: by_token(slots, place.flip(0), k))


def _unsent_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of what was sent doesn't come back."""

    def nothing(ctx: Any, *upstream: Any) -> Any:
        return ctx.leg.begin(torch.zeros_like(upstream[0])), None

    monkeypatch.setattr(row_exchange._Arrive, "backward", staticmethod(nothing))


@pytest.mark.parametrize(
    ("plant", "layout"),
    [
        (_detached_router, "shard=2,zero=2,ep=2"),
        (_unweighted, "shard=2,zero=2,ep=2"),
        (_forgotten_copies, "replicate=2,shard=2,zero=3,ep=2"),
        (_forgotten_holders, "shard=4,zero=3,ep=2"),
        (_mixed_up, "shard=2,zero=3,ep=2"),
        (_unsent_gradient, "shard=2,zero=1,ep=2"),
    ],
)
def test_planted_faults_are_caught(
    plant: Callable[[pytest.MonkeyPatch], None], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    (verdict,) = verify(case(config("mixtral", layers=1), rows=4, steps=1), layouts(layout))
    assert not verdict.passed and not verdict.refused
    assert max(verdict.grad_error, verdict.grad_norm_error, verdict.weight_error, verdict.loss_error) > 1e-6


def test_models_without_experts_are_refused() -> None:
    (verdict,) = verify(case(config("llama", layers=1), rows=4, steps=1), layouts("shard=2,zero=3,ep=2"))
    assert "no mixture of experts" in verdict.refused and "tp=2" in verdict.refused


class Experts(nn.Module):
    """Four experts of the kind that transformers has, with values that every process can make."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        draw = torch.Generator().manual_seed(3)
        self.up = nn.Parameter(torch.randn(4, 6, 3, generator=draw, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(4, 3, 6, generator=draw, dtype=torch.float64))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros_like(hidden_states)
        for index in range(self.num_experts):
            token, place = torch.where(top_k_index == index)
            found = torch.tanh(hidden_states[token] @ self.up[index].T) @ self.down[index].T
            out = out.index_add(0, token, found * top_k_weights[token, place, None])
        return out


class OtherArguments(Experts):
    def forward(self, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x * scores.sum(-1, keepdim=True)


def test_experts_that_are_not_recognised_are_told_what_they_lack() -> None:
    uncounted = Experts()
    del uncounted.num_experts
    with pytest.raises(PlanError, match="0 has 4 rows in up, but no attribute like num_experts = 4 says"):
        require_experts(nn.Sequential(uncounted), 2)
    with pytest.raises(PlanError, match=r"called with \(x, scores\), .*: \(hidden_states, top_k_index, top_k_weights"):
        require_experts(nn.Sequential(OtherArguments()), 2)


def _tokens(number: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, experts (never the first; 4 is none), weights, and the gradient of what comes out."""
    draw = torch.Generator().manual_seed(seed)
    hidden, upstream = torch.randn(2, number, 3, generator=draw, dtype=torch.float64)
    chosen = 1 + torch.rand(number, 4, generator=draw).argsort(dim=1)[:, :2]
    # One token in three lists its expert twice, as routers by hashes do.
    chosen[::3, 1] = chosen[::3, 0]
    return hidden, chosen, torch.rand(number, 2, generator=draw, dtype=torch.float64), upstream


def _run(module: nn.Module, batch: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    hidden, chosen, weights, upstream = batch
    hidden.requires_grad_(True)
    weights.requires_grad_(True)
    out = module(hidden, chosen, top_k_weights=weights)
    grads = torch.autograd.grad(out, (hidden, weights, *module.parameters()), upstream)
    return [out.detach(), *grads]


def _node(run: int, ranks: int) -> ExpertNode | None:
    """The ranks as nodes of ``run``; None for 0."""
    if run < 2:
        return ExpertNode(None, AxisGroup("ep", torch.distributed.group.WORLD, TrafficLog())) if run else None
    new = torch.distributed.new_subgroups_by_enumeration
    inside, _ = new([list(range(first, first + run)) for first in range(0, ranks, run)])
    across, _ = new([list(range(place, ranks, run)) for place in range(run)])
    return ExpertNode(AxisGroup("ep_node", inside, TrafficLog()), AxisGroup("ep", across, TrafficLog()))


def _dispatched(
    rank: int, numbers: tuple[int, ...], equal: bool, way: tuple[int, int] = (0, 1), kind: torch.dtype = torch.int64
) -> tuple[list[torch.Tensor], Any]:
    module = Experts()
    (rows,) = find_experts(module)
    axis_group = AxisGroup("ep", torch.distributed.group.WORLD, TrafficLog())
    groups = ExpertGroups(
        axis_group=axis_group,
        replicas=axis_group if equal else None,
        node=_node(way[0], len(numbers)),
        chunks=way[1],
    )
    places = expert.wrap(module, rows, groups, 1)
    hidden, chosen, *others = _tokens(numbers[rank], 0 if equal else rank)
    found = _run(module, (hidden, chosen.to(kind), *others))
    return found, places[".up"].spans[0]


@pytest.mark.parametrize("numbers", [(5, 0, 3), (0, 1, 0)])
def test_slots_travel_from_any_number_of_tokens_to_any_number_of_experts(numbers: tuple[int, ...]) -> None:
    parts = [_tokens(number, rank) for rank, number in enumerate(numbers)]
    wanted = _run(Experts(), tuple(torch.cat(items) for items in zip(*parts)))
    ranks = run_ranks(3, _dispatched, numbers, False)
    for place in range(3):
        torch.testing.assert_close(torch.cat([found[place] for found, _ in ranks]), wanted[place])
    assert [span for _, span in ranks] == [((0, 1),), ((1, 2),), ((2, 4),)]
    for place in (3, 4):
        torch.testing.assert_close(torch.cat([found[place] for found, _ in ranks]), wanted[place])
    assert not ranks[0][0][3].any()


@pytest.mark.parametrize("way", [(0, 2), (1, 1), (1, 3), (2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize(("numbers", "kind"), [((5, 0, 3, 4), torch.int16), ((0, 0, 1, 0), torch.int64)], ids=str)
def test_they_travel_by_nodes_and_in_chunks(numbers: tuple[int, ...], kind: torch.dtype, way: tuple[int, int]) -> None:
    """Of other integers too; some tokens list an expert twice, some experts get none, some ranks have no token."""
    parts = [_tokens(number, rank) for rank, number in enumerate(numbers)]
    wanted = _run(Experts(), tuple(torch.cat(items) for items in zip(*parts)))
    ranks = run_ranks(4, _dispatched, numbers, False, way, kind)
    for place in range(5):
        torch.testing.assert_close(torch.cat([found[place] for found, _ in ranks]), wanted[place])


def test_equal_tokens_are_shared_out() -> None:
    wanted = _run(Experts(), _tokens(5, 0))
    ranks = run_ranks(2, _dispatched, (5, 5), True)
    for found, _ in ranks:
        for place in range(3):
            torch.testing.assert_close(found[place], wanted[place])
    for place in (3, 4):
        torch.testing.assert_close(torch.cat([found[place] for found, _ in ranks]), wanted[place])
