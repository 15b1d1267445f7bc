"""The `tp` axis: ranks hold parts of each matrix and compute parts of each layer; tokens may be split in between.

Activations are plain local tensors: a DTensor costs time at every operation, and not every attention kernel has a
sharding rule. What a group of matrices needs is two collectives (`parallel.collectives`), attached to the modules that
the sharding table names; the model's own code runs in between, on local numbers.
Source: Shoeybi et al., Megatron-LM (2019), section 3; Korthikanti et al. (2022), section 4.2, for the sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from meshwright.parallel import collectives, parameter_slices, tensor_hooks, unit_slices
from meshwright.parallel.axis_group import AxisGroup
from meshwright.parallel.overlapped_linears import ColumnEntry, is_overlappable, sum_row_product
from meshwright.parallel.overlapped_products import Overlap
from meshwright.parallel.stage import local_layer
from meshwright.spec.axes.tp import AXIS
from meshwright.spec.placement import LocalShard, Span
from meshwright.spec.sharding_table import LayerSharding, ShardingGroup, ShardingTable, vocabulary_span

COPY = "copy to tp: identity forward, all-reduce backward"
"""Megatron's f. Source: Shoeybi et al. (2019), figure 3."""
GATHER = "all-gather of tokens forward, reduce-scatter backward"
"""Megatron's g-bar. Source: Korthikanti et al. (2022), figure 5."""


@dataclass(frozen=True, slots=True)
class PartialGrad:
    """A parameter whose gradient, after backward, is this rank's part of a sum."""

    name: str
    """Its name in the module."""
    runs: tuple[Span, ...] = ()
    """Runs of the local dim `dim` that are summed; none for all of it."""
    dim: int = 0
    """The dim of `runs`."""
    ranks: int = 0
    """Number of neighbours along the axis that share the sum; 0 for all."""


@dataclass(slots=True)
class ShardedLayer:
    """The shards and the owed gradient sums of a module that this file has wrapped."""

    local_shards: dict[str, LocalShard] = field(default_factory=dict)
    """Which part of the whole weight a parameter now stands for, by name."""
    partial_grads: list[PartialGrad] = field(default_factory=list)
    """Gradients to sum after backward."""

    def add(self, other: ShardedLayer) -> None:
        """Adds what became of other modules."""
        self.local_shards |= other.local_shards
        self.partial_grads += other.partial_grads


def wrap_layer(
    layer: nn.Module,
    prefix: str,
    rows: LayerSharding,
    axis_group: AxisGroup,
    copies: int,
    sequence: bool = False,
    chunks: int = 0,
    gathers_again: bool = False,
) -> ShardedLayer:
    """Splits a layer over the ranks of the axis.

    Args:
        layer: on meta or with values; its parameters are replaced by this rank's parts.
        prefix: its name in the model.
        rows: its part of the sharding table.
        axis_group: the axis.
        copies: ranks of the world that hold what the axis doesn't split.
        sequence: between the groups a rank has (B, S / size, D), its run of the tokens.
        chunks: of tokens, in which plain products compute beside the axis's traffic; 0 to wait for all of it.
        gathers_again: see `Overlap.gathers_again`.

    Returns:
        The shards of its parameters and the gradients to sum, by their names in the model.
    """
    overlap = Overlap(axis_group, chunks, sequence, gathers_again) if chunks else None
    sharded = ShardedLayer()
    unsplit = {name for name, parameter in layer.named_parameters() if parameter.requires_grad}
    for group in rows.groups:
        shares = group.shares(axis_group.size)
        if shares is None:
            continue
        unsplit -= {split.name for split in group.splits}
        _slice_group_parameters(layer, prefix, group, shares[axis_group.index], axis_group, copies, sharded)
        partial_names = _attach_group_collectives(layer, group, axis_group, sequence, overlap)
        unit_slices.attach(layer, group, shares, axis_group, sequence)
        if not sequence:
            # Each rank uses these on its own units alone, so its gradient is one summand.
            sharded.partial_grads += [PartialGrad(f"{prefix}.{name}") for name in (*group.shared, *partial_names)]
    if sequence:
        # Under sequence parallelism unsplit weights (norms, say) see a run of the tokens on each rank: summands too.
        sharded.partial_grads += [PartialGrad(f"{prefix}.{name}") for name in sorted(unsplit)]
    return sharded


def _slice_group_parameters(
    layer: nn.Module,
    prefix: str,
    group: ShardingGroup,
    units: Span,
    axis_group: AxisGroup,
    copies: int,
    sharded: ShardedLayer,
) -> None:
    """Gives the layer its parts of a group's parameters."""
    parameter_slices.set_local_sizes(layer, group, units)
    for split in group.splits:
        full_weight = layer.get_parameter(split.name)
        spans = parameter_slices.spans_of_units(split, units, group, full_weight.shape[split.dim])
        replicated_runs = parameter_slices.find_replicated_runs(split, units, group, axis_group.size)
        name = f"{prefix}.{split.name}"
        shard = parameter_slices.make_local_shard(
            name, full_weight.shape, split, spans, copies // axis_group.size, "tp"
        )
        # Fewer key heads than ranks: neighbouring ranks hold some runs equal, and sum these runs' gradients.
        if replicated_runs:
            copied_runs = tuple((start, stop, shard.copies * ranks) for start, stop, ranks in replicated_runs)
            shard = dataclasses.replace(shard, copied=copied_runs, copied_dim=split.dim)
        for ranks in sorted({ranks for _, _, ranks in replicated_runs}):
            runs = tuple((start, stop) for start, stop, sharing_ranks in replicated_runs if sharing_ranks == ranks)
            sharded.partial_grads.append(PartialGrad(name, runs, split.dim, ranks))
        sharded.local_shards[name] = shard
        parameter_slices.slice_parameter(layer, split, spans)


def overlappable_linears(layer: nn.Module, group: ShardingGroup) -> list[str]:
    """Returns the names of the linear modules at a group's ends that can compute in chunks; of experts, none."""
    names = dict.fromkeys((*group.column_inputs, *group.row_linears)) if group.column_linears else ()
    return [name for name in names if is_overlappable(layer.get_submodule(name))]


def _attach_group_collectives(
    layer: nn.Module, group: ShardingGroup, axis_group: AxisGroup, sequence: bool, overlap: Overlap | None
) -> list[str]:
    """Attaches a group's collectives; returns the row linear's parameters whose gradients are summands."""
    split_names = {split.name for split in group.splits}
    row_linear = layer.get_submodule(group.row_linear)
    prefix = f"{group.row_linear}." if group.row_linear else ""
    unsplit_names = tuple(name for name, _ in row_linear.named_parameters() if f"{prefix}{name}" not in split_names)
    entering = GATHER if sequence else COPY
    overlapped = {name: layer.get_submodule(name) for name in overlappable_linears(layer, group)} if overlap else {}
    columns = [overlapped[name] for name in group.column_inputs if name in overlapped]

    enter = _make_enter(axis_group, sequence)
    # Once, since q, k and v read one tensor: their gradients meet before a single all-reduce.
    enter_group = ColumnEntry(enter, columns, overlap) if overlap and columns else tensor_hooks.Once(enter)
    if not sequence:
        for name in group.replicated_inputs:
            # Each by itself: these are no reads of one tensor.
            enter_alone = tensor_hooks.Once(lambda x: collectives.copy_to_group(x, axis_group))
            tensor_hooks.on_output(layer.get_submodule(name), enter_alone, purpose=entering)
    if sequence and group.heads:
        tensor_hooks.on_hidden(layer.get_submodule(group.module), enter_group, purpose=entering)
    elif group.column_inputs == (group.row_linear,):
        # Experts: tokens, and the weights of their choices, whose gradients are summands too.
        tensor_hooks.on_input(
            row_linear,
            _enter_each_tensor(axis_group, sequence),
            tensor_hooks.any_tensor if sequence else tensor_hooks.differentiable,
            purpose=entering,
        )
    else:
        for name in group.column_inputs:
            tensor_hooks.on_input(layer.get_submodule(name), enter_group, purpose=entering)

    leave_group = _make_leave(axis_group, sequence)
    for name in group.row_linears:
        unsplit = unsplit_names if name == group.row_linear else ()
        if overlap and name in overlapped:
            sum_row_product(overlapped[name], leave_group, overlap)
        else:
            tensor_hooks.sum_output(layer.get_submodule(name), leave_group, axis_group.index == 0, unsplit)
    # A plain product adds its bias behind the sum, so the gradient is equal on all ranks. In any other module unsplit
    # weights count on the first rank alone (`sum_output`): the others' gradients are zero summands.
    partial_names = [] if tensor_hooks.is_plain_product(row_linear) else [f"{prefix}{name}" for name in unsplit_names]
    for name in group.inner_row_linears:
        inner_linear = layer.get_submodule(name)
        tensor_hooks.sum_output(
            inner_linear,
            # g, then f: the sum feeds split work again, so backward sums as well.
            lambda y: collectives.copy_to_group(collectives.reduce_from_group(y, axis_group), axis_group),
            axis_group.index == 0,
            (),
        )
        # Added behind f's backward sum, so each rank's gradient is a summand.
        partial_names += [f"{name}.bias"] if getattr(inner_linear, "bias", None) is not None else []
    return partial_names


def _make_enter(axis_group: AxisGroup, sequence: bool) -> tensor_hooks.Move:
    """Returns Megatron's f (an all-reduce backward), or its sequence-parallel form (an all-gather of tokens)."""
    if sequence:
        return lambda x: collectives.all_gather_tokens(x, axis_group, token_dim(x.dim()), True)
    return lambda x: collectives.copy_to_group(x, axis_group)


def _make_leave(axis_group: AxisGroup, sequence: bool) -> tensor_hooks.Move:
    """Returns Megatron's g (an all-reduce), or its sequence-parallel form (a reduce-scatter over tokens)."""
    if sequence:
        return lambda y: collectives.reduce_scatter_tokens(y, axis_group, token_dim(y.dim()), True)
    return lambda y: collectives.reduce_from_group(y, axis_group)


def _enter_each_tensor(axis_group: AxisGroup, sequence: bool) -> tensor_hooks.Move:
    if sequence:
        return lambda x: collectives.all_gather_tokens(x, axis_group, 0, True)
    return lambda x: collectives.copy_to_group(x, axis_group)


def token_dim(dims: int) -> int:
    """Returns the dim that counts tokens: 1 of (B, S, D); 0 of (T, D), where their order doesn't matter."""
    return 1 if dims > 2 else 0


def wrap_vocabulary(
    module: nn.Module, names: Sequence[str], vocab: int, axis_group: AxisGroup, copies: int
) -> ShardedLayer:
    """Splits embedding and head over the vocabulary: (V / size, D) each; the logits stay split.

    Args:
        module: the model or a stage of it; tied weights stay tied.
        names: modules whose weight's (and bias's) dim 0 is the vocabulary; those without a weight here are left out.
        vocab: V.
        axis_group: the axis.
        copies: ranks of the world that hold what the axis doesn't split.

    Returns:
        What became of the parameters.
    """
    start, stop = vocabulary_span(vocab, axis_group.size, axis_group.index)
    sharded, sliced_parameters = ShardedLayer(), dict[nn.Parameter, nn.Parameter]()
    vocab_modules = [module.get_submodule(name) for name in names]
    for vocab_module in vocab_modules:
        for full_weight in (
            parameter
            for parameter in vocab_module._parameters.values()
            if parameter is not None and parameter.shape[0] == vocab
        ):
            with torch.no_grad():
                sliced_parameters[full_weight] = nn.Parameter(
                    full_weight[start:stop].clone(), requires_grad=full_weight.requires_grad
                )
    for name, full_weight in module.named_parameters():
        if full_weight in sliced_parameters:
            spans = (((start, stop),), *(((0, size),) for size in full_weight.shape[1:]))
            sharded.local_shards[name] = LocalShard(
                name=name,
                global_shape=tuple(full_weight.shape),
                spans=spans,
                copies=copies // axis_group.size,
                axes=(AXIS.name,),
            )
    # Every owner of a tied weight gets the same slice, so ties stay ties.
    for owner in module.modules():
        for attribute, parameter in list(owner._parameters.items()):
            if parameter in sliced_parameters:
                owner._parameters[attribute] = sliced_parameters[parameter]
    for vocab_module in vocab_modules:
        if any(parameter is not None for parameter in vocab_module._parameters.values()):
            _attach_vocabulary_lookup(vocab_module, start, stop, axis_group)
    return sharded


def _attach_vocabulary_lookup(module: nn.Module, start: int, stop: int, axis_group: AxisGroup) -> None:
    """Lets a split embedding look up its rows alone."""
    if isinstance(module, nn.Linear):
        module.out_features = stop - start
        # The head: its logits stay split over the vocabulary.
        tensor_hooks.on_input(module, lambda x: collectives.copy_to_group(x, axis_group), purpose=COPY)
        return
    out_of_range_masks: list[torch.Tensor] = []

    def look_up_local_ids(
        _: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]
    ) -> tensor_hooks.HookResult:
        ids = args[0] if args else kwargs.pop("input_ids" if "input_ids" in kwargs else "input")
        # Ids of other ranks' rows look up row 0 and are zeroed behind: in the sum each id has its row once.
        out_of_range = (ids < start) | (ids >= stop)
        out_of_range_masks.append(out_of_range)
        return (torch.where(out_of_range, 0, ids - start), *args[1:]), kwargs

    def zero_and_reduce(_: nn.Module, _args: object, out: torch.Tensor) -> torch.Tensor:
        return collectives.reduce_from_group(out.masked_fill(out_of_range_masks.pop().unsqueeze(-1), 0.0), axis_group)

    module.register_forward_pre_hook(look_up_local_ids, with_kwargs=True)
    module.register_forward_hook(zero_and_reduce)
    module.num_embeddings = stop - start
    padding_index = getattr(module, "padding_idx", None)
    if padding_index is not None:
        module.padding_idx = padding_index - start if start <= padding_index < stop else None


def wrap_model(
    module: nn.Module,
    table: ShardingTable,
    axis_group: AxisGroup,
    copies: int,
    sequence: bool = False,
    ends: tuple[bool, bool] = (True, True),
    chunks: int = 0,
    gathers_again: Collection[str] = (),
) -> ShardedLayer:
    """Splits every layer that a module has, and its embedding and head.

    Args:
        module: the model or a stage of it.
        table: of the model; layers that aren't here, or are stubs, are left out.
        axis_group: the axis.
        copies: ranks of the world that hold what the axis doesn't split.
        sequence: between the groups of the layers a rank has its run of the tokens; outside of them all tokens.
        ends: whether the embedding is in this stage, and whether the head is.
        chunks: of tokens, in which plain products of layers compute beside the axis's traffic; 0 to wait for it.
        gathers_again: names of layers that do so (`Overlap.gathers_again`).

    Returns:
        What became of the parameters.
    """
    sharded = ShardedLayer()
    for name, rows in table.layers.items():
        layer = local_layer(module, name)
        if layer is not None:
            is_gathered_again = name in gathers_again
            sharded.add(wrap_layer(layer, name, rows, axis_group, copies, sequence, chunks, is_gathered_again))
    if table.vocabulary:
        sharded.add(wrap_vocabulary(module, table.vocabulary, table.vocab, axis_group, copies))
    if sequence:
        # Embedding and head see all tokens: split in front of the first layer, gathered behind the last. In a stage
        # that has no layer beside one of them, that layer is a stub.
        names = list(table.layers)
        if ends[0]:
            tensor_hooks.on_hidden(
                module.get_submodule(names[0]),
                lambda x: collectives.reduce_scatter_tokens(x, axis_group, 1, False),
                purpose="a rank's tokens",
            )
        if ends[1]:
            tensor_hooks.on_output(
                module.get_submodule(names[-1]),
                lambda x: collectives.all_gather_tokens(x, axis_group, 1, False),
                purpose="all-gather of tokens",
            )
    return sharded
