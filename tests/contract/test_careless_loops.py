"""No custom loop goes wrong silently: each equals one device, losses and weights, or is refused with a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.errors import MeshwrightError
from meshwright.strategy import HybridParallelStrategy
from meshwright.strategy.one_device import OneDevice
from tests.contract.careless_loops import LOOPS, UNCOMPARED, Careless
from tests.ranks.group import run_ranks
from tests.tiers import cases

LAYOUTS = ("replicate=2", "shard=2,zero=1", "shard=2,zero=2", "shard=2,zero=3", "tp=2")
BOUND = 1e-9


def on_one_device(habit: Careless) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Runs a loop in this process, in plain torch."""
    device = OneDevice()
    losses = [float(loss.detach()) for loss in habit.loop(device)]
    assert device.model is not None
    return losses, {name: item.detach().clone() for name, item in device.model.named_parameters()}


def on_ranks(_rank: int, text: str, wanted: dict[str, Any]) -> dict[str, str]:
    """Runs every loop; returns what each came to: nothing, or what differs, or the refusal."""
    outcome = {}
    for habit in LOOPS:
        strategy = HybridParallelStrategy(text)
        try:
            losses = [strategy.mean(loss) for loss in habit.loop(strategy)]
            outcome[habit.name] = difference(strategy, losses, *wanted[habit.name])
        except (MeshwrightError, SystemError) as error:
            outcome[habit.name] = f"refused: {error}"
        except Exception as error:  # the other rank may wait for this one: end both, with the loop's name
            raise RuntimeError(f"{habit.name}: {type(error).__name__}: {error}") from error
    return outcome


def difference(strategy: Any, losses: list[float], wanted: list[float], weights: dict[str, torch.Tensor]) -> str:
    """Says where losses or this rank's parts of weights aren't those of one device."""
    exact = all(value.dtype == torch.float64 for value in weights.values())
    if losses != pytest.approx(wanted, rel=BOUND if exact else 1e-5):
        return f"losses {losses}, on one device {wanted}"
    for weight in strategy.sharded_model.program.weights:
        gap = (weight.local - weight.extract_shard(weights[weight.name])).abs().max() if weight.local.numel() else 0.0
        if not gap <= (1e-7 if exact else 1e-5):
            return f"{weight.name} differs by {float(gap):.1e}"
    return ""


@pytest.mark.parametrize("text", cases(LAYOUTS, (2,), extended=(0,)))
def test_careless_loops_equal_one_device_or_are_refused(text: str) -> None:
    wanted = {habit.name: on_one_device(habit) for habit in LOOPS}
    axis = text.partition(",")[0]
    for outcome in run_ranks(2, on_ranks, text, wanted, timeout=250):
        wrong = []
        for habit in (habit for habit in LOOPS if (habit.name, axis) not in UNCOMPARED):
            words, found = habit.refused.get(axis, ""), outcome[habit.name]
            if found.startswith("refused: ") != bool(words) or words not in found or (found and not words):
                wrong.append(f"{habit.name}: {found or 'equal'}, expected {words or 'equal'}")
        assert not wrong, "\n".join(wrong)
