"""The optimizer on this rank's shards: a rank without an element counts the same updates as the others."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from meshwright.train.config import OptimizerConfig
from meshwright.train.optimizer import LocalAdamW


def of_elements(count: int, config: OptimizerConfig) -> LocalAdamW:
    weight: Any = SimpleNamespace(
        name="w", shape=(3,), local=torch.ones(count), gradient=torch.ones(count), compute=None,
        widen_gradient=lambda: None,
    )  # fmt: skip
    return LocalAdamW([weight], config)


@pytest.mark.parametrize("implementation", ["fused", "foreach", "single"])
def test_a_rank_without_an_element_counts_updates(implementation: Literal["fused", "foreach", "single"]) -> None:
    config = OptimizerConfig(implementation=implementation)
    empty, full = of_elements(0, config), of_elements(3, config)
    for optimizer in (empty, full):
        # Nothing has a state yet, and being asked makes none.
        optimizer.step(0.1, torch.tensor(math.inf, dtype=torch.float64))
        optimizer.moments()
        assert optimizer.steps == 0
    # The second isn't finite: it is skipped, and counts on neither rank.
    for factor in (0.5, math.nan, 2.0):
        for optimizer in (empty, full):
            optimizer.step(0.1, torch.tensor(factor, dtype=torch.float64))
    assert empty.steps == full.steps == 2
    assert empty.moments() == [] and empty.bytes() == 0 and len(full.moments()) == 2 and full.bytes() == 24
    empty.restored(7)
    empty.step(0.1, torch.ones((), dtype=torch.float64))
    assert empty.steps == 8
