"""What selective recompute keeps of a layer that ranks split: what they give each other, in place of what they gave."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.cluster.cluster import Cluster
from meshwright.models.measure import measure_shape
from meshwright.parallel import selective
from meshwright.parallel.recompute import apply
from meshwright.planner.cost.groups import Machine
from meshwright.planner.cost.layer_bytes import price_bytes
from meshwright.planner.cost.layout_batch import LayoutBatch, PricedJob
from meshwright.planner.cost.meshwright_profile import MESHWRIGHT
from meshwright.planner.cost.priced_model import PricedModel
from meshwright.spec.layout import Layout
from meshwright.train.model_analysis import analyse_model
from tests import traced_graphs
from tests.ranks.group import run_ranks
from tests.ranks.test_traffic import ROWS, TOKENS, model, trained
from tests.tiers import further

LAYERS, WIDTH, FFN, HEADS = 4, 32, 64, 4
SPLIT = WIDTH + 2 * WIDTH // 2 + WIDTH + HEADS + 2 * FFN
"""Values a token in float32: queries, keys, values, what attention returned and its log-sum-exps, both branches up."""


BY_HEADS = WIDTH // 2 + 2 * WIDTH // 2 + WIDTH // 2 + HEADS // 2 + FFN + WIDTH
"""Of half of the heads, all of the one head of keys that both ranks of cp need; two sums are of half of the tokens."""


@pytest.mark.parametrize(
    ("text", "values"),
    further([
        ("tp=2", SPLIT / 2 + 2 * WIDTH),
        ("tp=2,sequence=true", SPLIT / 2 + WIDTH),
        ("tp=2,sequence=true,tp_overlap=2", SPLIT / 2 + WIDTH),
        ("tp=2,tp_overlap=3", SPLIT / 2 + 2 * WIDTH),
        ("cp=2,attention=heads", SPLIT + 2 * WIDTH),
        ("cp=2,tp=2,sequence=true", BY_HEADS),
        # Queries, keys and values are products of before, too.
        ("cp=2,tp=2,sequence=true,tp_overlap=2", BY_HEADS + WIDTH / 2 + 2 * WIDTH / 4),
    ], (1, 3, 4, 6)),
)  # fmt: skip
def test_of_a_product_that_becomes_something_else_nothing_is_kept(text: str, values: float) -> None:
    layout = Layout.parse(f"{text},recompute=selective")
    tp, cp = layout.degree("tp"), layout.degree("cp")
    tokens = ROWS * TOKENS // cp
    by_hand = 4 * tokens * values
    for kept in kept_bytes("llama", layout):
        assert kept == [by_hand] * (2 * LAYERS)
    input_bytes = 4 * tokens * WIDTH / (tp if layout.sequence else 1)
    assert planned_bytes("llama", layout) - input_bytes == pytest.approx(by_hand - 4 * tokens * HEADS / tp)


def kept_bytes(name: str, layout: Layout) -> list[list[int]]:
    """Returns of each rank what its layers have kept of what they computed, layer by layer of each step."""
    facts = analyse_model(model(name), layout)

    def work(rank: int) -> list[int]:
        torch.set_num_threads(1)
        kept: list[int] = []
        plain = selective._SecondRun.__enter__

        def begin(run: Any) -> Any:
            leaves = [leaf for result in run.results for leaf in result.leaves if isinstance(leaf, torch.Tensor)]
            storages = {leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes() for leaf in leaves}
            kept.append(sum(storages.values()))
            return plain(run)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(selective._SecondRun, "__enter__", begin)
            trained(name, layout, facts, rank)
        return kept

    return run_ranks(layout.world, work, timeout=250)


def planned_bytes(name: str, layout: Layout) -> float:
    """Returns what a plan has the last layer keep, its input included."""
    job = PricedJob(shape=measure_shape(model(name)), sequence=TOKENS, rows=ROWS, precision="float32")
    machine, batch = Machine.of(Cluster.parse(f"{layout.world}xcpu")), LayoutBatch.from_layouts([layout], LAYERS)
    priced_model = PricedModel(job, batch, machine, MESHWRIGHT.for_layout(layout))
    cost = price_bytes(priced_model, job.shape.blocks[-1])
    return float(np.asarray(cost.saved - cost.spared).item())


def test_queries_of_low_rank_are_kept_as_heads() -> None:
    """Their product sums 16 values, so that it runs again where nothing travels: 4 heads of 12."""
    gather, heads = (Layout.parse(f"cp=2,attention={name},recompute=selective") for name in ("gather", "heads"))
    (alone, *_), (exchanged, *_) = kept_bytes("deepseek_v3", gather), kept_bytes("deepseek_v3", heads)
    by_hand = 4 * ROWS * TOKENS // 2 * 4 * 12
    assert [more - less for more, less in zip(exchanged, alone, strict=True)] == [by_hand] * (2 * LAYERS)
    assert planned_bytes("deepseek_v3", heads) - planned_bytes("deepseek_v3", gather) == pytest.approx(by_hand)


@pytest.mark.parametrize(
    "more", further(["", ",sequence=true", ",sequence=true,tp_overlap=2", ",tp_overlap=3"], (0, 2))
)
def test_compiled_layers_keep_no_more(more: str) -> None:
    """But for the last sum, which backward doesn't read."""
    layout = Layout.parse(f"tp=2,recompute=selective,compile=true{more}")
    facts = analyse_model(model("llama"), layout)

    def work(rank: int) -> list[int]:
        torch.set_num_threads(1)
        kept: list[int] = []
        traced_graphs.install(of_backward=lambda graph: kept.append(traced_graphs.made_bytes(graph)), whole=True)
        trained("llama", layout, facts, rank)
        return kept

    by_hand = 4 * ROWS * TOKENS * (SPLIT + WIDTH * (1 if layout.sequence else 2)) / 2
    for kept in run_ranks(2, work, timeout=250):
        assert kept == [by_hand]


class Averaging(nn.Module):
    """Its own code sums over ranks in the memory of a product."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.up(x).detach()
        read = torch.sin(scale.clone())
        dist.all_reduce(scale)
        return x + self.down(torch.sin(scale * x) * read)


def test_collectives_of_a_models_own_may_write_into_what_is_kept() -> None:
    def gradients(rank: int) -> list[torch.Tensor]:
        found = []
        for mode in ("", "selective"):
            torch.manual_seed(rank)
            layer, x = Averaging(), torch.randn(2, 4, 8, requires_grad=True)
            if mode:
                apply([layer], mode, None)
            found.append(torch.autograd.grad(layer(x).square().sum(), x)[0])
        return found

    for plain, recomputed in run_ranks(2, gradients):
        assert torch.equal(plain, recomputed)
