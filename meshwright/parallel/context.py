"""The `cp` axis: ranks compute other tokens of the same rows and exchange what attention needs.

Everything before the first layer runs on whole rows, so masks, windows, documents and positions are made by the model's
own code as on one device; the first layer then takes this rank's tokens. Where tokens meet, ``gather`` collects keys
and values (`gathered_attention`), and ``heads`` gives each rank all tokens of some heads: the sharding table says which
features these are, and the model's attention code runs as it is, with its own mask, on fewer heads. The module
around it sees a hidden state of the whole row that holds no memory, so that shapes that it reads off it are right; the
matrices in it get the real one. With ``ring`` keys and values go round the ranks (`ring_attention`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.parallel import (
    balanced_runs,
    collectives,
    parameter_slices,
    selective,
    stand_in,
    tensor_hooks,
    unit_slices,
)
from meshwright.parallel.axis_group import AxisGroup
from meshwright.parallel.forward_stack import Forward, ForwardLayer, wrap_forward
from meshwright.parallel.gathered_attention import GatheredAttention
from meshwright.parallel.head_exchange import to_tokens, to_units
from meshwright.parallel.ring_attention import RingAttention
from meshwright.parallel.stage import local_layer
from meshwright.parallel.transform import Transform, TransformContext, uses_axis
from meshwright.spec.axes.cp import AXIS
from meshwright.spec.axis import Mechanics
from meshwright.spec.placement import Span
from meshwright.spec.sharding_table import (
    CuttingKind,
    LayerSharding,
    ParameterSplit,
    ShardingGroup,
    ShardingTable,
    local_group,
)

_ATTENDING: Mapping[str, tuple[Callable[[AxisGroup], AbstractContextManager[object]], str]] = {
    "gather": (GatheredAttention, "attention gathers keys and values over the tokens' ranks"),
    "ring": (RingAttention, "keys and values of the tokens' ranks go round a ring"),
}
"""How attention meets the keys of other ranks where each has an early and a late run of tokens."""


def wrap_model(
    module: nn.Module,
    table: ShardingTable,
    axis_group: AxisGroup,
    tensor: tuple[int, int] = (0, 1),
    attention: str = "heads",
    splits: int = 1,
    is_first: bool = True,
) -> None:
    """Makes the layers of a module compute this rank's tokens: (B, S / size, D) between them.

    Args:
        module: the model or a stage of it, split by ``tp`` before.
        table: of the model.
        axis_group: the axis.
        tensor: (index, degree) of the rank along ``tp``.
        attention: ``heads``, ``gather`` or ``ring``.
        splits: number of parts into which ``tp`` splits the tokens between the groups.
        is_first: whether it is the stage with the embedding, which has whole rows up to the first layer.
    """
    for name, rows in table.layers.items():
        layer = local_layer(module, name)
        if layer is None:
            continue
        if attention in _ATTENDING:
            mode, purpose = _ATTENDING[attention]
            balanced_runs.wrap_layer(layer, axis_group, splits, partial(mode, axis_group), purpose)
            continue
        for group in rows.groups:
            if group.heads:
                wrap_group(layer, local_group(group, *tensor), axis_group)
    if is_first:
        take_tokens = partial(
            local_tokens, index=axis_group.index, size=axis_group.size, balanced=attention in _ATTENDING
        )
        tensor_hooks.on_hidden(
            module.get_submodule(next(iter(table.layers))),
            _take_from_full_rows(module, axis_group.size, take_tokens),
            prepend=True,
            purpose="a rank's tokens",
        )


def _take_from_full_rows(module: nn.Module, size: int, take_tokens: tensor_hooks.Move) -> tensor_hooks.Move:
    """Returns ``take_tokens`` for hidden states (B, S, D) of whole rows; a shared layer's later calls have parts.

    Args:
        module: called with tokens (B, S).
        size: into so many parts ``take_tokens`` cuts a row.
        take_tokens: a rank's tokens of a hidden state.
    """
    # A list, since the hook writes it: S of the row that this forward of the module is called with.
    row_length = [0]

    def note_row_length(_: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> None:
        tensors = [x for x in (*args, *kwargs.values()) if hasattr(x, "is_floating_point") and x.dim() > 1]
        row_length[0] = next((x.shape[1] for x in tensors if not x.is_floating_point()), 0)

    module.register_forward_pre_hook(note_row_length, with_kwargs=True)
    return lambda x: x if x.shape[1] * size == row_length[0] else take_tokens(x)


def local_tokens(x: torch.Tensor, index: int, size: int, balanced: bool = False) -> torch.Tensor:
    """Returns this rank's tokens of ``x: (B, S, ...)``: a run of them, or an early and a late one."""
    if balanced:
        return balanced_runs.local_runs(x, index, size)
    if x.shape[1] % size:
        raise ValueError(f"{x.shape[1]} tokens don't divide over cp={size}")
    return x.chunk(size, dim=1)[index]


def refusal(rows: LayerSharding, size: int, degree: int) -> str:
    """Returns why the heads of a layer can't be exchanged over ``size`` ranks under ``tp=degree``; "" when they can."""
    for group in (group for group in rows.groups if group.heads):
        if reason := _unexchangeable_reason(group):
            return reason
        for index in range(degree):
            local_units = local_group(group, index, degree)
            if local_units.shares(size) is None:
                return (
                    f"{group.row_linear} reads {local_units.units} heads on each rank, which {size} ranks can't divide"
                )
    return ""


def _unexchangeable_reason(group: ShardingGroup) -> str:
    """Returns why a group's inner code prevents the exchange, which moves the matrices' outputs alone; "" if none."""
    if group.inner_row_linears:
        return (
            f"only what enters and leaves attention is exchanged, but between the matrices around it "
            f"{group.inner_row_linears[0]} sums over all heads, before {group.row_linear} reads them"
        )
    for cutting in (cutting for cutting in group.cuttings if cutting.kind is not CuttingKind.WIDTH):
        description = f"argument '{cutting.key}' of {cutting.module or 'the layer'}"
        if cutting.kind is CuttingKind.BUFFER:
            description = ".".join(name for name in (cutting.module, cutting.key) if name)
        elif cutting.kind is not CuttingKind.ARGUMENT:
            description = cutting.module
        return (
            f"only what enters and leaves attention is exchanged, but {description} holds all heads at once, of which "
            f"{group.row_linear} reads some on each rank"
        )
    return ""


def wrap_group(layer: nn.Module, group: ShardingGroup, axis_group: AxisGroup) -> None:
    """Exchanges tokens for heads around the code between a group's matrices.

    Args:
        layer: with the weights that ``tp`` left it.
        group: in the sizes that ``tp`` left.
        axis_group: the axis.

    Raises:
        ValueError: when the heads don't divide, or no module of the layer holds the group alone.
    """
    shares = group.shares(axis_group.size)
    if shares is None:
        raise ValueError(f"{group.units} heads don't divide over cp={axis_group.size}")
    if not group.module:
        raise ValueError(
            f"the attention that {group.row_linear} reads is code of the layer itself, and only a module of its own "
            "can be shown whole rows"
        )
    splits_by_name = {split.name: split for split in group.splits}
    attention = layer.get_submodule(group.module)
    _present_full_rows(attention, axis_group.size, unit_slices.local_width(group, shares[axis_group.index]))

    def spans(split: ParameterSplit, size: int) -> list[tuple[Span, ...]]:
        return [parameter_slices.spans_of_units(split, units, group, size) for units in shares]

    for name in group.column_linears:
        column, split = layer.get_submodule(name), splits_by_name[f"{name}.weight"]
        rank_spans = spans(split, layer.get_parameter(split.name).shape[split.dim])
        if name in group.column_inputs:
            # (B, S/c, F) to (B, S, F/c): Ulysses' all-to-all before attention, on each of q, k and v.
            # Hooks of the model's own read the product ahead of the exchange.
            if tensor_hooks.is_plain_product(column) and not column._forward_hooks:
                wrap_forward(column, ForwardLayer.CONTEXT, "its product is kept as heads alone", _as_sent_product)
            tensor_hooks.on_output(column, _with_spans(to_units, axis_group, rank_spans), purpose="tokens for heads")
        else:
            # Its input is already the whole row (from `replicated_inputs`), so its output needs a cut alone.
            select_units = partial(parameter_slices.select_spans, dim=-1, spans=rank_spans[axis_group.index])
            tensor_hooks.on_output(column, select_units, purpose="a rank's heads")
    for name in group.replicated_inputs:
        tensor_hooks.on_output(
            layer.get_submodule(name),
            lambda x: collectives.all_gather_tokens(x, axis_group, 1, True),
            purpose="all-gather of tokens forward, reduce-scatter backward",
        )
    row_split = splits_by_name[f"{group.row_linear}.weight"]
    features = layer.get_parameter(row_split.name).shape[row_split.dim]
    # (B, S, F/c) to (B, S/c, F): Ulysses' all-to-all after attention, before the output projection.
    rank_spans = spans(row_split, features)
    exchange_heads = partial(to_tokens, axis_group=axis_group, spans=rank_spans, features=features)
    for name in group.row_linears:
        tensor_hooks.on_input(layer.get_submodule(name), exchange_heads, purpose="heads for tokens")
    # Split parameters between the matrices: the code applies them to this rank's heads.
    matrices = {f"{name}.{kind}" for name in (*group.column_linears, *group.row_linears) for kind in ("weight", "bias")}
    loose_splits = [split for split in group.splits if split.name not in matrices]
    if loose_splits:
        _slice_loose_parameters(
            attention, layer, loose_splits, {split.name: shares[axis_group.index] for split in loose_splits}, group
        )
    parameter_slices.set_local_sizes(layer, group, shares[axis_group.index])


def _present_full_rows(attention: nn.Module, size: int, width: int) -> None:
    """Shows a module the whole row's shape, since its code reads S off the hidden state, and ``width`` if not 0."""
    stand_in.present(
        attention,
        lambda shape: (shape[0], shape[1] * size, width or shape[2]),
        ForwardLayer.CONTEXT,
        "the whole row",
    )


def _as_sent_product(plain: Forward) -> Forward:
    """Returns the forward of a linear module whose product nothing reads but the exchange."""
    return lambda *args, **kwargs: selective.sent_product(partial(plain, **kwargs), *args)


def _with_spans(
    exchange: Callable[..., torch.Tensor], axis_group: AxisGroup, spans_of_rank: Any
) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: exchange(x, axis_group, spans_of_rank)


def _slice_loose_parameters(
    root: nn.Module, layer: nn.Module, loose_splits: list[ParameterSplit], units: dict[str, Span], group: ShardingGroup
) -> None:
    """Shows the module this rank's part of parameters that lie between the matrices, while it runs."""

    def sliced(plain: Forward) -> Forward:
        def forward(*args: object, **kwargs: object) -> object:
            replaced = []
            try:
                for split in loose_splits:
                    path, _, attribute = split.name.rpartition(".")
                    owner: nn.Module = layer.get_submodule(path)
                    # In __dict__, since a slice is no Parameter; autograd carries its gradient to the full one.
                    full_parameter = owner._parameters.pop(attribute)
                    replaced.append((owner, attribute, full_parameter))
                    spans = parameter_slices.spans_of_units(
                        split, units[split.name], group, full_parameter.shape[split.dim]
                    )
                    owner.__dict__[attribute] = parameter_slices.select_spans(full_parameter, split.dim, spans)
                return plain(*args, **kwargs)
            finally:
                for owner, attribute, full_parameter in replaced:
                    owner.__dict__.pop(attribute, None)
                    owner._parameters[attribute] = full_parameter

        return forward

    wrap_forward(root, ForwardLayer.CONTEXT, "sees its units of loose parameters", sliced)


def _apply(context: TransformContext) -> None:
    """Makes the layers of this rank's stages compute its tokens; run after the tensor axis has split their units."""
    layout, mesh, source = context.layout, context.required_mesh, context.source
    assert source.table is not None
    tensor = mesh.axis_groups[layout.axis(Mechanics.MATRICES)]
    tensor_index_and_degree, splits = (tensor.index, tensor.size), tensor.size if layout.sequence else 1
    group = mesh.axis_groups[AXIS.name]
    for stage in context.stages:
        wrap_model(stage.module, source.table, group, tensor_index_and_degree, source.attention, splits, stage.is_first)
    context.view.tokens = (group.index, group.size, source.attention in _ATTENDING)


TRANSFORM = Transform(layer=ForwardLayer.CONTEXT, axis=AXIS.name, applies=uses_axis(AXIS.name), apply=_apply)
