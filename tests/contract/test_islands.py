"""Islands: any layout of them equals a plain outer loop on one device; resumption, refusals and prices of islands."""

from __future__ import annotations

import dataclasses

from meshwright.proof.plain_islands import OuterRecipe
from meshwright.proof.verify import random_batches, verify
from tests.contract import test_pipeline_models as models


def all_pass(name: str, outer: OuterRecipe, steps: int, *texts: str) -> None:
    batches = random_batches(steps, 8, models.SEQUENCE, models.VOCAB, documents=True)
    case = dataclasses.replace(models.case(name), batches=batches, outer=outer)
    verdicts = verify(case, models.layouts(*texts))
    assert [(each.layout, each.refused, each.crashed, each.wrong) for each in verdicts if not each.passed] == []
    assert all(verdict.worst.error < 1e-9 for verdict in verdicts)


def test_diloco_on_islands_equals_a_plain_loop_on_one_device() -> None:
    all_pass(
        "llama",
        OuterRecipe(),
        5,
        "islands=2",
        "islands=4,microbatches=2",
        "islands=2,replicate=2",
        "islands=2,shard=2,zero=1",
        "islands=2,shard=2,zero=2,microbatches=2",
        "islands=2,shard=2,zero=3",
        "islands=2,tp=2",
        "islands=2,pp=2,microbatches=2",
        "islands=2,cp=2",
    )
