"""Layers are found however a model holds them; shared ones split, and are refused by name where they can't."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.proof.compare import Verdict
from meshwright.proof.reference import OptimizerRecipe
from meshwright.proof.verify import Case, random_batches, verify
from meshwright.spec.layout import Layout
from tests.odd_models import VOCAB
from tests.tiers import cases

torch.set_num_threads(1)


def prove(name: str, *layouts: str, **overrides: object) -> list[Verdict]:
    config = ModelConfig(name=f"tests.odd_stacks:{name}", overrides=overrides)
    build = partial(build_meta, config, VOCAB, 8)
    batches = random_batches(2, 4, 8, VOCAB, documents=False)
    case = Case(build=build, batches=batches, recipe=OptimizerRecipe(), timeout_s=60)
    return verify(case, [Layout.parse(f"{layout},precision=float64") for layout in layouts])


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("dict_of_blocks", ["blocks.block0", "blocks.block1", "blocks.block2", "blocks.block3"]),
        ("one_shared", ["blocks"]),
        ("listed_thrice", ["blocks.0"]),
        ("taking_turns", ["blocks.0", "blocks.1"]),
        ("list_of_lists", ["blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1"]),
        ("dict_of_lists", ["blocks.pair0.0", "blocks.pair0.1", "blocks.pair1.0", "blocks.pair1.1"]),
        ("list_in_a_wrapper", ["blocks.inner.0", "blocks.inner.1"]),
        ("named_blocks", ["early", "late"]),
    ],
)
def test_layers_are_found_however_they_are_held(name: str, layers: list[str]) -> None:
    built = build_meta(ModelConfig(name=f"tests.odd_stacks:{name}"), VOCAB, 8)
    assert list(built.structure.layers) == layers


@pytest.mark.parametrize(
    ("name", "layouts"),
    cases(
        [
            ("dict_of_blocks", ["cp=2", "pp=2,microbatches=2", "shard=2,recompute=full"]),
            ("one_shared", ["tp=2", "cp=2", "shard=2,zero=3,recompute=full"]),
            ("taking_turns", ["tp=2", "cp=2,attention=gather", "replicate=2,recompute=full"]),
            ("dict_of_lists", ["tp=2", "pp=2,microbatches=2"]),
            ("state_in_a_dict", ["pp=2,microbatches=2", "pp=2,microbatches=4,schedule=zbv,stages=2"]),
        ],
        (1,),
        extended=("dict_of_blocks", "state_in_a_dict"),
    ),
)
def test_they_equal_one_device(name: str, layouts: list[str]) -> None:
    for verdict in prove(name, *layouts):
        assert verdict.passed, verdict


def test_every_call_of_a_shared_block_draws_numbers_of_its_own() -> None:
    for verdict in prove("one_shared", "cp=2,recompute=full", "tp=2", p=0.2):
        assert verdict.passed, verdict


@pytest.mark.parametrize(("name", "why"), [("one_shared", "has 1, of which all calls"), ("taking_turns", "2 times")])
def test_a_pipeline_of_shared_layers_is_refused_with_what_works(name: str, why: str) -> None:
    (verdict,) = prove(name, "pp=2,microbatches=2")
    assert verdict.outcome == "refused" and why in verdict.refused
    assert "nearest that works: tp, cp or shard" in verdict.refused


def test_layers_that_fill_a_cache_of_their_caller_are_not_split() -> None:
    plain, split = prove("caching", "shard=2,zero=3", "tp=2")
    assert plain.passed
    assert split.outcome == "refused" and "a CachingBlock fails when it is called again" in split.refused
    assert "nearest that works: replicate, shard or pp" in split.refused
