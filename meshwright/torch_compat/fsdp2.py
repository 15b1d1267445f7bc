"""Private names of FSDP2 (torch.distributed.fsdp)."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._C import _current_autograd_node
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, TrainingState

from meshwright.torch_compat import PrivateName
from meshwright.torch_compat.tensors import in_backward

__all__ = [
    "PRIVATE_NAMES",
    "AllGather",
    "ReduceScatter",
    "accumulate_unsharded_gradients",
    "clear_unsharded_gradients",
    "complete_gradients",
    "fsdp_groups",
    "fsdp_parameters",
    "gathered_tensors",
    "set_async_unshard",
    "set_post_forward_mesh",
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
        until="2.14",
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.to_accumulated_grad_if_needed",
        "the same",
        until="2.14",
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._module_info",
        "which weight each part of a unit's flat message is of",
        of_instances=True,
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.padded_sharded_param_size",
        "how long it is there",
        of_instances=True,
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._fsdp_param_groups",
        "a unit's parameters by group, whose gathered memory nothing public shows",
        since="2.12",
        of_instances=True,
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._fsdp_param_group",
        "the same in 2.11: one group or none",
        of_instances=True,
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.fsdp_params",
        "the same",
        of_instances=True,
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.post_backward",
        "it leaves weights without a gradient out of a rank's message, whatever the other ranks send; torch 2.11 and "
        "2.12 have no set_reduce_scatter_unused_params, and that doesn't tell which weights were reached",
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.post_forward",
        "of two calls of a layer at once the second would free the weights, however they are to be kept",
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._training_state",
        "the same: it is in forward until the last of them has ended",
        of_instances=True,
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_common:TrainingState",
        "the same",
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._register_post_backward_hook",
        "of two calls at once the first backward's end would send half of the gradient, or free the weights",
    ),
    PrivateName(
        "torch._C:_current_autograd_node",
        "the same: FSDP2's last call comes behind backward",
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.reduce_grads",
        "the same: whether a backward sends",
        of_instances=True,
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._all_gather_result",
        "memory of a gather under way; None without one",
        of_instances=True,
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_collectives:AllGatherResult.all_gather_output",
        "the same",
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.all_gather_outputs",
        "memory of a parameter while it is gathered",
        of_instances=True,
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._unsharded_param",
        "the gathered parameter and its gradient; unset before the first gather",
        of_instances=True,
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.unsharded_accumulated_grad",
        "sum of the micro-batches' gradients in float32; None without one; in 2.15 the gradient itself",
        of_instances=True,
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_common:HSDPMeshInfo",
        "`fully_shard(reshard_after_forward=K)` makes groups of its own for each unit, on the ranks of one unit's mesh "
        "alone: with tp, pp or copies beside it, ranks would wait for each other",
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.post_forward_mesh_info",
        "the same: the ranks that share a unit's weights between forward and backward",
        of_instances=True,
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.post_forward_mesh_info",
        "the same",
        of_instances=True,
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._init_sharded_post_forward_param_metadata",
        "the same: how large a rank's part is",
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._orig_size",
        "the same: of a whole weight",
        of_instances=True,
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._sharded_post_forward_param_data",
        "memory of that part; unset before the first forward",
        of_instances=True,
    ),
)


def fsdp_groups(unit: nn.Module) -> list[Any]:
    """Returns FSDP2's own groups (`FSDPParamGroup`) of one unit: any number since torch 2.12, one or none in 2.11."""
    state: Any = unit._get_fsdp_state()
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


def _unsharded_parameter(fsdp_param: Any) -> nn.Parameter | None:
    """Returns the gathered parameter, of its full shape; None before the first gather, which sets the attribute."""
    parameter: nn.Parameter | None = vars(fsdp_param).get("_unsharded_param")
    return parameter


def _accumulated_gradient(fsdp_param: Any) -> torch.Tensor | None:
    """Returns the float32 sum beside the gradient, of the full shape; None where the gradient itself is the sum.

    It is so in torch 2.15, whose property of the same name is that gradient.
    """
    gradient: torch.Tensor | None = vars(fsdp_param).get("unsharded_accumulated_grad")
    return gradient


class _CompletePostBackward:
    """Replaces `FSDPParamGroup.post_backward` of one group: fills in zeros for weights that backward didn't reach.

    Only beside others that it reached: FSDP2 also calls for a group whose gradients have left or are yet to come, as
    of a layer that several calls share, and sends nothing then.

    Args:
        group: FSDP2's own; held weakly, since it holds this.
        reached: gets by shard whether its weight has a gradient of this rank.
    """

    def __init__(self, group: Any, reached: dict[torch.Tensor, bool]) -> None:
        self._group, self._reached = weakref.ref(group), reached
        self._calls_to_come = 0
        """Of two calls at once, those whose backward is to come."""

    def __call__(self, *unused: Any) -> None:
        group = self._group()
        assert group is not None
        self._calls_to_come = max(0, self._calls_to_come - 1)
        # Behind the last backward FSDP2 calls once more, outside of any function of autograd's.
        if self._calls_to_come and _current_autograd_node() is not None:
            return
        self._calls_to_come = 0
        pairs = [(fsdp_param, _unsharded_parameter(fsdp_param)) for fsdp_param in group.fsdp_params]
        trained = [(fsdp_param, item) for fsdp_param, item in pairs if item is not None and item.requires_grad]
        is_reached = [
            parameter.grad is not None or _accumulated_gradient(fsdp_param) is not None
            for fsdp_param, parameter in trained
        ]
        if group.reduce_grads and any(is_reached):
            for (fsdp_param, parameter), has_gradient in zip(trained, is_reached):
                shard = fsdp_param.sharded_param
                self._reached[shard] = self._reached.get(shard, False) or has_gradient
                if not has_gradient:
                    parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
            # FSDP2 reduces one dtype: beside float32 sums, gradients of the last micro-batch alone become sums too.
            if any(_accumulated_gradient(fsdp_param) is not None for fsdp_param, _ in trained):
                for fsdp_param, _ in trained:
                    fsdp_param.accumulate_unsharded_grad_if_needed()
                    fsdp_param.to_accumulated_grad_if_needed()
        type(group).post_backward(group, *unused)

    def keep_gathered(self) -> None:
        """Keeps the weights gathered between two calls at once, and in backward until gradients of both are there."""
        group_ref = self._group

        def post_forward(*args: Any) -> Any:
            group = group_ref()
            assert group is not None
            # The call that ended first has set it to idle, in which FSDP2 frees weights in any case.
            group._training_state = TrainingState.FORWARD
            return type(group).post_forward(group, *args)

        def register(args: Any, kwargs: Any) -> Any:
            group = group_ref()
            assert group is not None
            registered = type(group)._register_post_backward_hook(group, args, kwargs)
            # A layer that recompute calls again has no backward of its own.
            if not in_backward() and (registered[0] is not args or registered[1] is not kwargs):
                self._calls_to_come += 1
            return registered

        group = self._group()
        assert group is not None
        group.post_forward, group._register_post_backward_hook = post_forward, register


def complete_gradients(module: nn.Module, reached: dict[torch.Tensor, bool]) -> list[_CompletePostBackward]:
    """Makes a unit that sends gradients send those of all its trained weights, so that ranks whose graphs differ agree.

    FSDP2 sends those that are there. Ranks that reach other weights of a unit, as by experts that a rank has no tokens
    for, would add one weight's gradient to another's, or wait for bytes that never come.

    Args:
        module: sharded.
        reached: gets by shard, of any shape, whether a backward of this rank reached the weight, until its owner clears
            it.

    Returns:
        What was put in, by unit.
    """
    completed = []
    for submodule in module.modules():
        for group in fsdp_groups(submodule) if isinstance(submodule, FSDPModule) else ():
            group.post_backward = _CompletePostBackward(group, reached)
            completed.append(group.post_backward)
    return completed


def set_async_unshard(unit: nn.Module) -> None:
    """Makes a unit's gathers collectives under way instead of work on a stream of their own."""
    unit._set_unshard_async_op(True)


def set_post_forward_mesh(unit: nn.Module, mesh: DeviceMesh) -> None:
    """Shares a unit's gathered weights between forward and backward over the last dim of a mesh of two dims."""
    mesh_info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    for group in fsdp_groups(unit):
        group.post_forward_mesh_info = mesh_info
        for fsdp_param in group.fsdp_params:
            fsdp_param.post_forward_mesh_info = mesh_info
            fsdp_param._init_sharded_post_forward_param_metadata(torch.empty(fsdp_param._orig_size, device="meta"))


def clear_unsharded_gradients(module: nn.Module) -> None:
    """Drops the gradients that FSDP2 keeps in gathered parameters between micro-batches."""
    for fsdp_param in fsdp_parameters(module):
        if _accumulated_gradient(fsdp_param) is not None:
            fsdp_param.unsharded_accumulated_grad = None
        if (parameter := _unsharded_parameter(fsdp_param)) is not None:
            parameter.grad = None


def accumulate_unsharded_gradients(module: nn.Module) -> None:
    """Adds gradients in the compute dtype to FSDP2's float32 sums, as `FSDPParamGroup.post_backward` does.

    In torch 2.15 autograd adds them up in the gathered parameters' own gradients, which are float32 then.
    """
    for fsdp_param in fsdp_parameters(module):
        if hasattr(fsdp_param, "accumulate_unsharded_grad_if_needed") and _unsharded_parameter(fsdp_param) is not None:
            fsdp_param.accumulate_unsharded_grad_if_needed()
            fsdp_param.to_accumulated_grad_if_needed()


def gathered_tensors(unit: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns a unit's (gathered parameters, full gradients kept for later), under way or arrived."""
    parameters: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    for group in fsdp_groups(unit):
        if group._all_gather_result is not None:
            parameters.append(group._all_gather_result.all_gather_output)
        for fsdp_param in group.fsdp_params:
            parameters.extend(fsdp_param.all_gather_outputs)
            if (part := vars(fsdp_param).get("_sharded_post_forward_param_data")) is not None:
                parameters.append(part)
            if (parameter := _unsharded_parameter(fsdp_param)) is not None:
                held_gradients = (parameter.grad, _accumulated_gradient(fsdp_param))
                gradients.extend(grad for grad in held_gradients if grad is not None)
    return parameters, gradients
