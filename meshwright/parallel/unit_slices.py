"""Slices full-size outputs, arguments and buffers between a group's matrices down to a rank's units."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from meshwright.parallel import collectives, stand_in, tensor_hooks
from meshwright.parallel.axis_group import AxisGroup
from meshwright.parallel.forward_stack import Forward, ForwardLayer, wrap_forward
from meshwright.spec.placement import Span
from meshwright.spec.sharding_table import Cutting, CuttingKind, ShardingGroup

Cut = Callable[[torch.Tensor], torch.Tensor]


def attach(
    layer: nn.Module, group: ShardingGroup, shares: Sequence[Span], axis_group: AxisGroup, sequence: bool
) -> None:
    """Attaches the cuttings of a group to the modules that they name.

    Args:
        layer: gets hooks.
        group: of the layer.
        shares: units of each rank.
        axis_group: the ranks.
        sequence: whether the group's module has gathered its tokens, so that gradients are summed there.
    """
    local_units = shares[axis_group.index]
    for cutting in group.cuttings:
        module = layer.get_submodule(cutting.module)
        if cutting.kind is CuttingKind.WIDTH:
            _narrow_width(module, local_width(group, local_units))
            continue
        slice_tensor = make_slicer(cutting, local_units, group.units)
        if cutting.kind is CuttingKind.GLOBAL_NORM:
            # The module (a norm over all heads, say) runs on all units, gathered; its output is cut to this rank's.
            _gather_inputs(module, _feature_order(cutting, shares, group.units), axis_group)
            tensor_hooks.on_output(module, slice_tensor, purpose="a rank's units")
        elif cutting.kind is CuttingKind.OUTPUT:
            # Where another collective sums the gradients already, copying to the group would sum them twice.
            grad_reduced_inside = sequence or cutting.module in group.inner_row_linears
            tensor_hooks.on_output(
                module,
                slice_tensor if grad_reduced_inside else _slice_replicated(slice_tensor, axis_group),
                purpose="a rank's units",
            )
        elif cutting.kind is CuttingKind.ARGUMENT:
            _on_argument(module, cutting.key, _slice_replicated(slice_tensor, axis_group))
        else:
            _on_buffer(layer.get_submodule(group.module), module, cutting.key, slice_tensor)


def local_width(group: ShardingGroup, units: Span) -> int:
    """Returns the width of a hidden state that the group's code may see on a rank with some units; 0 for its own.

    It is what the row linear reads there, also of a group that is local already.
    """
    if all(cutting.kind is not CuttingKind.WIDTH for cutting in group.cuttings):
        return 0
    return sum(stop - start for start, stop in group.splits[0].spans(*units, group.units))


def _narrow_width(module: nn.Module, width: int) -> None:
    """Has a module's code read a rank's width off its hidden state, which its matrices read whole."""
    stand_in.present(module, lambda shape: (*shape[:2], width), ForwardLayer.TENSOR, f"{width} features")


def make_slicer(cutting: Cutting, units: Span, total_units: int) -> Cut:
    """Returns the function that slices a tensor to the indices of the units (start, stop)."""
    total = sum(block.size * block.count for block in cutting.blocks)
    spans = [block.span(*units, total_units) for block in cutting.blocks]

    def slice_rows(x: torch.Tensor) -> torch.Tensor:
        dim = cutting.dim % x.dim()
        if x.shape[dim] % total:
            raise ValueError(f"{x.shape[dim]} indices of {cutting.module} aren't {total} for each of some rows")
        # The dim may hold the blocks several times over: cut each repetition alike.
        rows = torch.unflatten(x, dim, (-1, total))
        slices = [rows.narrow(dim + 1, start, stop - start) for start, stop in spans]
        local_rows = slices[0] if len(slices) == 1 else torch.cat(slices, dim + 1)
        return local_rows.flatten(dim, dim + 1)

    return slice_rows


def _slice_replicated(slice_tensor: Cut, axis_group: AxisGroup) -> Cut:
    """Cuts a tensor that all ranks hold equal; its gradient is summed over them."""
    return lambda x: slice_tensor(collectives.copy_to_group(x, axis_group) if x.requires_grad else x)


def _gather_inputs(module: nn.Module, order: list[int], axis_group: AxisGroup) -> None:
    """All-gathers the features of a module's inputs, whether they need a gradient or not."""
    local_features = len(order) // axis_group.size

    def is_local_slice(x: torch.Tensor) -> bool:
        return x.is_floating_point() and x.dim() > 1 and x.shape[-1] == local_features

    tensor_hooks.on_input(
        module, lambda x: _gather_features(x, axis_group, order), is_local_slice, purpose="all-gather of features"
    )


def _feature_order(cutting: Cutting, shares: Sequence[Span], total_units: int) -> list[int]:
    """Returns, for each feature of the full dim, its position in the rank-by-rank gathered features."""
    # The all-gather gives features rank by rank; the module expects the model's order.
    gathered_indices = [
        index for units in shares for block in cutting.blocks for index in range(*block.span(*units, total_units))
    ]
    positions = [0] * len(gathered_indices)
    for position, index in enumerate(gathered_indices):
        positions[index] = position
    return positions


def _gather_features(x: torch.Tensor, axis_group: AxisGroup, order: list[int]) -> torch.Tensor:
    """All-gathers (..., F / size) to (..., F) in the model's order of features; their gradients are summands."""
    gathered = collectives.all_gather_tokens(x, axis_group, x.dim() - 1, True)
    if order == list(range(len(order))):
        return gathered
    return gathered.index_select(-1, torch.tensor(order, device=x.device))


def _on_argument(module: nn.Module, key: str, move: Cut) -> None:
    def hook(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if key.isdigit():
            argument_index = int(key)
            return (*args[:argument_index], move(args[argument_index]), *args[argument_index + 1 :]), kwargs
        return args, kwargs | {key: move(kwargs[key])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _on_buffer(root: nn.Module, owner: nn.Module, attribute: str, slice_tensor: Cut) -> None:
    """Shows the group's module its part of a tensor while it runs; the tensor itself stays whole."""
    namespace = owner._buffers if attribute in owner._buffers else owner.__dict__

    def sliced(plain: Forward) -> Forward:
        def forward(*args: object, **kwargs: object) -> object:
            full_buffer = namespace[attribute]
            namespace[attribute] = slice_tensor(full_buffer)
            try:
                return plain(*args, **kwargs)
            finally:
                namespace[attribute] = full_buffer

        return forward

    wrap_forward(root, ForwardLayer.TENSOR, f"sees its units of {attribute}", sliced)
