"""What a compiled layer of several graphs keeps under selective recompute, counted on real ranks and in the plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from meshwright.cluster.cluster import Cluster
from meshwright.models.measure import measure_shape
from meshwright.planner.cost.groups import Machine
from meshwright.planner.cost.layer_bytes import price_bytes
from meshwright.planner.cost.layout_batch import LayoutBatch, PricedJob
from meshwright.planner.cost.meshwright_profile import MESHWRIGHT
from meshwright.planner.cost.priced_model import PricedModel
from meshwright.spec.layout import Layout
from meshwright.train.model_analysis import analyse_model
from tests import traced_graphs
from tests.ranks.group import run_ranks
from tests.ranks.test_selective_tp import LAYERS
from tests.ranks.test_traffic import ROWS, TOKENS, model, trained
from tests.tiers import further

# Values a token in float32, of a width of 32, 4 heads, 2 of keys, and branches of 64.
BY_HEADS = 32 + 32 + 16 + 16 + 32 + 4 + 32 + 2 * 64
"""A layer's input, queries, keys, values, what attention returned with its log-sum-exps, its product, both branches."""
BY_HEADS_AND_TP = (32 + 32 + 32 + 4 + 32 + 2 * 64) / 2 + 2 * 16
"""The same with tokens split between products; each rank of cp needs the one head of keys of its rank of tp."""
WITH_EXPERTS = 32 + 32 + 16 + 16 + 32 + 4 + 32 + 4 + 2 + 2 * 2
"""The same of attention, the router's products, and of two chosen experts the weights and int64 indices."""


def kept_values(name: str, text: str, world: int) -> list[float]:
    """Returns of each rank the values a token, in float32, that the second layer keeps of what it is given and makes.

    Without weights, the angles of positions, and what experts keep in their own checkpoint.
    """
    layout = Layout.parse(text)
    facts = analyse_model(model(name), layout)

    def work(rank: int) -> float:
        torch.set_num_threads(1)
        traced_graphs.install()
        sizes, weights = dict[int, int](), set[int]()

        def note(item: torch.Tensor) -> torch.Tensor:
            origin = item if item._base is None else item._base
            is_weight, storage = origin.is_leaf and origin.requires_grad, item.untyped_storage()
            if is_weight:
                weights.add(storage.data_ptr())
            elif item.dim() != 3 or item.shape[0] != 1:
                sizes[storage.data_ptr()] = storage.nbytes()
            return item

        plain, calls = torch.nn.Module.__call__, []

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if type(module).__name__.endswith("DecoderLayer"):
                calls.append(module)
                if len(calls) == 2:
                    with torch.autograd.graph.saved_tensors_hooks(note, lambda item: item):
                        return plain(module, *args, **kwargs)
            return plain(module, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.Module, "__call__", call)
            trained(name, layout, facts, rank)
        tokens = ROWS * TOKENS // (layout.degree("cp") * layout.degree("shard"))
        return sum(size for storage, size in sizes.items() if storage not in weights) / tokens / 4

    return run_ranks(world, work, timeout=250)


def planned_values(name: str, text: str) -> float:
    """Returns the same by the closed form, experts' own among them, and the layer's last product."""
    layout = Layout.parse(text)
    job = PricedJob(shape=measure_shape(model(name)), sequence=TOKENS, rows=ROWS, precision="float32")
    machine, batch = Machine.of(Cluster.parse(f"{layout.world}xcpu")), LayoutBatch.from_layouts([layout], LAYERS)
    priced_model = PricedModel(job, batch, machine, MESHWRIGHT.for_layout(layout))
    cost = price_bytes(priced_model, job.shape.blocks[0])
    tokens = ROWS * TOKENS // (layout.degree("cp") * layout.degree("shard"))
    return float(np.asarray(cost.saved - cost.spared).item()) / tokens / 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "kept", "more"),
    further(
        [
            # The plan has no log-sum-exps, and the last product, which the compiled layer doesn't keep.
            ("cp=2,attention=heads", BY_HEADS, 32 - 4),
            ("cp=2,tp=2,sequence=true", BY_HEADS_AND_TP, 16 - 2),
        ]
    ),
)
def test_products_are_kept_once_where_heads_are_exchanged(text: str, kept: float, more: float) -> None:
    written = f"{text},recompute=selective,compile=true"
    found = kept_values("llama", written, Layout.parse(written).world)
    assert found == pytest.approx([kept] * len(found))
    assert planned_values("llama", written) == pytest.approx(kept + more)


@pytest.mark.slow
@pytest.mark.parametrize("more", further(["", ",ep_keep=true"]))
def test_what_is_handed_to_experts_is_kept_once(more: str) -> None:
    text = f"shard=2,ep=2,zero=1,recompute=selective,compile=true{more}"
    found = kept_values("mixtral", text, 2)
    assert found == pytest.approx([WITH_EXPERTS + 32] * 2)
    if not more:
        apart = "shard=2,zero=1,recompute=selective,compile=true"
        assert planned_values("mixtral", text) - planned_values("mixtral", apart) == pytest.approx(32)
