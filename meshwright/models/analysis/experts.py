"""Finds a model's experts by the shape of its modules.

These are 3-D weights, one row an expert, and a forward with a routing; or a list of modules alike that is called so.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import nn

from meshwright.errors import PlanError
from meshwright.spec.experts import LayerExperts

HIDDEN = ("hidden_states", "x", "hidden", "inputs", "tokens")
CHOSEN = ("top_k_index", "router_indices", "selected_experts", "expert_indices", "topk_indices", "indices")
WEIGHTS = ("top_k_weights", "routing_weights", "expert_weights", "topk_weights", "weights")
"""Names of forward's arguments in models: hidden states (T, D), experts (T, k) and their weights (T, k)."""


def find_experts(module: nn.Module) -> tuple[LayerExperts, ...]:
    """Returns every module that holds all experts of a layer as rows of its weights, in the order of the model.

    Args:
        module: a model, on any device; not wrapped yet.
    """
    experts = []
    for name, child in module.named_modules():
        rows = _expert_rows(name, child)
        if isinstance(rows, LayerExperts):
            experts.append(rows)
    return tuple(experts)


def require_experts(module: nn.Module, degree: int) -> tuple[LayerExperts, ...]:
    """Returns the experts of a model for a layout whose ``ep`` is ``degree``.

    Raises:
        PlanError: when there are none, with the closest match.
    """
    experts = find_experts(module)
    if degree > 1:
        _refuse_adapted(module, experts, degree)
        _refuse_lists(module, experts, degree)
    if experts or degree == 1:
        return experts
    reasons = [rows for name, child in module.named_modules() if isinstance(rows := _expert_rows(name, child), str)]
    reason = reasons[0] if reasons else "the model has no mixture of experts"
    raise PlanError(f"ep={degree} spreads the experts of mixture layers over ranks: {reason}; use tp={degree} instead")


def _refuse_adapted(module: nn.Module, experts: tuple[LayerExperts, ...], degree: int) -> None:
    """Refuses experts whose weights a module around them changes in its forward, as peft's `target_parameters` does.

    Raises:
        PlanError: with the weight, the module, and the nearest that works.
    """
    for rows in experts:
        path = rows.module.rpartition(".")[0]
        wrapper = module.get_submodule(path)
        # Source: peft 0.21, tuners/lora/layer.py, ParamWrapper.
        target = getattr(wrapper, "parameter_name", None)
        if target in rows.parameters:
            raise PlanError(
                f"ep={degree} spreads the experts of mixture layers over ranks, but {type(wrapper).__name__} '{path}' "
                f"adds to {rows.module}.{target} in its forward what it computes for all experts, as peft's "
                f"target_parameters do; nearest that works: tp={degree} or shard={degree},zero=3 without ep, or "
                "adapters of other modules than the experts"
            )


def _refuse_lists(module: nn.Module, experts: tuple[LayerExperts, ...], degree: int) -> None:
    """Refuses experts inside of an expert, and a list whose weights are used by others than its experts or its parent.

    Raises:
        PlanError: with the list, and the nearest that works.
    """
    rule, nearest = f"ep={degree} spreads the experts of mixture layers over ranks", f"nearest that works: tp={degree}"
    names = {name for name, child in module.named_modules() if _is_expert_list(name, child)}
    for rows in experts:
        outer = next((name for name in names if rows.module.startswith(f"{name}.")), None)
        if outer is not None:
            raise PlanError(
                f"{rule}, but {rows.module} are experts inside of an expert of {outer}, which few ranks call; {nearest}"
            )
    owners: dict[int, list[str]] = {}
    parents: dict[int, list[str]] = {}
    for name, owner in module.named_modules():
        for parameter in owner._parameters.values():
            owners.setdefault(id(parameter), []).append(name)
        for child in owner._modules.values():
            parents.setdefault(id(child), []).append(name)
    lists = tuple(f"{rows.module}." for rows in experts if rows.children)
    for rows in (rows for rows in experts if rows.children):
        whole = module.get_submodule(rows.module)
        if len(callers := parents.get(id(whole), [])) > 1:
            raise PlanError(f"{rule}, but {' and '.join(callers[:2])} both have the list {rows.module}; {nearest}")
        for name in rows.parameters:
            users = owners[id(whole.get_parameter(name))]
            if (user := next((user for user in users if not user.startswith(lists)), None)) is not None:
                raise PlanError(f"{rule}, but {rows.module}.{name} is a weight of {user} too; {nearest}")


def _is_expert_list(name: str, module: nn.Module) -> bool:
    """Returns whether a module is a list or dict whose name says that it holds experts, of which not all are called."""
    own_name = name.rpartition(".")[2].lower()
    # what is called shared is computed for every token
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and "expert" in own_name and "shared" not in own_name


def _expert_rows(name: str, module: nn.Module) -> LayerExperts | str | None:
    """Returns a module's experts, or the reason for which they can't be spread; None for a module without any."""
    if _is_expert_list(name, module):
        return _expert_list(name, module)
    direct_parameters = dict(module.named_parameters(recurse=False))
    stacked = [key for key, parameter in direct_parameters.items() if parameter.dim() == 3]
    sizes = {int(parameter.shape[0]) if parameter.dim() else 1 for parameter in direct_parameters.values()}
    attributes_by_count = {size: attributes for size in sizes if (attributes := _count_attributes(module, size))}
    if len(stacked) > 1 and not attributes_by_count and len({direct_parameters[key].shape[0] for key in stacked}) == 1:
        count = int(direct_parameters[stacked[0]].shape[0])
        attribute = f"no attribute like num_experts = {count} says that they are experts"
        return f"{name} has {count} rows in {stacked[0]}, but {attribute}"
    if not stacked or not attributes_by_count:
        return None
    if len(stacked) < 2:
        return f"{name} is one product of its experts, not all that an expert does"
    if len(sizes) > 1:
        rows = " and ".join(str(size) for size in sorted(sizes))
        return f"{name} has parameters of {rows} rows, not one row for each expert"
    shared = [key for key, _ in module.named_parameters() if key not in direct_parameters]
    if shared:
        return f"{name}.{shared[0]} is shared by the experts, so every rank would have to hold and sum it"
    arguments = _routing_arguments(module)
    if arguments is None:
        argument_names = ", ".join(inspect.signature(module.forward).parameters)
        return (
            f"{name} is called with ({argument_names}), not with tokens, their experts and weights: "
            f"({HIDDEN[0]}, {CHOSEN[0]}, {WEIGHTS[0]})"
        )
    (experts,) = sizes
    return LayerExperts(
        module=name,
        experts=experts,
        parameters=tuple(direct_parameters),
        counts=attributes_by_count[experts],
        arguments=arguments,
    )


def _expert_list(name: str, module: nn.Module) -> LayerExperts | str | None:
    """Returns the experts of a list or dict of modules, or the reason for which they can't be spread."""
    children = dict(module.named_children())
    shapes = [{key: item.shape for key, item in child.named_parameters()} for child in children.values()]
    if len(children) < 2 or not shapes[0]:
        return None
    if any(isinstance(child, nn.ModuleList | nn.ModuleDict) for child in children.values()):
        return f"{name} is a list of lists"
    if len(set(module.children())) < len(module) or any(item != shapes[0] for item in shapes):
        return f"{name} is a list of modules that differ in their weights, or of one that is in it twice"
    if next(module.buffers(), None) is not None:
        return f"{name} is a list of modules with buffers, and nobody sums these over ranks"
    parameters = dict(module.named_parameters())
    if len(parameters) < len(children) * len(shapes[0]):
        return f"{name} is a list of modules that share weights"
    if any(not item.dim() for item in parameters.values()):
        return f"{name} is a list of modules that have numbers as weights"
    return LayerExperts(
        module=name,
        experts=len(children),
        parameters=tuple(parameters),
        counts=(),
        arguments=(HIDDEN[0], CHOSEN[0], WEIGHTS[0]),
        children=tuple(children),
    )


def _count_attributes(module: nn.Module, experts: int) -> tuple[str, ...]:
    """Returns the attributes that count the experts: integers of that value with "expert" in the name."""
    return tuple(
        key
        for key, value in vars(module).items()
        # num_experts_per_tok isn't a count of experts
        if type(value) is int and value == experts and "expert" in key and "per" not in key.replace("expert", "")
    )


def _routing_arguments(module: nn.Module) -> tuple[str, str, str] | None:
    """Returns forward's names for tokens, expert indices and weights; None where it has other arguments."""
    names = list(inspect.signature(module.forward).parameters)
    if len(names) != 3 or names[0] not in HIDDEN or names[1] not in CHOSEN or names[2] not in WEIGHTS:
        return None
    return names[0], names[1], names[2]


def routes_wide(module: nn.Module) -> bool:
    """Returns whether a mixture's router weighs experts in float32 while the model computes in bfloat16.

    The module around the first experts is run on meta up to them; one that can't be run this way counts as bfloat16.

    Args:
        module: a model on meta; it isn't changed.
    """
    experts = find_experts(module)
    # weights of experts in a list don't travel
    if not experts or "." not in experts[0].module or experts[0].children:
        return False
    path, _, child_name = experts[0].module.rpartition(".")
    # a copy on meta: converting the model itself would change its types
    block = copy.deepcopy(module.get_submodule(path)).to(torch.bfloat16)
    rows, router_dtypes = experts[0], list[torch.dtype]()

    class Reached(Exception):
        """The experts are called; nothing after that is of interest."""

    def record_dtype(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        router_dtypes.append((dict(zip(rows.arguments, args)) | kwargs)[rows.arguments[2]].dtype)
        raise Reached

    block.get_submodule(child_name).register_forward_pre_hook(record_dtype, with_kwargs=True)
    width = next(
        (parameter.shape[1] for _, parameter in block.named_parameters(recurse=True) if parameter.dim() == 2), 0
    )
    try:
        block(torch.empty(1, 2, width, dtype=torch.bfloat16, device="meta"))
    except Exception:  # its code is the author's: whatever it raises, nothing is known
        return bool(router_dtypes) and router_dtypes[0] == torch.float32
    return False
