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
from meshwright.planner.cost.layers import PricedModel
from meshwright.planner.cost.layout_batch import LayoutBatch, PricedJob
from meshwright.planner.cost.meshwright_profile import MESHWRIGHT
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
    facts = analyse_model(model("llama"), layout)

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
            trained("llama", layout, facts, rank)
        return kept

    tp, cp = layout.degree("tp"), layout.degree("cp")
    tokens = ROWS * TOKENS // cp
    by_hand = 4 * tokens * values
    for kept in run_ranks(layout.world, work, timeout=250):
        assert kept == [by_hand] * (2 * LAYERS)
    job = PricedJob(shape=measure_shape(model("llama")), sequence=TOKENS, rows=ROWS, precision="float32")
    machine, batch = Machine.of(Cluster.parse(f"{layout.world}xcpu")), LayoutBatch.from_layouts([layout], LAYERS)
    cost = PricedModel(job, batch, machine, MESHWRIGHT).price_bytes(job.shape.blocks[0])
    input_bytes = 4 * tokens * WIDTH / (tp if layout.sequence else 1)
    planned = float(np.asarray(cost.saved - cost.spared).item()) - input_bytes
    assert planned == pytest.approx(by_hand - 4 * tokens * HEADS / tp)


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
