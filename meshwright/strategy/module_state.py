"""A module of the user's own before and after it is sharded: its parameters, hooks, layers and state dict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from meshwright.errors import ConfigError
from meshwright.parallel.program import Program
from meshwright.parallel.weights import Weight


@dataclass(frozen=True, slots=True)
class ParametersBefore:
    """Parameters that a module had before it was sharded."""

    parameters: list[nn.Parameter]
    names: dict[int, str]
    """Name by id; of tied names the first."""


def named_before(model: Any, optimizer: torch.optim.Optimizer | None) -> ParametersBefore:
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
        return ParametersBefore([], {})
    if any(isinstance(part, nn.parallel.DistributedDataParallel) for part in model.modules()):
        raise ConfigError("the model is in DistributedDataParallel: shard the module itself, and write replicate=N")
    found = dict(model.named_parameters())
    for name, parameter in found.items():
        if isinstance(parameter, DTensor):
            raise ConfigError(f"'{name}' is a DTensor: the model is sharded already; shard one with whole weights")
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigError(
                f"a hook was registered on '{name}', which shard() replaces: change gradients after backward() instead"
            )
    return ParametersBefore(list(found.values()), {id(item): name for name, item in found.items()})


def send_weights(model: Any, source: int) -> None:
    """Makes a module's weights and buffers those of one rank.

    Raises:
        ConfigError: there is no such rank, or no values to send.
    """
    if not isinstance(model, nn.Module) or any(item.is_meta for item in model.parameters()):
        raise ConfigError(f"from_rank={source} sends a module's values: give a module with real weights on every rank")
    if not 0 <= source < dist.get_world_size():
        raise ConfigError(f"from_rank={source}: ranks are 0 to {dist.get_world_size() - 1}")
    with torch.no_grad():
        for item in (*model.parameters(), *model.buffers()):
            values = item.contiguous()
            dist.broadcast(values, src=source)
            item.copy_(values)


def batch_norms(module: nn.Module) -> list[nn.Module]:
    """Returns the layers that take statistics of the rows they see; SyncBatchNorm's are of all ranks' rows."""
    kinds = [part for part in module.modules() if isinstance(part, _BatchNorm)]
    return [part for part in kinds if not isinstance(part, nn.SyncBatchNorm)]


def settle_module(module: nn.Module, program: Program) -> None:
    """Makes a sharded module list its parts at any time, and refuse to be copied.

    FSDP2 registers gathered weights in place of the shards from forward to backward, and after it at ZeRO 1 and 2: an
    optimizer over these would train nothing, and zero_grad() would clear no gradient of a shard.
    """
    parts = {name: weight.parameter for name, weight in _by_name(module, program).items()}
    listed = type(module).named_parameters

    def named_parameters(*args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        prefix = kwargs.get("prefix", args[0] if args else "")
        start = len(prefix) + 1 if prefix else 0
        for name, item in listed(module, *args, **kwargs):
            yield name, parts.get(name[start:], item)

    def refuse_copy(_: Any) -> Any:
        raise ConfigError(
            "a copy of a sharded model would compute with the first one's layers: copy it before shard(), or keep "
            "averages of model.parameters(), which are this rank's parts, and copy_ them in to evaluate"
        )

    module.named_parameters = named_parameters  # type: ignore[method-assign]
    module.__deepcopy__ = refuse_copy  # type: ignore[assignment]
    guard_state_dict(module, program)


def guard_state_dict(module: nn.Module, program: Program) -> None:
    """Makes `load_state_dict` take whole weights, and refuses a `state_dict` of parts under whole names."""
    weights = _by_name(module, program)
    cut = {name for name, weight in weights.items() if not weight.place.is_whole}

    def refuse(part: nn.Module, prefix: str, _keep: bool) -> None:
        if part is module and cut:
            raise ConfigError(
                f"state_dict() would give this rank's part of '{next(iter(cut))}' under the whole weight's name: save "
                "strategy.state_dict() by torch.distributed.checkpoint, which any layout or none loads"
            )

    def take_parts(part: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if part is not module:
            return
        for name, weight in weights.items():
            value = state.get(prefix + name)
            if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
                continue
            if tuple(value.shape) == weight.shape:
                state[prefix + name] = weight.like(weight.part(value).to(weight.local.dtype))
            elif name in cut:
                raise ConfigError(
                    f"'{name}' has shape {tuple(value.shape)} in the state dict, but {weight.shape} in the model: "
                    "load_state_dict takes whole weights, of which each rank keeps its part"
                )

    module.register_state_dict_pre_hook(refuse)
    module.register_load_state_dict_pre_hook(take_parts)


def _by_name(module: nn.Module, program: Program) -> dict[str, Weight]:
    """Every name of every weight, ties by each of theirs."""
    held = {id(weight.parameter): weight for weight in (*program.weights, *program.frozen)}
    every = module.named_parameters(remove_duplicate=False)
    return {name: held[id(item)] for name, item in every if id(item) in held}
