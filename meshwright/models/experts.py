"""Finds a model's experts by the shape of its modules: rows of 3-D weights behind a forward that takes a routing."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import nn

from meshwright.errors import PlanError
from meshwright.spec.experts import ExpertRows

HIDDEN = ("hidden_states", "x", "hidden", "inputs", "tokens")
CHOSEN = ("top_k_index", "router_indices", "selected_experts", "expert_indices", "topk_indices", "indices")
WEIGHTS = ("top_k_weights", "routing_weights", "expert_weights", "topk_weights", "weights")
"""What models call forward's arguments: hidden states (T, D), experts (T, k) and their weights (T, k)."""


def find_experts(module: nn.Module) -> tuple[ExpertRows, ...]:
    """Returns every module that holds all experts of a layer as rows, in the order of the model.

    Args:
        module: a model, on any device; not wrapped yet.
    """
    found = []
    for name, child in module.named_modules():
        rows = _rows(name, child)
        if isinstance(rows, ExpertRows):
            found.append(rows)
    return tuple(found)


def require_experts(module: nn.Module, degree: int) -> tuple[ExpertRows, ...]:
    """Returns `find_experts`, for a layout whose ``ep`` is ``degree``.

    Raises:
        PlanError: when there are none, with what was found instead.
    """
    found = find_experts(module)
    if found or degree == 1:
        return found
    reasons = [rows for name, child in module.named_modules() if isinstance(rows := _rows(name, child), str)]
    why = reasons[0] if reasons else "the model has no mixture of experts"
    raise PlanError(f"ep={degree} spreads the experts of mixture layers over ranks: {why}; use tp={degree} instead")


def _rows(name: str, module: nn.Module) -> ExpertRows | str | None:
    """What the module is: experts, a reason why it is none that can be spread, or nothing of the kind."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and "expert" in name.rpartition(".")[2].lower():
        return f"{name} is a list of {len(module)} modules, and only experts that are rows of one weight can travel"
    own = dict(module.named_parameters(recurse=False))
    stacked = [key for key, item in own.items() if item.dim() == 3]
    sizes = {int(item.shape[0]) if item.dim() else 1 for item in own.values()}
    counts = {size: found for size in sizes if (found := _counts(module, size))}
    if not stacked or not counts:
        return None
    if len(stacked) < 2:
        return f"{name} is one product of its experts, not all that an expert does"
    if len(sizes) > 1:
        rows = " and ".join(str(size) for size in sorted(sizes))
        return f"{name} has parameters of {rows} rows, not one row for each expert"
    shared = [key for key, _ in module.named_parameters() if key not in own]
    if shared:
        return f"{name}.{shared[0]} is shared by the experts, so every rank would have to hold and sum it"
    arguments = _arguments(module)
    if arguments is None:
        taken = ", ".join(inspect.signature(module.forward).parameters)
        return f"{name} is called with ({taken}), not with tokens, their experts and weights"
    (experts,) = sizes
    return ExpertRows(module=name, experts=experts, parameters=tuple(own), counts=counts[experts], arguments=arguments)


def _counts(module: nn.Module, experts: int) -> tuple[str, ...]:
    """Attributes that count the experts: integers of that value whose name says so."""
    return tuple(
        key
        for key, value in vars(module).items()
        if type(value) is int and value == experts and "expert" in key and "per" not in key.replace("expert", "")
    )


def _arguments(module: nn.Module) -> tuple[str, str, str] | None:
    names = list(inspect.signature(module.forward).parameters)
    if len(names) != 3 or names[0] not in HIDDEN or names[1] not in CHOSEN or names[2] not in WEIGHTS:
        return None
    return names[0], names[1], names[2]


def routes_wide(module: nn.Module) -> bool:
    """Returns whether a mixture's router weighs experts in float32 while the model computes in bfloat16.

    The module around the first experts is run on meta up to them; one that can't be run so counts as narrow.

    Args:
        module: a model on meta; it isn't changed.
    """
    found = find_experts(module)
    if not found or "." not in found[0].module:
        return False
    path, _, own = found[0].module.rpartition(".")
    block = copy.deepcopy(module.get_submodule(path)).to(torch.bfloat16)
    rows, seen = found[0], list[torch.dtype]()

    class Reached(Exception):
        """The experts are called; nothing after that is of interest."""

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((dict(zip(rows.arguments, args)) | kwargs)[rows.arguments[2]].dtype)
        raise Reached

    block.get_submodule(own).register_forward_pre_hook(stop, with_kwargs=True)
    width = next((item.shape[1] for _, item in block.named_parameters(recurse=True) if item.dim() == 2), 0)
    try:
        block(torch.empty(1, 2, width, dtype=torch.bfloat16, device="meta"))
    except Exception:  # its code is the author's: whatever it raises, nothing is known
        return bool(seen) and seen[0] == torch.float32
    return False
