"""Allocates a wrapped meta module: each parameter gets memory for this rank's shard alone, and its values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from meshwright.parallel.model_source import Fill
from meshwright.parallel.scalar_parameters import unsharded_shape
from meshwright.parallel.weights import Weight, as_dtensor_like, parameter_holders, view_box
from meshwright.spec.placement import LocalShard, element_count
from meshwright.torch_compat.dtensors import known_detach


def materialise(
    module: nn.Module, shards: Mapping[str, LocalShard], device: torch.device, dtype: torch.dtype, fill: Fill
) -> None:
    """Replaces every meta parameter by this rank's part of it, with values from ``fill``; ties stay ties.

    Args:
        module: wrapped by the axes, parameters on the meta device (plain or DTensor).
        shards: which part of the whole weight a parameter stands for, by name; absent where it is whole.
        device: where the parts go.
        dtype: of the master weights (floating-point ones; others keep theirs).
        fill: values by name and box.
    """
    with torch.no_grad(), known_detach():
        for name, parameter, holders in list(parameter_holders(module)):
            shard = shards.get(name) or LocalShard.unsharded(name, unsharded_shape(*holders[0], parameter), 1)
            local_parameter = _allocate_local(Weight(parameter, shard), device, dtype, fill)
            for owner, attribute in holders:
                owner._parameters[attribute] = local_parameter


def _allocate_local(weight: Weight, device: torch.device, dtype: torch.dtype, fill: Fill) -> nn.Parameter:
    parameter = weight.parameter
    local_dtype = dtype if parameter.is_floating_point() else parameter.dtype
    local = torch.empty(weight.local.shape, dtype=local_dtype, device=device)
    for box in weight.boxes:
        if element_count(box.global_box):
            view_box(local, box.local_box).copy_(fill(weight.name, box.global_box))
    local_parameter = nn.Parameter(as_dtensor_like(parameter, local), requires_grad=parameter.requires_grad)
    local_parameter.__dict__.update(parameter.__dict__)
    return local_parameter
