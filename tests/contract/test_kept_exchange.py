"""What came from the ranks of experts is kept for the forward that recompute runs again: exact, and sent once."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.cluster.cluster import Cluster
from meshwright.errors import PlanError
from meshwright.jobs.layouts import _similar_layouts
from meshwright.models.build import build_meta
from meshwright.parallel import kept_exchange, row_exchange, token_dispatch
from meshwright.parallel.axis_group import AxisGroup
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.cost.expert_traffic import ExpertTraffic
from meshwright.planner.cost.groups import Machine
from meshwright.planner.cost.layout_batch import LayoutBatch, PricedJob
from meshwright.planner.cost.meshwright_profile import MESHWRIGHT
from meshwright.planner.cost.price import price
from meshwright.planner.cost.priced_model import PricedModel
from meshwright.planner.expert_exchange import keeping_forms
from meshwright.spec.layout import Layout
from meshwright.spec.layout_choices import Recompute
from meshwright.train.model_analysis import analyse_model
from tests.contract.test_expert_parallel import case, config, prove
from tests.contract.test_node_dispatch import ROWS, TOKENS, VOCAB, model, routed, run_step, traffic_of
from tests.fake.recorder import build_rank
from tests.ranks.group import run_ranks
from tests.tiers import further

KEEP = ",recompute=full,ep_keep=true"
SELECTIVE = ",recompute=selective,ep_keep=true"


@pytest.mark.extended("test_every_form_of_the_exchange")
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_models(name: str) -> None:
    proof = case(config(name, experts=6))
    prove(proof, f"shard=4,zero=1,ep=4,ep_node=2{KEEP}", f"shard=2,zero=2,ep=2,microbatches=2{SELECTIVE}")


def test_every_form_of_the_exchange() -> None:
    prove(
        case(config("mixtral", experts=6), sequence=7),
        f"shard=2,zero=3,ep=2,microbatches=2{KEEP}",
        f"shard=4,zero=3,ep=4,ep_node=1{SELECTIVE}",
    )


@pytest.mark.extended("test_every_form_of_the_exchange")
def test_more_forms_of_the_exchange() -> None:
    prove(
        case(config("mixtral", experts=6), sequence=7),
        f"shard=4,zero=1,ep=4,ep_node=2,ep_overlap=2{KEEP}",
        # Seven tokens, which ranks of tp share with one that is padded.
        f"tp=2,ep=2,ep_overlap=2,microbatches=8{SELECTIVE}",
        "shard=2,zero=1,ep=2,recompute=full:1,ep_keep=true",
    )


def test_with_halves_and_pairs() -> None:
    prove(
        case(config("mixtral", layers=4), rows=12),
        f"shard=2,zero=1,ep=2,ep_halves=true{KEEP}",
        f"pp=2,shard=2,zero=1,ep=2,microbatches=6,schedule=dualpipev{KEEP}",
    )


@pytest.mark.extended("test_with_halves_and_pairs")
def test_with_pairs_of_split_tokens() -> None:
    text = f"pp=2,tp=2,sequence=true,ep=2,ep_node=1,microbatches=6,schedule=dualpipev{SELECTIVE}"
    prove(case(config("mixtral", layers=4), rows=12), text)


def test_random_numbers_are_those_of_each_row() -> None:
    drops = dataclasses.replace(config("mixtral"), dropout=0.3)
    prove(case(drops), f"shard=2,zero=1,ep=2{KEEP}")


@pytest.mark.extended("test_random_numbers_are_those_of_each_row")
def test_random_numbers_are_those_of_each_token() -> None:
    drops = dataclasses.replace(config("mixtral"), dropout=0.3)
    prove(case(drops), f"cp=2,shard=2,zero=1,ep=4,ep_node=2{SELECTIVE}")


@pytest.mark.parametrize(
    ("more", "mode"),
    further([("", "full"), ("", "selective"), (",ep_node=1", "full"), (",ep_node=2,ep_overlap=2", "selective"),
     (",ep_halves=true", "full")], (0, 2)),
)  # fmt: skip
def test_no_row_travels_twice(more: str, mode: str) -> None:
    """Bytes by axis, of what ranks really send: those of a step that recomputes nothing."""
    text = f"shard=4,zero=1,ep=4{more}"
    none, kept = (
        traffic_of(text + recompute, every_pair=True) for recompute in ("", f",recompute={mode},ep_keep=true")
    )
    assert [sent for _, sent in kept] == [sent for _, sent in none]


def kept_of(text: str) -> list[tuple[int, int, list[float]]]:
    """Returns of each rank the bytes of rows kept in a step's forwards, of results kept, and when they go.

    That is the share of their tensors which there still are in the first layer that backward computes again, in the
    last one, and behind the step, without a garbage collection.
    """
    layout = Layout.parse(text)
    facts = analyse_model(model(), layout, None)

    def work(rank: int) -> tuple[int, int, list[float]]:
        gc.disable()
        torch.set_num_threads(1)
        program = build_rank(model(), layout, facts)
        rows_bytes, values_bytes = 0, 0
        tensors: list[weakref.ref[torch.Tensor]] = []
        shares: list[float] = []
        came_of, came_again, kept = row_exchange._Came.of, row_exchange._Came.again, kept_exchange.kept

        def note_share() -> None:
            shares.append(sum(reference() is not None for reference in tensors) / len(tensors))

        def again_noted(came: Any) -> Any:
            note_share()
            return came_again(came)

        def of_noted(journey: Any, keeps: bool) -> Any:
            nonlocal rows_bytes
            came = came_of(journey, keeps)
            if journey.rows.is_floating_point() and came.message.dim():
                rows_bytes += came.message.nbytes
                tensors.append(weakref.ref(came.message))
            return came

        def kept_noted(make: Any) -> Any:
            nonlocal values_bytes
            made = kept(make)
            run = kept_exchange._RUN.get()
            if isinstance(made, torch.Tensor) and run is not None and not run.is_second:
                values_bytes += made.nbytes
                tensors.append(weakref.ref(made))
            return made

        with pytest.MonkeyPatch.context() as patch, routed([], True):
            patch.setattr(row_exchange._Came, "of", staticmethod(of_noted))
            patch.setattr(row_exchange._Came, "again", again_noted)
            patch.setattr(kept_exchange, "kept", kept_noted)
            run_step(program, layout, rank)
        note_share()
        return rows_bytes, values_bytes, [shares[0], *shares[-2:]]

    return run_ranks(4, work, timeout=250)


def planned_bytes(layout: Layout) -> float:
    """Returns the bytes that the price takes a rank to keep."""
    small = model()
    sizes = TableSizes(
        name="small", layers=small.config.layers, width=small.config.width, heads=4, vocab=VOCAB,
        experts=small.config.experts, active_experts=2, expert_ffn=64,
    )  # fmt: skip
    job = PricedJob(shape=shape_from_sizes(sizes), sequence=TOKENS, rows=ROWS, precision="float32")
    priced = PricedModel(job, LayoutBatch.from_layouts([layout], 2), Machine.of(Cluster.parse("4xh100")), MESHWRIGHT)
    return sum(float(ExpertTraffic(priced, block).kept_bytes()[0]) for block in job.shape.blocks)


@pytest.mark.parametrize("more", ["", ",compress_tokens=fp8"])
@pytest.mark.parametrize("node", further([0, 1, 2], (0, 2)))
def test_what_is_kept_is_what_is_planned_and_ends_with_its_layer(node: int, more: str) -> None:
    """Under a router that chooses every pair of experts as often, as the price takes it."""
    layout = Layout.parse(f"shard=4,zero=1,ep=4,ep_node={node}{KEEP}{more}")
    found = kept_of(str(layout))
    # Of two layers.
    assert all(shares == [1.0, 0.5, 0.0] for *_, shares in found)
    kept_bytes = np.mean([rows + values for rows, values, _ in found])
    assert kept_bytes == pytest.approx(planned_bytes(layout), rel=1e-6)


def test_experts_that_change_what_came_are_told_of() -> None:
    layout = Layout.parse(f"shard=4,zero=1,ep=4{KEEP}")
    facts = analyse_model(model(), layout, None)
    compute = token_dispatch.Dispatch._compute_experts

    def spoiling(self: token_dispatch.Dispatch, tokens: torch.Tensor, expert_of_token: torch.Tensor) -> torch.Tensor:
        output = compute(self, tokens * 1.0, expert_of_token)
        with torch.no_grad():
            tokens.mul_(2.0)
        return output

    def work(rank: int) -> str:
        program = build_rank(model(), layout, facts)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(token_dispatch.Dispatch, "_compute_experts", spoiling)
            try:
                run_step(program, layout, rank)
            except RuntimeError as error:
                return str(error)
        return ""

    assert all("drop ep_keep" in message for message in run_ranks(4, work, timeout=100))


def test_backward_may_run_twice() -> None:
    """As with retain_graph: the second time, too, nothing travels in what is computed again."""
    layers = [torch.nn.Linear(4, 4) for _ in range(2)]
    calls: list[int] = []

    def received() -> torch.Tensor:
        calls.append(1)
        return torch.full((4,), float(len(calls)))

    def forward(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = torch.relu(layer(x)) * kept_exchange.kept(received)
            x = kept_exchange.kept_values(x)
            x.add_(1.0)
        return x

    x = torch.randn(3, 4, requires_grad=True)
    loss = torch.utils.checkpoint.checkpoint(
        forward, x, use_reentrant=False, context_fn=lambda: kept_exchange.keeping_contexts(None)
    )
    gradients = [torch.autograd.grad(loss.sum(), x, retain_graph=True)[0] for _ in range(2)]
    assert len(calls) == 2 and torch.equal(*gradients)
    calls.clear()
    (plain,) = torch.autograd.grad(forward(x).sum(), x)
    assert torch.equal(plain, gradients[0])


def test_values_are_those_of_the_first_run() -> None:
    """Where a second run sums zeros, as by node, and what comes after it is no sum."""
    runs: list[int] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        total = kept_exchange.kept_values(x * (1.0 if len(runs) == 1 else 0.0))
        return total * total

    x = torch.randn(3, 4, requires_grad=True)
    square = torch.utils.checkpoint.checkpoint(
        forward, x, use_reentrant=False, context_fn=lambda: kept_exchange.keeping_contexts(None)
    )
    square.sum().backward()
    assert len(runs) == 2 and torch.equal(x.grad, 2 * x)


def test_layouts() -> None:
    with pytest.raises(PlanError, match="recompute=none keeps it anyway"):
        Layout.parse("shard=2,zero=1,ep=2,ep_keep=true")
    with pytest.raises(PlanError, match="write ep=2 or more"):
        Layout.parse("shard=2,zero=1,recompute=full,ep_keep=true")
    layout = Layout.parse(f"shard=4,zero=1,ep=4{KEEP}")
    assert layout.with_degrees({"shard": 2, "ep": 2}).ep_keep and not layout.with_degrees({"shard": 2}).ep_keep
    assert all(not similar.ep_keep or "ep" in similar.degrees for similar in _similar_layouts(layout, 2, 8))
    again = dataclasses.replace(layout, ep_keep=False)
    assert [form.ep_keep for form in keeping_forms([layout, again], [0, 6])] == [True]
    first = dataclasses.replace(again, recompute=Recompute("full", 1))
    assert list(keeping_forms([first], [0, 6])) == [] and len(list(keeping_forms([first], [6, 0]))) == 1


def test_layers_without_experts_have_nothing_to_keep() -> None:
    """DeepSeek-V3 begins with layers that are no mixtures, and of one that recomputes it is the first."""
    begins_dense = dataclasses.replace(config("deepseek_v3"), overrides={"first_k_dense_replace": 1})
    mixture = build_meta(begins_dense, vocab=VOCAB, context=TOKENS)
    analyse_model(mixture, Layout.parse("shard=2,zero=1,ep=2,recompute=full:2,ep_keep=true"), None)
    with pytest.raises(PlanError, match=r"no effect with recompute=full:1: .* recompute, model.layers.0; .*=full, or"):
        analyse_model(mixture, Layout.parse("shard=2,zero=1,ep=2,recompute=full:1,ep_keep=true"), None)


def test_the_price_is_without_a_third_exchange() -> None:
    sizes = TableSizes(
        name="mixture", layers=8, width=4096, heads=32, vocab=32000, experts=64, active_experts=8, expert_ffn=1024
    )
    job = PricedJob(shape=shape_from_sizes(sizes), sequence=4096, rows=64, precision="bf16")
    cluster = Cluster.parse("4x8xh100")
    for mode in ("full", "selective"):
        none, again, kept = (
            price(job, Layout.parse(f"shard=32,zero=2,ep=32,precision=bf16{more}"), cluster)
            for more in ("", f",recompute={mode}", f",recompute={mode},ep_keep=true")
        )
        assert again.parts["ep"] == pytest.approx(1.5 * none.parts["ep"])
        assert kept.parts["ep"] == pytest.approx(none.parts["ep"])
        # Two rows of 4096 tokens, there and back, of eight experts each; the layer in backward holds them in any case.
        more_bytes = kept.memory["activations"] - again.memory["activations"]
        assert more_bytes == pytest.approx(7 * 2 * (2 * 4096 * 8) * 4096 * 2, rel=0.01)


def test_the_ranks_that_keep_send_no_counts_again() -> None:
    layout = Layout.parse(f"shard=4,zero=1,ep=4,ep_node=2{KEEP}")
    facts = analyse_model(model(), layout, None)

    def work(rank: int) -> int:
        program = build_rank(model(), layout, facts)
        count, send = 0, AxisGroup.all_to_all_rows

        def counted(group: AxisGroup, *args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return send(group, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(AxisGroup, "all_to_all_rows", counted)
            run_step(program, layout, rank)
        return count

    # Two layers: two of counts, two ways of tokens and their choices, two ways of outputs; then six of gradients.
    assert run_ranks(4, work, timeout=100) == [2 * (2 + 4 + 2 + 6)] * 4
