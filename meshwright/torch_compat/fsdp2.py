"""Private names of FSDP2 (torch.distributed.fsdp)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from meshwright.torch_compat import PrivateName

__all__ = [
    "PRIVATE_NAMES",
    "AllGather",
    "ReduceScatter",
    "accumulate_unsharded_gradients",
    "clear_unsharded_gradients",
    "fsdp_groups",
    "fsdp_parameters",
    "gathered_tensors",
    "set_async_unshard",
    "shard_sizes",
]

PRIVATE_NAMES = (
    PrivateName(
        "torch.distributed.fsdp:FSDPModule._get_fsdp_state",
        "the way from a unit to its parameters",
    ),
    PrivateName(
        "torch.distributed.fsdp:FSDPModule._set_unshard_async_op", "gathers under way on the CPU, without streams"
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_api:AllGather", "the protocol of set_custom_all_gather, not exported"
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_api:ReduceScatter",
        "the protocol of set_custom_reduce_scatter, not exported",
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.accumulate_unsharded_grad_if_needed",
        "second halves of a backward call no hook of FSDP2, which adds up micro-batches in float32",
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.to_accumulated_grad_if_needed",
        "the same",
    ),
)


def fsdp_groups(unit: nn.Module) -> list[Any]:
    """Returns FSDP2's own groups (`FSDPParamGroup`) of one unit: any number since torch 2.12, one or none in 2.11."""
    state = unit._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def fsdp_parameters(module: nn.Module) -> Iterator[Any]:
    """Yields FSDP2's own objects (`FSDPParam`) of all parameters that it shards in a module."""
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            for group in fsdp_groups(submodule):
                yield from group.fsdp_params


def shard_sizes(unit: nn.Module, prefixes: Mapping[nn.Module, str], trained: bool = False) -> dict[str, int]:
    """Returns the elements of a shard of each weight of a unit, by name, in the order of its flat messages.

    Args:
        unit: of FSDP2.
        prefixes: name of each module in the model.
        trained: leave out weights that have no gradients.
    """
    sizes = {}
    for fsdp_param in (fsdp_param for group in fsdp_groups(unit) for fsdp_param in group.fsdp_params):
        if fsdp_param.sharded_param.requires_grad or not trained:
            prefix, name = prefixes[fsdp_param._module_info.module], fsdp_param._module_info.param_name
            # Padded: every rank's shard is as long as the first's.
            sizes[f"{prefix}.{name}" if prefix else name] = fsdp_param.padded_sharded_param_size.numel()
    return sizes


def set_async_unshard(unit: nn.Module) -> None:
    """Makes a unit's gathers collectives under way instead of work on a stream of their own."""
    unit._set_unshard_async_op(True)


def clear_unsharded_gradients(module: nn.Module) -> None:
    """Drops the gradients that FSDP2 keeps in gathered parameters between micro-batches."""
    for fsdp_param in fsdp_parameters(module):
        fsdp_param.unsharded_accumulated_grad = None
        if hasattr(fsdp_param, "_unsharded_param"):
            fsdp_param._unsharded_param.grad = None


def accumulate_unsharded_gradients(module: nn.Module) -> None:
    """Adds gradients in the compute dtype to FSDP2's float32 sums, as `FSDPParamGroup.post_backward` does."""
    for fsdp_param in fsdp_parameters(module):
        if hasattr(fsdp_param, "_unsharded_param"):
            fsdp_param.accumulate_unsharded_grad_if_needed()
            fsdp_param.to_accumulated_grad_if_needed()


def gathered_tensors(unit: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns a unit's (gathered parameters, full gradients kept for later), under way or arrived."""
    parameters: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    for group in fsdp_groups(unit):
        pending = getattr(group, "_all_gather_result", None)
        if pending is not None:
            parameters.append(pending.all_gather_output)
        for fsdp_param in group.fsdp_params:
            parameters.extend(getattr(fsdp_param, "all_gather_outputs", []))
            unsharded = getattr(fsdp_param, "_unsharded_param", None)
            if unsharded is not None:
                accumulated = getattr(fsdp_param, "unsharded_accumulated_grad", None)
                gradients.extend(grad for grad in (unsharded.grad, accumulated) if grad is not None)
    return parameters, gradients
