"""An optimizer of the user's trains as on one device, or is refused where ranks have parts of what it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from meshwright.errors import ConfigError
from meshwright.strategy import HybridParallelStrategy
from tests.own_models import mean_loss, plain_model, rows
from tests.own_optimizers import (
    ClipsAll,
    EstimatesItsRate,
    FactorsLargeMatrices,
    GroupsSayWhat,
    GroupsTrust,
    NeedsSettings,
    SignOfMomentum,
)
from tests.ranks.group import run_ranks

ELEMENTS, OTHERS = "doesn't work element by element", "by what others are"
OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "groups say what": (GroupsSayWhat, ELEMENTS),
    "factors large matrices": (FactorsLargeMatrices, ELEMENTS),
    "needs settings": (lambda weights: NeedsSettings(weights, 100), ELEMENTS),
    "groups trust": (lambda weights: GroupsTrust([{"params": list(weights), "trust": True}]), ELEMENTS),
    "clips all": (ClipsAll, OTHERS),
    "estimates its rate": (EstimatesItsRate, OTHERS),
    "sign of momentum": (lambda weights: SignOfMomentum(weights, "own"), ""),
}
"""Each with the words by which it is refused on parts of weights."""


def losses_on_one_device(make: Callable[[Any], Any]) -> list[float]:
    model, losses = plain_model(), []
    optimizer = make(model.parameters())
    for x, y in rows():
        optimizer.zero_grad()
        loss = mean_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def losses_on_ranks(text: str, make: Callable[[Any], Any]) -> list[float]:
    strategy, model = HybridParallelStrategy(text), plain_model()
    steps_itself = "pp" in text
    options: dict[str, Any] = {"loss": mean_loss, "microbatches": 2} if steps_itself else {}
    module, optimizer = strategy.shard(model, make(model.parameters()), **options)
    index, count = strategy.reader
    losses = []
    for x, y in rows():
        mine, targets = x.chunk(count)[index], y.chunk(count)[index]
        if steps_itself:
            losses.append(strategy.step((mine, targets)))
            continue
        loss = mean_loss(module(mine), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(strategy.mean(loss))
    return losses


def outcomes(_rank: int, text: str) -> dict[str, list[float] | str]:
    found: dict[str, list[float] | str] = {}
    for name, (make, _) in OPTIMIZERS.items():
        try:
            found[name] = losses_on_ranks(text, make)
        except ConfigError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize(
    ("text", "refused"),
    [("replicate=2", ()), ("shard=2,zero=1", (ELEMENTS, OTHERS)), ("tp=2", (ELEMENTS, OTHERS)), ("pp=2", (OTHERS,))],
)
def test_an_own_optimizer_equals_one_device_or_is_refused(text: str, refused: tuple[str, ...]) -> None:
    for found in run_ranks(2, outcomes, text, timeout=250):
        for name, (make, words) in OPTIMIZERS.items():
            if words in refused:
                assert words in found[name] and "replicate=N" in found[name], (name, found[name])
            else:
                assert found[name] == pytest.approx(losses_on_one_device(make), rel=1e-9), name
