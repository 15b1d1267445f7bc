"""Parameters of no dimension (gates, temperatures) train in every layout, and are saved as what they are."""

from __future__ import annotations

import pytest
import torch

from meshwright.checkpoint.tensor_shards import collect_local_shards
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.proof.reference import OptimizerRecipe
from meshwright.proof.verify import Case, random_batches, verify
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction
from meshwright.train.session import build_program
from tests.odd_models import VOCAB
from tests.ranks.group import run_ranks
from tests.tiers import further

torch.set_num_threads(1)


def build() -> BuiltModel:
    return build_meta(ModelConfig(name="tests.odd_models:gated"), vocab=VOCAB, context=8)


@pytest.mark.parametrize("layout", further(["shard=2,zero=1", "shard=2", "tp=2", "pp=2,microbatches=2"], (1, 2)))
def test_a_number_trains_as_on_one_device(layout: str) -> None:
    batches = random_batches(2, 4, 8, VOCAB, documents=False)
    # Under tp the head stays whole: the scale multiplies its logits.
    case = Case(build=build, batches=batches, recipe=OptimizerRecipe(), timeout_s=50, allow_whole=True)
    (verdict,) = verify(case, [Layout.parse(f"{layout},precision=float64")])
    assert verdict.passed, verdict


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_sharded_number_is_saved_once_and_without_dimensions(precision: str) -> None:
    def saved(_rank: int) -> list[tuple[str, tuple[int, ...], tuple[int, ...], float]]:
        layout = Layout.parse(f"shard=2,zero=3,precision={precision}")
        plan = Plan(layout=layout, prediction=Prediction(memory={}), ranks=2, reason="")
        weights = build_program(build(), plan, torch.device("cpu")).weights
        found = collect_local_shards(
            {weight.name: weight.checkpoint_boxes(weight.local) for weight in weights if not weight.shape}
        )
        return [(part.name, part.shape, tuple(view.shape), float(view)) for part, view in found]

    first, second = run_ranks(2, saved)
    wanted = {"scale": 2.0, "blocks.0.gate": 0.5, "blocks.1.gate": 0.5}
    assert sorted(first + second) == sorted((name, (), (), value) for name, value in wanted.items())
