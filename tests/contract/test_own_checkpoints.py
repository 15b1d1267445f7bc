"""A model's own checkpoints compute again what their first time computed: same numbers, same input, in every layout."""

from __future__ import annotations

import pytest
import torch

from tests.contract.test_odd_stacks import prove
from tests.tiers import cases

torch.set_num_threads(1)

ZBV = "pp=2,microbatches=4,schedule=zbv,stages=2"


@pytest.mark.parametrize(
    ("reentrant", "layouts"),
    cases(
        [
            (True, ("pp=2,microbatches=2", ZBV)),
            (False, ("tp=2", "shard=2,zero=3")),
            (False, ("pp=2,microbatches=2", ZBV)),
            (True, ("tp=2", "shard=2,zero=3")),
        ],
        (0, 1),
    ),
)
def test_around_blocks_with_dropout(reentrant: bool, layouts: tuple[str, ...]) -> None:
    for verdict in prove("checkpointed", *layouts, p=0.2, reentrant=reentrant):
        assert verdict.passed, verdict


def test_inside_of_blocks_with_dropout() -> None:
    for verdict in prove("checkpointed_inside", "cp=2,attention=gather", "pp=2,microbatches=2", p=0.2):
        assert verdict.passed, verdict


@pytest.mark.parametrize("layout", cases(["pp=2,microbatches=2", "tp=2"]))
def test_those_of_transformers_with_dropout(layout: str) -> None:
    (verdict,) = prove("transformers_checkpointed", layout, p=0.2)
    assert verdict.passed, verdict
