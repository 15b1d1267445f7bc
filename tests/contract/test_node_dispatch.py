"""Tokens that travel once to each node or rank of their experts: what one device gives, and as few rows as can be."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from meshwright.events import CommTotals
from meshwright.jobs.model_reading import model_parts
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.measure import measure_shape
from meshwright.parallel import node_dispatch, token_dispatch
from meshwright.parallel.program import Program
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.traffic import step_collectives
from meshwright.proof.verify import random_batches, verify
from meshwright.spec.layout import Layout
from meshwright.train.feed import MicroBatch
from meshwright.train.model_analysis import analyse_model
from tests.contract.test_expert_parallel import case, config, layouts, prove
from tests.fake.recorder import build_rank
from tests.ranks.group import run_ranks
from tests.tiers import further


@pytest.mark.parametrize("model", further(["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"]))
def test_two_nodes_of_two_ranks(model: str) -> None:
    # Six experts on four ranks: of two sizes; three rows on a rank are fewer than its padding.
    prove(case(config(model, experts=6), rows=12), "shard=4,zero=1,ep=4,ep_node=2,microbatches=3")


def test_every_axis_that_carries_tokens() -> None:
    prove(
        case(config("mixtral"), sequence=8),
        "shard=4,zero=3,ep=4,ep_node=1,microbatches=2,recompute=full",
        "tp=4,ep=4,ep_node=2",
    )


@pytest.mark.extended("test_every_axis_that_carries_tokens")
def test_pairs_of_axes_that_carry_tokens() -> None:
    prove(
        case(config("mixtral"), sequence=8),
        "shard=2,tp=2,sequence=true,zero=3,ep=4,ep_node=2,recompute=selective",
        "shard=2,cp=2,zero=2,ep=4,ep_node=2",
        "pp=2,shard=2,zero=1,ep=2,ep_node=1,microbatches=2",
        "replicate=2,shard=2,zero=1,ep=2,ep_node=1",
    )


def test_ranks_and_nodes_without_any_token() -> None:
    few = case(config("qwen3_moe", experts=24), rows=4, sequence=1)
    prove(few, *(f"shard=4,zero=3,ep=4,{more}recompute=full" for more in ("ep_node=2,", "ep_node=2,ep_overlap=3,")))


def test_chunks_that_travel_while_others_are_computed() -> None:
    # Seven tokens of a row: chunks of two sizes; with tp each rank has a share of them.
    proof = case(config("mixtral", experts=6), sequence=7)
    prove(proof, "shard=2,zero=3,ep=2,ep_overlap=3,microbatches=2,recompute=full", "tp=4,ep=4,ep_node=1,ep_overlap=2")


@pytest.mark.extended("test_chunks_that_travel_while_others_are_computed")
def test_chunks_of_nodes_and_of_stages() -> None:
    proof = case(config("mixtral", experts=6), sequence=7)
    texts = ("shard=4,zero=1,ep=4,ep_node=2,ep_overlap=2", "pp=2,shard=2,zero=1,ep=2,ep_overlap=2,microbatches=2")
    prove(proof, *texts)


def test_bf16_is_as_near_as_by_expert() -> None:
    """Each rank's share of a token's sum is rounded once more than one device rounds."""
    proof = case(config("mixtral"))
    texts = ("shard=4,zero=1,ep=4,precision=bf16", "shard=4,zero=1,ep=4,ep_node=2,precision=bf16")
    for verdict in verify(proof, [Layout.parse(text) for text in texts]):
        assert verdict.passed, verdict


def _lost_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router learns nothing of what its weights weigh elsewhere."""
    backward = node_dispatch._DepartRouted.backward

    def forgetful(ctx: Any, *upstream: torch.Tensor) -> Any:
        tokens, weights, *others = backward(ctx, *upstream)
        return tokens, torch.zeros_like(weights), *others

    monkeypatch.setattr(node_dispatch._DepartRouted, "backward", staticmethod(forgetful))


def _whole_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank weighs all experts of a token, whoever holds them."""
    choose = node_dispatch.RowCopies.choose
    monkeypatch.setattr(
        node_dispatch.RowCopies,
        "choose",
        lambda self, values: choose(
            self, values.sum(1, True).expand_as(values) if values.is_floating_point() else values
        ),
    )


@pytest.mark.parametrize("plant", [_lost_weights, _whole_weights])
def test_planted_faults_are_caught(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    (verdict,) = verify(case(config("mixtral", layers=1), rows=4, steps=1), layouts("shard=4,zero=1,ep=4,ep_node=2"))
    assert not verdict.passed and not verdict.refused
    assert max(verdict.grad_error, verdict.grad_norm_error, verdict.weight_error, verdict.loss_error) > 1e-6


WIDTH, EXPERTS, ROWS, TOKENS, VOCAB = 16, 4, 8, 12, 64


def model() -> BuiltModel:
    small = config("mixtral").to_dict() | {
        "layers": 2,
        "width": WIDTH,
        "experts": EXPERTS,
        "vocab": None,
        "context": None,
    }
    return build_meta(
        ModelConfig.from_dict({k: v for k, v in small.items() if v is not None}), vocab=VOCAB, context=TOKENS
    )


@contextmanager
def routed(choices: list[torch.Tensor], every_pair: bool) -> Iterator[None]:
    """Writes down the experts of every token; or lets tokens choose every pair of experts as often."""
    pairs = torch.tensor(list(itertools.combinations(range(EXPERTS), 2)))
    plain = token_dispatch.Dispatch._route

    def route(self: Any, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if every_pair:
            index = pairs[torch.arange(len(index)) % len(pairs)]
        choices.append(index.clone())
        return plain(self, tokens, index, weights)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_dispatch.Dispatch, "_route", route)
        yield


def run_step(program: Program, layout: Layout, rank: int) -> None:
    """Runs forward and backward of a rank's rows as one micro-batch."""
    (batch,) = random_batches(1, ROWS, TOKENS, VOCAB, documents=False)
    first, last = layout.span(rank, ROWS)
    program.forward_backward([MicroBatch(batch.tokens[first:last], batch.targets[first:last], None)], 1, (0, 0))


def totals_of(text: str, every_pair: bool) -> list[tuple[list[torch.Tensor], tuple[CommTotals, ...]]]:
    """Returns what each rank's tokens chose in a step, layer by layer, and what it sent by axis and operation."""
    layout = Layout.parse(text)
    facts = analyse_model(model(), layout, None)

    def work(rank: int) -> tuple[list[torch.Tensor], tuple[CommTotals, ...]]:
        torch.set_num_threads(1)
        program = build_rank(model(), layout, facts)
        assert program.mesh is not None
        choices: list[torch.Tensor] = []
        program.mesh.log.drain()
        with routed(choices, every_pair):
            run_step(program, layout, rank)
        return choices, program.mesh.log.drain()

    return run_ranks(layout.world, work, timeout=250)


def traffic_of(text: str, every_pair: bool) -> list[tuple[list[torch.Tensor], dict[str, int]]]:
    """Returns what each rank's tokens chose in a step, layer by layer, and the bytes that it sent by axis."""
    found = []
    for choices, totals in totals_of(text, every_pair):
        sums: dict[str, int] = {}
        for total in totals:
            sums[total.axis] = sums.get(total.axis, 0) + total.bytes
        found.append((choices, sums))
    return found


@pytest.mark.parametrize("run", [1, 2])
def test_a_token_visits_a_node_once(run: int) -> None:
    """Rows counted by sets from what the router chose: of float32, with two experts and weights of 4 bytes each."""
    found = traffic_of(f"shard=4,zero=1,ep=4,ep_node={run}", every_pair=False)
    layers, nodes = len(found[0][0]), 4 // run
    across, inside = [0] * 4, [0] * 4
    for layer in range(layers):
        for rank, (choices, _) in enumerate(found):
            for token in choices[layer].tolist():
                ranks = {expert * 4 // EXPERTS for expert in token}
                for node in {other // run for other in ranks}:
                    stop = node * run + rank % run  # the rank at the sender's place in the node
                    across[rank] += stop != rank
                    # What comes back, and its gradient.
                    for other in {other for other in ranks if other // run == node}:
                        inside[stop] += run > 1 and other != stop
    messages = 8 * layers * (nodes - 1) * (1 + 2 * run), 8 * layers * 2 * (run - 1)
    for counts, axis, counted in ((across, "ep", messages[0]), (inside, "ep_node", messages[1])):
        sent = sum(sums.get(axis, 0) for _, sums in found)
        # Four journeys of a row of the hidden state; choices on the way out, weights' gradients on the way back.
        row_bytes = 4 * WIDTH * 4 + 2 * (4 + 4) + 2 * 4
        assert sent == sum(counts) * row_bytes + 4 * counted, axis


@pytest.mark.parametrize(
    "text",
    further(
        [
            "shard=4,zero=1,ep=4,ep_node=1",
            "shard=4,zero=1,ep=4,ep_node=2,recompute=full,ep_keep=true",
            "shard=4,zero=1,ep=4,recompute=selective,ep_keep=true",
            "shard=4,zero=1,ep=4,recompute=selective",
            "tp=2,sequence=true,shard=2,zero=1,ep=4,ep_overlap=2,recompute=selective,ep_keep=true",
            "shard=4,zero=1,ep=4,compress_tokens=fp8,recompute=full",
            "shard=4,zero=1,ep=4,ep_node=2,compress_tokens=fp8,recompute=full,ep_keep=true",
        ],
        (0, 4, 6),
    ),
)
def test_the_plan_has_the_bytes_of_even_routers(text: str) -> None:
    found, layout = traffic_of(text, every_pair=True), Layout.parse(text)
    job = PricedJob(shape=measure_shape(model()), sequence=TOKENS, rows=ROWS, precision=layout.precision)
    parts = model_parts(model(), analyse_model(model(), layout, None))
    for rank, (_, sums) in enumerate(found):
        planned = step_collectives(job, layout, parts, rank).sent()
        for axis in ("ep", "ep_node"):
            assert planned.get(axis, 0) == pytest.approx(sums.get(axis, 0), abs=8), (axis, rank)
