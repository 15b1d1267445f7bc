"""Tries on small weights what an optimizer reads to move an element: that alone, all of its weight, or other weights.

A copy of the optimizer, with the settings of its groups and its attributes, steps on weights of its own: whole ones,
halves of them, and whole ones beside others. On parts of weights an update is right where the three agree.
"""

from __future__ import annotations

import collections
import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

_SHAPES = {0: (), 1: (160,), 2: (160, 144), 3: (24, 20, 16), 4: (12, 10, 8, 6)}
"""Shapes of trial weights by number of dims; matrices are above the sizes from which optimizers factor or quantise."""

_GRADIENT_SCALES = (1.0, 100.0, 0.01)
"""Of the steps of a trial: several, for moments and preconditioners; large, for updates that are clipped."""

_RATE = 1e-2
"""Learning rate of a trial: a warm-up begins at 0, where every optimizer agrees with itself."""

_OWN_ATTRIBUTES = ("param_groups", "state", "step", "zero_grad")
"""Attributes of an optimizer that its copy makes anew; a scheduler puts a ``step`` of its own in its place."""

Cut = Callable[[torch.Tensor], torch.Tensor]
"""A trial weight to the part of it that is stepped on."""


@dataclass(frozen=True, slots=True)
class OptimizerTrial:
    """What a trial has shown."""

    by_element: bool
    """Whether halves of weights move as whole weights do."""
    by_weight: bool
    """Whether a weight moves the same beside other weights."""
    failure: str = ""
    """Why no copy of the optimizer could be tried; empty where one was."""


def trial_key(optimizer: Optimizer) -> str:
    """Returns what a trial depends on: class, settings of the groups, numbers of dims, and plain attributes."""
    groups = [
        {key: value for key, value in group.items() if isinstance(value, (bool, int, str)) or key == "betas"}
        | {"dims": sorted({parameter.dim() for parameter in group["params"]})}
        for group in optimizer.param_groups
    ]
    plain = {key: value for key, value in vars(optimizer).items() if isinstance(value, (bool, int, float, str))}
    return f"{type(optimizer)} {groups} {plain}"


def try_optimizer(optimizer: Optimizer) -> OptimizerTrial:
    """Tries an optimizer on weights of its own; it stays as it is, and so do the random numbers of the CPU."""
    if not any(group["params"] for group in optimizer.param_groups):
        # of a pipeline's stage that is frozen as a whole
        return OptimizerTrial(True, True)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        failure = ""
        for make in (_copy_optimizer, _construct_optimizer):
            try:
                return _compare(optimizer, make)
            except Exception as error:  # whatever an optimizer of the user's raises
                failure = failure or f"{type(error).__name__}: {error}"
    return OptimizerTrial(False, False, failure)


_Make = Callable[[Optimizer, list[dict[str, Any]], dict[int, nn.Parameter]], Optimizer]
"""(optimizer, groups over trial weights, trial weight of each parameter by its id) to an optimizer of the same kind."""


def _compare(optimizer: Optimizer, make: _Make) -> OptimizerTrial:
    """Compares the movements of whole weights with those of halves, and with those beside other weights."""
    whole = _movements(optimizer, make, lambda value: value, 0)
    if not any(bool(movement.any()) for movement in whole):
        return OptimizerTrial(False, False, "its first steps move no weight")
    cuts: list[Cut] = [
        lambda value: value[: len(value) // 2] if value.dim() else value,
        lambda value: value[..., : value.shape[-1] // 2] if value.dim() > 1 else value,
    ]
    by_element = all(_agree(_movements(optimizer, make, cut, 0), [cut(movement) for movement in whole]) for cut in cuts)
    return OptimizerTrial(by_element, _agree(_movements(optimizer, make, lambda value: value, 1), whole))


def _agree(movements: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Tests whether movements of weights, each of any shape in float64, are the same but for rounding."""
    return all(
        bool((movement - other).abs().max() <= 1e-9 * other.abs().max() + 1e-12)
        for movement, other in zip(movements, expected, strict=True)
    )


def _movements(optimizer: Optimizer, make: _Make, cut: Cut, extra: int) -> list[torch.Tensor]:
    """Returns by how much some steps move trial weights: one for each group and number of dims.

    Args:
        optimizer: of the user.
        make: makes one of its kind.
        cut: takes a part of a trial weight.
        extra: further weights of each group, which aren't returned.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(dims: int) -> torch.Tensor:
        return torch.randn(_SHAPES.get(dims, (4,) * dims), generator=generator, dtype=torch.float64)

    groups: list[dict[str, Any]] = []
    members: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    replacements: dict[int, nn.Parameter] = {}
    for group in optimizer.param_groups:
        dims = sorted({parameter.dim() for parameter in group["params"]})
        weights = {number: nn.Parameter(cut(draw(number)).clone()) for number in dims}
        replacements |= {id(parameter): weights[parameter.dim()] for parameter in group["params"]}
        beside = [nn.Parameter(torch.ones(_SHAPES.get(number, (4,) * number)).double()) for number in dims * extra]
        groups.append({**_settings(group), "params": [*weights.values(), *beside]})
        members += weights.values()
        others += beside
    starts = [weight.detach().clone() for weight in members]
    directions = [draw(start.dim()) for start in starts]
    probe = make(optimizer, groups, replacements)
    for scale in _GRADIENT_SCALES:
        for weight, direction in zip(members, directions):
            # alike in each step: what estimates a rate by the way so far sees progress
            weight.grad = cut(direction + 0.3 * draw(direction.dim())).clone() * scale
        for weight in others:
            weight.grad = torch.full_like(weight, scale)
        probe.step()
    return [weight.detach() - start for weight, start in zip(members, starts)]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a group as a trial on the CPU has them."""
    settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    # both want weights on a GPU
    settings |= {key: False for key in ("fused", "capturable") if settings.get(key)}
    rate = settings.get("lr")
    if isinstance(rate, torch.Tensor):
        settings["lr"] = torch.full_like(rate, _RATE, device="cpu")
    elif isinstance(rate, float):
        settings["lr"] = _RATE
    return copy.deepcopy(settings)


def _copy_optimizer(
    optimizer: Optimizer, groups: list[dict[str, Any]], replacements: dict[int, nn.Parameter]
) -> Optimizer:
    """Returns a copy with its attributes and without state; it shares what can't be copied, such as process groups."""
    memo: dict[int, Any] = dict(replacements)
    attributes: dict[str, Any] = {}
    for key, value in vars(optimizer).items():
        if key in _OWN_ATTRIBUTES or "_hooks" in key:
            continue
        try:
            attributes[key] = copy.deepcopy(value, memo)
        except Exception:  # whatever a value of the user's raises
            attributes[key] = value
    probe = object.__new__(type(optimizer))
    probe.__setstate__({**attributes, "param_groups": groups, "state": collections.defaultdict(dict)})
    return probe


def _construct_optimizer(optimizer: Optimizer, groups: list[dict[str, Any]], _: dict[int, nn.Parameter]) -> Optimizer:
    """Returns a new one of the same class, for one that makes its state as it is constructed, as Adagrad does."""
    known = {**vars(optimizer), **optimizer.defaults}
    names = [name for name in list(inspect.signature(type(optimizer)).parameters)[1:] if name in known]
    skipped = ("lr", "fused", "capturable", *_OWN_ATTRIBUTES)
    return type(optimizer)(groups, **{name: known[name] for name in names if name not in skipped})  # type: ignore[call-arg]
