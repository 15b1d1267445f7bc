"""Finds by trial whether experts in a list can be spread: a clone's are called as ranks would call them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.errors import PlanError
from meshwright.models.analysis.clone import (
    Clone,
    duplicate_module,
    make_clone,
    train_frozen_layers,
    with_objective,
)
from meshwright.models.analysis.experts import find_experts
from meshwright.models.analysis.objective import Objective, nothing_dropped
from meshwright.models.analysis.outside_reads import find_outside_reads
from meshwright.models.build import BuiltModel
from meshwright.models.forward import model_output
from meshwright.parallel.expert_list import NEAREST, LocalExperts, spread
from meshwright.parallel.keyed_random import seed_all
from meshwright.parallel.moving_buffers import MovingBuffers
from meshwright.parallel.transform import DTYPES
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout

ROWS, TOKENS = 4, 12
"""Rows of a trial's batch and tokens of each."""
BOUND = 1e-9
"""Relative difference in float64 that the order of sums explains."""


def check_expert_lists(built: BuiltModel, layout: Layout, moving: Sequence[str], objective: Objective) -> None:
    """Refuses a layout under which experts in lists can't be spread.

    Args:
        built: on meta; it stays unchanged.
        layout: with ``ep``.
        moving: names of the buffers that its forward changes.
        objective: the model's own loss.

    Raises:
        PlanError: with the list, and the nearest that works.
    """
    lists = [rows.module for rows in find_experts(built.module) if rows.children]
    if lists and layout.ep_node:
        raise PlanError(
            f"ep_node={layout.ep_node} sends a token once to all of its experts on a node, but those of "
            f"{lists[0]} are modules of a list, each of which gets its rows by itself; leave ep_node out"
        )
    layers = tuple(f"{layer}." for layer in built.structure.layers)
    outside = next((name for name in lists if not name.startswith(layers)), None)
    if outside is not None and layout.state_shards > 1:
        raise PlanError(
            f"{layout} shards the experts of a layer by themselves, over other ranks than its other weights, but "
            f"the list '{outside}' is in no layer; nearest that works: tp and ep without shard, or shard without ep"
        )
    try_expert_lists(built, moving, objective, layout.compute_precision)


def check_expert_reads(built: BuiltModel, layout: Layout, objective: Objective, tokens: int) -> None:
    """Refuses code that reads weights of experts while these aren't called, of which each rank has some.

    Args:
        built: on meta; it stays unchanged.
        layout: with ``ep``.
        objective: the model's own loss.
        tokens: of a row of the trial.

    Raises:
        PlanError: with the weight, and the nearest that works.
    """
    clone = with_objective(make_clone(built), objective)
    modules = [
        f"{rows.module}.{child}" if child else rows.module
        for rows in find_experts(clone.module)
        for child in rows.children or ("",)
    ]
    for read in find_outside_reads(clone, tokens, modules):
        raise PlanError(
            f"{layout} spreads the experts of mixture layers over ranks, but '{read.weight}' is read while "
            f"'{read.layer}' isn't called, as by a penalty on weights, and each rank has those of some experts alone; "
            f"nearest that works: tp={layout.degree(Mechanics.EXPERTS)} without ep, or weight decay"
        )


def try_expert_lists(
    built: BuiltModel, moving: Sequence[str], objective: Objective | None = None, precision: str = "float64"
) -> None:
    """Compares a clone's logits and gradients with those of a copy whose experts get their rows at once, in halves.

    Both run in training, and to be evaluated: code for inference is often another loop. All layers are trained there,
    since the words of a trial may not reach the few weights that a model trains.

    Args:
        built: on meta; it stays unchanged.
        moving: names of the buffers that its forward changes.
        objective: the model's own loss.
        precision: in which the run computes.

    Raises:
        PlanError: the code that calls the experts can't do so where they are on several ranks, or gives something else.
    """
    if not any(rows.children for rows in find_experts(built.module)):
        return
    clone = train_frozen_layers(make_clone(built))
    _check_types(clone, moving, precision)
    for trial in (_ListTrial(with_objective(clone, objective), True), _ListTrial(clone, False)):
        _compare(trial, moving)


@dataclass(frozen=True, slots=True)
class _ListTrial:
    """A forward, and a backward in training, of copies of a clone."""

    clone: Clone
    is_training: bool

    def run(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Returns the output of a copy of the clone, by the name "", and in training the gradients of its weights."""
        with torch.set_grad_enabled(self.is_training), nothing_dropped():
            seed_all(0)
            output = self.clone.run(ROWS, module.train(self.is_training), tokens=TOKENS)
        if not self.is_training:
            return {"": output}
        parameters = {name: item for name, item in module.named_parameters() if item.requires_grad}
        upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(5), dtype=output.dtype)
        gradients = torch.autograd.grad(output, list(parameters.values()), upstream, allow_unused=True)
        found = {name: gradient for name, gradient in zip(parameters, gradients) if gradient is not None}
        return {"": output.detach(), **found}


def _spread_here(clone: Clone, moving: Sequence[str]) -> tuple[nn.Module, list[LocalExperts]]:
    """Returns a copy of a clone whose lists have all their experts in this process, and these."""
    module, lists = duplicate_module(clone.module), []
    for rows in find_experts(module):
        if rows.children:
            caller = module.get_submodule(rows.caller)
            buffers = MovingBuffers([caller], moving, rows.caller)
            lists.append(spread(caller, rows, (0, rows.experts), buffers, lambda: None, clone.structure.width or 0))
            lists[-1].refuse_direct_calls()
    return module, lists


def _check_types(clone: Clone, moving: Sequence[str], precision: str) -> None:
    """Refuses experts that return another type than that of their rows where the model computes in ``precision``."""
    if precision == "float64":
        return  # whose operations make float64 of each type
    module, _ = _spread_here(clone, moving)
    module = module.to(DTYPES[precision])
    tokens = torch.randint(clone.vocab, (ROWS, TOKENS), generator=torch.Generator().manual_seed(7))
    try:
        with torch.no_grad(), nothing_dropped():
            seed_all(0)
            # not by the clone's run(), in whose operations all is float64
            model_output(module, clone.structure, tokens, tokens)
    except PlanError:
        raise
    except Exception:  # its code is the author's, and a buffer of another type may be what this copy lacks
        return


def _compare(trial: _ListTrial, moving: Sequence[str]) -> None:
    """Refuses lists whose experts compute something else when they get their rows at once."""
    module, lists = _spread_here(trial.clone, moving)
    for local in lists:
        local.in_halves = True
    expected = trial.run(duplicate_module(trial.clone.module))
    manner = "gives them their rows all at once, in two parts" + (", to be evaluated" if not trial.is_training else "")
    try:
        actual = trial.run(module)
    except PlanError:
        raise
    except Exception as error:  # its code is the author's, and runs where experts are all here
        raise PlanError(
            f"ep spreads the experts of '{lists[0].path}' over ranks, but a small copy of the model that {manner}, "
            f"fails: {type(error).__name__}: {error}; {NEAREST}"
        ) from error
    for name, value in expected.items():
        other = actual.get(name)
        if other is None or not torch.allclose(value, other, rtol=BOUND, atol=BOUND * float(value.abs().max() + 1)):
            what = f"the gradient of '{name}' is" if name else "the output is"
            raise PlanError(
                f"ep spreads the experts of '{lists[0].path}' over ranks, but when a small copy of the model "
                f"{manner}, {what} something else; {NEAREST}"
            )
