"""Attention as nanoGPT writes it, by the width of its hidden state, is split by tp and exchanged by cp."""

from __future__ import annotations

import pytest

from meshwright.models.analysis.table import sharding_table
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.proof.reference import OptimizerRecipe
from meshwright.proof.verify import Case, random_batches, verify
from meshwright.spec.layout import Layout
from meshwright.spec.sharding_table import CuttingKind
from tests.nano_models import VOCAB
from tests.tiers import further

TOKENS = 16
LAYOUTS = (
    "tp=2",
    "tp=4",
    "tp=2,sequence=true",
    "tp=2,sequence=true,tp_overlap=3",
    "cp=2,attention=heads",
    "tp=2,cp=2,attention=heads,sequence=true",
    "tp=2,pp=2,microbatches=2",
    "tp=2,shard=2,zero=3,recompute=selective",
    # The compiler warns of its own deprecated parts.
    pytest.param("tp=2,compile=true", marks=pytest.mark.filterwarnings("ignore")),
)


def build(name: str) -> BuiltModel:
    return build_meta(ModelConfig(name=f"tests.nano_models:{name}"), context=TOKENS)


def case(name: str) -> Case:
    batches = random_batches(1, 8, TOKENS, VOCAB, documents=False)
    return Case(build=lambda: build(name), batches=batches, recipe=OptimizerRecipe(), timeout_s=250)


@pytest.mark.parametrize("name", ["nano", "by_shape"])
def test_attention_is_split_whatever_it_reads_off_its_input(name: str) -> None:
    table = sharding_table(build(name))
    for rows in table.layers.values():
        assert not rows.refused and rows.sequence
        assert {cutting.kind for group in rows.groups if group.heads for cutting in group.cuttings} == {
            CuttingKind.WIDTH
        }


@pytest.mark.parametrize("layout", further(LAYOUTS, (0, 2, 4)))
def test_it_trains_as_one_device_does(layout: str) -> None:
    (verdict,) = verify(case("nano" if "cp" in layout else "by_shape"), [Layout.parse(f"{layout},precision=float64")])
    assert verdict.passed and verdict.worst.error < 1e-9, verdict.crashed or verdict.wrong


@pytest.mark.parametrize("name", ["hooked", "replaced"])
def test_what_else_computes_with_a_product_has_its_numbers(name: str) -> None:
    layouts = [f"{split},recompute=selective,precision=float64" for split in ("cp=2,attention=heads", "tp=2")]
    for verdict in verify(case(name), [Layout.parse(text) for text in layouts]):
        assert verdict.passed and verdict.worst.error < 1e-9, verdict


def test_what_computes_with_its_input_has_no_stand_in() -> None:
    for rows in sharding_table(build("scaled")).layers.values():
        assert "attn.c_attn" in rows.refused and not any(group.heads for group in rows.groups)
