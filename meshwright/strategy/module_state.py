"""Reads a custom module before it is sharded, and guards its parameters, copies and state dict afterwards."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.errors import ConfigError
from meshwright.parallel.program import Program
from meshwright.parallel.weights import Weight
from meshwright.strategy.optimizer_binding import OptimizerBinding
from meshwright.torch_compat.tensors import BatchNormBase


@dataclass(frozen=True, slots=True)
class OriginalParameters:
    """Parameters that a module had before it was sharded."""

    parameters: list[nn.Parameter]
    names: dict[int, str]
    """Name by id; of tied names the first."""


def original_parameters(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> OriginalParameters:
    """Reads a module's parameters before they are replaced.

    Raises:
        ConfigError: hooks on them would be lost, or an optimizer can't be of them.
    """
    if not isinstance(model, nn.Module):
        if optimizer is not None:
            raise ConfigError(
                "an optimizer was given with a function that builds the model, so it can't have its parameters: call "
                "strategy.optimizer after shard()"
            )
        return OriginalParameters([], {})
    if any(isinstance(child, nn.parallel.DistributedDataParallel) for child in model.modules()):
        raise ConfigError("the model is in DistributedDataParallel: shard the module itself, and write replicate=N")
    # remove_duplicate: the first of tied names
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if isinstance(parameter, DTensor):
            raise ConfigError(f"'{name}' is a DTensor: the model is sharded already; shard one with whole weights")
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigError(
                f"a hook was registered on '{name}', which shard() replaces: change gradients after backward() instead"
            )
    return OriginalParameters(list(parameters.values()), {id(item): name for name, item in parameters.items()})


def refuse_uses_of(original: OriginalParameters, optimizers: OptimizerBinding) -> None:
    """Refuses replaced parameters in an optimizer's step, which would train nothing, and in backward.

    A list, a closure or a variable may hold a parameter from before it was replaced, and nothing updates that.
    """
    optimizers.mark_stale(original.parameters)

    def refuse(name: str, _: torch.Tensor) -> NoReturn:
        raise ConfigError(
            f"'{name}' is read as it was before shard(), which replaces the model's parameters, so that no update "
            "would reach it: a list, a closure or a variable made before shard() holds it; nearest that works: read "
            "the weight as an attribute of its module, in forward or from model.parameters() after shard()"
        )

    for parameter in original.parameters:
        if parameter.requires_grad:
            parameter.register_hook(functools.partial(refuse, original.names[id(parameter)]))


def send_weights(model: nn.Module, source: int) -> None:
    """Broadcasts one rank's weights and buffers to the others, in place.

    Raises:
        ConfigError: there is no such rank, or no values to send.
    """
    if not isinstance(model, nn.Module) or any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigError(f"from_rank={source} sends a module's values: give a module with real weights on every rank")
    if not 0 <= source < dist.get_world_size():
        raise ConfigError(f"from_rank={source}: ranks are 0 to {dist.get_world_size() - 1}")
    with torch.no_grad():
        for item in (*model.parameters(), *model.buffers()):
            values = item.contiguous()
            dist.broadcast(values, src=source)
            # a broadcast needs contiguous memory, so copy back
            item.copy_(values)


def batch_norms(module: nn.Module) -> list[nn.Module]:
    """Returns the layers with statistics of this rank's rows; SyncBatchNorm's are of all ranks' rows."""
    norms = [child for child in module.modules() if isinstance(child, BatchNormBase)]
    return [child for child in norms if not isinstance(child, nn.SyncBatchNorm)]


def settle_module(module: nn.Module, program: Program) -> None:
    """Makes a sharded module list its shards at any time, and refuse to be copied.

    FSDP2 registers gathered weights in place of the shards from forward to backward, and after it at ZeRO 1 and 2: an
    optimizer over these would train nothing, and zero_grad() would clear no gradient of a shard.
    """
    local_parameters = {name: weight.parameter for name, weight in _weights_by_name(module, program).items()}
    full_listing = type(module).named_parameters

    # optimizers and clipping functions list parameters at any time
    def named_parameters(prefix: str = "", *args: bool, **kwargs: bool) -> Iterator[tuple[str, nn.Parameter]]:
        start = len(prefix) + 1 if prefix else 0
        for name, item in full_listing(module, prefix, *args, **kwargs):
            yield name, local_parameters.get(name[start:], item)

    def refuse_copy(_: object) -> NoReturn:
        raise ConfigError(
            "a copy of a sharded model would compute with the first one's layers: copy it before shard(), or keep "
            "averages of model.parameters(), which are this rank's parts, and copy_ them in to evaluate"
        )

    module.named_parameters = named_parameters  # type: ignore[method-assign]
    module.__deepcopy__ = refuse_copy  # type: ignore[assignment]
    guard_state_dict(module, program)


def guard_state_dict(module: nn.Module, program: Program) -> None:
    """Makes `load_state_dict` cut full weights, and refuses a `state_dict` of shards under full names."""
    weights = _weights_by_name(module, program)
    split_names = {name for name, weight in weights.items() if not weight.shard.is_unsharded}

    def refuse(loaded_module: nn.Module, prefix: str, _keep: bool) -> None:
        if loaded_module is module and split_names:
            raise ConfigError(
                f"state_dict() would give this rank's part of '{next(iter(split_names))}' under the whole weight's "
                "name: save strategy.state_dict() by torch.distributed.checkpoint, which any layout or none loads"
            )

    def cut_to_shards(loaded_module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        if loaded_module is not module:
            return
        for name, weight in weights.items():
            value = state.get(prefix + name)
            # DTensors are shards already: torch.distributed.checkpoint has cut them
            if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
                continue
            if tuple(value.shape) == weight.shape:
                state[prefix + name] = weight.as_dtensor(weight.extract_shard(value).to(weight.local.dtype))
            elif name in split_names:
                raise ConfigError(
                    f"'{name}' has shape {tuple(value.shape)} in the state dict, but {weight.shape} in the model: "
                    "load_state_dict takes whole weights, of which each rank keeps its part"
                )

    module.register_state_dict_pre_hook(refuse)
    module.register_load_state_dict_pre_hook(cut_to_shards)


def _weights_by_name(module: nn.Module, program: Program) -> dict[str, Weight]:
    """Returns the weight of every parameter name; a tied weight has several names."""
    weights_by_id = {id(weight.parameter): weight for weight in (*program.weights, *program.frozen)}
    named = module.named_parameters(remove_duplicate=False)
    return {name: weights_by_id[id(item)] for name, item in named if id(item) in weights_by_id}
