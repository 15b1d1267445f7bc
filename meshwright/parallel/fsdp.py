"""The `shard` axis: ranks read other rows and hold parts of the state; ZeRO 1, 2 and 3 by FSDP2.

One mechanism gives all levels: parameters rest as shards, are gathered for compute, and gradients are scattered. The
level says how long the gathered form lives: to the end of the step (1 and 2) or of the layer's pass (3), and whether an
accumulation step scatters its gradients (2 and 3) or keeps them whole (1).
Source: Rajbhandari et al., ZeRO (SC 2020), section 5.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from meshwright.parallel.argument_containers import keep_changes
from meshwright.parallel.axis_group import AxisGroup, PendingCollective
from meshwright.parallel.block_codec import WeightBlocks
from meshwright.parallel.compression import GradientSum, PhasedCollective, WeightCompressor
from meshwright.parallel.fsdp_collectives import (
    BookedAllGather,
    BookedReduceScatter,
    CompressedAllGather,
    DeferredReductions,
)
from meshwright.parallel.layer_names import REST, format_layers
from meshwright.parallel.scalar_parameters import hold_as_rows
from meshwright.parallel.secondary_shards import SecondaryAllGather, SecondaryShards
from meshwright.spec.end_units import EndUnits
from meshwright.torch_compat.dtensors import known_detach
from meshwright.torch_compat.fsdp2 import (
    accumulate_unsharded_gradients,
    clear_unsharded_gradients,
    complete_gradients,
    set_async_unshard,
    shard_sizes,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardOptions:
    """How `wrap` shards."""

    zero: int
    """ZeRO level; 0 means copies whose compute precision differs from the master weights'."""
    compute: torch.dtype | None
    """Dtype of gathered parameters and compute; None for that of the weights."""
    offload: bool
    """Keep shards, their gradients and optimizer state in host memory."""
    prefetch: int = 1
    """Layers gathered ahead of the one that computes."""
    first_layer: int = 0
    """Number, in the model, of the first of the layers: what messages call them by."""
    secondary: SecondaryShards | None = None
    """Ranks that share the layers' weights from forward to backward; None where they are freed. Experts over other
    ranks than the rest are freed."""


@dataclass(frozen=True, slots=True)
class Compressors:
    """What sends an FSDP unit's values in rounded numbers; None where they travel exactly."""

    gradients: GradientSum | None = None
    """Sums over copies."""
    weights: WeightCompressor | None = None
    """Gathers."""


NO_COMPRESSION = Compressors()
"""Everything travels exactly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertFsdpGroup:
    """Modules inside the layers whose copies, and so whose shards, live on other ranks than those of the rest."""

    modules: Sequence[nn.Module]
    """Each a unit of gathering of its own, in order."""
    mesh: DeviceMesh
    """Of one dimension: the ranks that share the shards."""
    axis_groups: Sequence[AxisGroup]
    """As `wrap` takes them."""
    compressors: Compressors
    """As `wrap` takes them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndModules:
    """Modules outside the layers that are units of gathering of their own."""

    embedding: nn.Module | None
    """Freed behind its forward under ZeRO-3, and not gathered for backward, which doesn't read it; None for none."""
    head: Sequence[nn.Module]
    """One unit, gathered from the first one's forward to its backward, whose gradients are reduced there."""

    @classmethod
    def of(cls, module: nn.Module, ends: EndUnits) -> Self:
        """Returns the modules that ``ends`` names in a model."""
        embedding = module.get_submodule(ends.embedding) if ends.embedding else None
        return cls(embedding=embedding, head=[module.get_submodule(name) for name in ends.head])


class FsdpSync:
    """Steers the sharded module through a step: which micro-batch communicates what, and when shards are restored."""

    def __init__(
        self,
        module: nn.Module,
        options: ShardOptions,
        copies: Sequence[ReplicaAllReduce],
        deferred: DeferredReductions,
        on_cpu: bool,
    ) -> None:
        self._module, self._zero, self._replica_all_reduces = module, options.zero, copies
        self._deferred, self._on_cpu = deferred, on_cpu
        self._no_accumulated_grad = False
        self._announced: tuple[bool, bool] | None = None
        self.reached: dict[torch.Tensor, bool] = {}
        """Whether this rank's backwards of a step reached a shard's weight, for which it else sent zeros."""
        self._units = complete_gradients(module, self.reached)

    def begin_microbatch(self, is_last: bool, no_gradients: bool = False) -> None:
        """Announces a micro-batch of the step; ``no_gradients`` where no shard holds a gradient yet."""
        self._deferred.finish()
        reduces = is_last or self._zero >= 2
        self._no_accumulated_grad = self._no_accumulated_grad or no_gradients
        # A sum that is added to gradients of earlier micro-batches is read where it starts.
        self._deferred.enabled = (
            self._on_cpu and reduces and self._no_accumulated_grad and (is_last or not self._replica_all_reduces)
        )
        if reduces:
            self._no_accumulated_grad = False
        self._module.set_is_last_backward(is_last)
        for replica_all_reduce in self._replica_all_reduces:
            replica_all_reduce.is_last_microbatch = is_last
        # Each of these goes through all modules of the model.
        if self._announced != (is_last, reduces):
            self._announced = (is_last, reduces)
            self._module.set_requires_gradient_sync(reduces)
            if self._zero < 3:
                # ZeRO 1 and 2 gather once a step: parameters stay gathered until the last backward.
                self._module.set_reshard_after_backward(is_last)

    def keep_for_pairs(self) -> None:
        """Keeps weights gathered between the two calls of a layer at once (`parallel.halves`)."""
        for unit in self._units:
            unit.keep_gathered()

    def finish(self) -> None:
        """Waits for the reductions that the last backward left under way."""
        self._deferred.finish()
        self.reached.clear()

    def discard_accumulated(self) -> None:
        """Drops sums over micro-batches that no gradient shows yet, as zero_grad() has dropped those that do."""
        for replica_all_reduce in self._replica_all_reduces:
            replica_all_reduce.discard_accumulated()
        self.reached.clear()
        # ZeRO 1 keeps them in the gathered weights, which FSDP2 has no public way to clear.
        clear_unsharded_gradients(self._module)


class ReplicaAllReduce:
    """All-reduces one FSDP unit's gradient shards over the copies of the shards, once a step.

    FSDP2 calls it after each reduce-scatter. Before the last micro-batch it accumulates. ``of`` names the unit, whose
    gradients a ``compressor`` sums in rounded numbers, by the names and sizes of its ``shards``.
    """

    def __init__(
        self,
        axis_group: AxisGroup,
        deferred: DeferredReductions,
        of: str = "",
        compressor: GradientSum | None = None,
        shards: Mapping[str, int] | None = None,
    ) -> None:
        self.is_last_microbatch = True
        self._axis_group, self._deferred, self._unit_name = axis_group, deferred, of
        self._compressor, self._shard_sizes = compressor, shards or {}
        self._accumulated: torch.Tensor | None = None

    def __call__(self, grad_shard: torch.Tensor) -> None:
        """Accumulates ``grad_shard: (n,)``, this micro-batch's sum over the shard axis, or starts its all-reduce.

        Before the last micro-batch it is zeroed in place; in the last it becomes the step's sum over the copies.
        """
        if grad_shard.is_cuda:
            # FSDP2 has allocated it for the stream of reduce-scatters, calls this on another, adds it to an earlier
            # micro-batch's gradient there and drops it: the next unit's shard would be written over it meanwhile.
            grad_shard.record_stream(torch.cuda.current_stream(grad_shard.device))
        if not self.is_last_microbatch:
            self._accumulated = grad_shard.clone() if self._accumulated is None else self._accumulated.add_(grad_shard)
            # FSDP2 adds `grad_shard` to the parameter's gradient after this hook: zero there, the value kept here.
            grad_shard.zero_()
            return
        self._deferred.defer_all_reduce(lambda: self._all_reduce_accumulated(grad_shard))

    def discard_accumulated(self) -> None:
        """Drops what was kept."""
        self._accumulated = None

    def _all_reduce_accumulated(self, grad_shard: torch.Tensor) -> PendingCollective | PhasedCollective:
        if self._accumulated is not None:
            grad_shard.add_(self._accumulated)
            self._accumulated = None
        if self._compressor is None:
            return self._axis_group.all_reduce(grad_shard, self._unit_name)
        sizes = self._shard_sizes
        if sum(sizes.values()) != grad_shard.numel():
            # Some weight wasn't gathered in this step, on no copy: the rest is rounded as one weight.
            sizes = {self._unit_name: grad_shard.numel()}
        weights = WeightBlocks(list(sizes), list(sizes.values()))
        return self._compressor.all_reduce(weights, grad_shard.split(list(sizes.values())), self._unit_name)


def wrap(
    module: nn.Module,
    layers: Sequence[nn.Module],
    mesh: DeviceMesh,
    options: ShardOptions,
    axis_groups: Sequence[AxisGroup],
    ends: EndModules,
    expert_group: ExpertFsdpGroup | None = None,
    compressors: Compressors = NO_COMPRESSION,
) -> FsdpSync:
    """Shards ``module`` over a mesh of one dimension, layer by layer.

    Args:
        module: the model, on the meta device or materialised; parameters become DTensors, sharded on dim 0 (a number
            as one row, by `hold_as_rows`).
        layers: its repeated blocks, each a unit of gathering.
        mesh: of one dimension: the ranks that share the state.
        options: how.
        axis_groups: collectives of these ranks and, where the shards have copies, of the ranks of the copies.
        ends: units beside the layers; the rest is one unit that stays gathered in the step.
        expert_group: modules that are sharded over other ranks; None for none.
        compressors: send in rounded numbers.

    Returns:
        The state that the step steers.
    """
    # Gradients of bf16 compute are reduced in float32: a sum over many ranks in bf16 would lose the small ones.
    mp_policy = MixedPrecisionPolicy(
        param_dtype=options.compute, reduce_dtype=torch.float32 if options.compute else None, cast_forward_inputs=False
    )
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": mp_policy,
        "offload_policy": CPUOffloadPolicy() if options.offload else OffloadPolicy(),
        "reshard_after_forward": options.zero == 3,
    }
    hold_as_rows(module)
    expert_modules: Sequence[nn.Module] = expert_group.modules if expert_group else ()
    root = _shard_units(module, layers, ends, expert_group, settings)
    if options.secondary is not None:
        options.secondary.share(layers)
    if mesh.device_type == "cpu":
        _set_prefetch_order(layers, ends, expert_modules, options.prefetch)
    deferred = DeferredReductions()
    layer_names = [format_layers([options.first_layer + index]) for index in range(len(layers))]
    prefixes = {submodule: prefix for prefix, submodule in module.named_modules()}
    attach = functools.partial(_attach_collectives, deferred=deferred, prefixes=prefixes)
    outer_units = {root: format_layers([REST])} | dict.fromkeys(ends.head[:1], "the head")
    if ends.embedding is not None:
        outer_units[ends.embedding] = "the embedding"
    replica_all_reduces = attach(list(outer_units), list(outer_units.values()), axis_groups, compressors)
    replica_all_reduces += attach(layers, layer_names, axis_groups, compressors, secondary=options.secondary)
    if expert_group is not None:
        enclosing = _enclosing_layer_names(expert_modules, layers, layer_names)
        expert_names = [f"the experts of {name}" for name in enclosing]
        replica_all_reduces += attach(expert_modules, expert_names, expert_group.axis_groups, expert_group.compressors)
    return FsdpSync(root, options, replica_all_reduces, deferred, mesh.device_type == "cpu")


@known_detach()
def _shard_units(
    module: nn.Module,
    layers: Sequence[nn.Module],
    ends: EndModules,
    expert_group: ExpertFsdpGroup | None,
    settings: Mapping[str, Any],
) -> nn.Module:
    """Makes the FSDP units of a model; returns its root. ``settings`` are of `fully_shard`; the others as `wrap`."""
    # Innermost first: fully_shard leaves out what a unit inside has already taken.
    if expert_group is not None:
        for expert_module in expert_group.modules:
            fully_shard(expert_module, **{**settings, "mesh": expert_group.mesh})
    for layer in layers:
        fully_shard(layer, **settings)
        keep_changes(layer, settings["reshard_after_forward"])
    if ends.embedding is not None:
        unit: Any = fully_shard(ends.embedding, **settings)
        unit.set_unshard_in_backward(False)
        # Named nothing, FSDP2 gathers what the micro-batch before ran last, the head, which is read no more; itself is
        # nothing, since backward doesn't gather it.
        unit.set_modules_to_backward_prefetch([unit])
    if ends.head:
        # Its backward follows its forward at once.
        fully_shard(list(ends.head), **{**settings, "reshard_after_forward": False})
    # The root unit, of all that is in no other (position tables, tied weights), stays gathered through the forward.
    root: nn.Module = fully_shard(module, **{**settings, "reshard_after_forward": False})
    return root


def fsdp_units(module: nn.Module) -> list[nn.Module]:
    """Returns the FSDP units of a module, itself among them, outermost first."""
    return [submodule for submodule in module.modules() if isinstance(submodule, FSDPModule)]


def reshard_all(module: nn.Module) -> None:
    """Frees what a forward without a backward gathered."""
    for unit in fsdp_units(module):
        unit.reshard()


def accumulate_gradients(module: nn.Module) -> None:
    """Adds a backward's gradients, in the type of compute, to the sums of micro-batches in float32.

    FSDP2 does so as a backward reaches a unit's inputs. A backward in halves has no weights' gradients yet then, and
    those of consecutive second halves would add up in the type of compute, bf16.
    """
    accumulate_unsharded_gradients(module)


def _enclosing_layer_names(
    modules: Sequence[nn.Module], layers: Sequence[nn.Module], names: Sequence[str]
) -> list[str]:
    """Returns the name of the layer that each of some modules is in."""
    name_of_submodule = {submodule: name for layer, name in zip(layers, names) for submodule in layer.modules()}
    return [name_of_submodule.get(submodule, format_layers([REST])) for submodule in modules]


def _attach_collectives(
    units: Sequence[nn.Module],
    names: Sequence[str],
    axis_groups: Sequence[AxisGroup],
    compressors: Compressors,
    *,
    deferred: DeferredReductions,
    prefixes: Mapping[nn.Module, str],
    secondary: SecondaryShards | None = None,
) -> list[ReplicaAllReduce]:
    """Makes units communicate through ``axis_groups``; returns what sums over the second, one a unit."""
    replica_all_reduces = []
    for unit, name in zip(units, names, strict=True):
        _use_axis_group(unit, axis_groups[0], deferred, name)
        gather: BookedAllGather = BookedAllGather(axis_groups[0], name)
        if compressors.weights is not None:
            gather = CompressedAllGather(compressors.weights, shard_sizes(unit, prefixes), name)
        if secondary is not None:
            gather = SecondaryAllGather(gather, secondary.axis_group, name)
        unit.set_custom_all_gather(gather)
        for axis_group in axis_groups[1:]:
            shards = shard_sizes(unit, prefixes, trained=True)
            replica_all_reduces.append(ReplicaAllReduce(axis_group, deferred, name, compressors.gradients, shards))
            unit.set_all_reduce_hook(replica_all_reduces[-1])
    return replica_all_reduces


def _set_prefetch_order(
    layers: Sequence[nn.Module], ends: EndModules, expert_modules: Sequence[nn.Module], prefetch: int
) -> None:
    """Gathers ahead of compute, forward in order and backward in reverse, by asynchronous collectives.

    A layer is needed before what is inside it, either way. Backward gathers no embedding, and finds the head gathered.
    On CUDA FSDP2 does so by itself, with streams of its own; the CPU has none.
    """
    experts_of_layer = [
        [expert_module for expert_module in expert_modules if expert_module in set(layer.modules())] for layer in layers
    ]
    units = [[layer, *experts] for layer, experts in zip(layers, experts_of_layer)]
    backward = [*ends.head[:1], *(unit for group in reversed(units) for unit in group)]
    units = [[ends.embedding] if ends.embedding is not None else [], *units, list(ends.head[:1])]
    units = [group for group in units if group]
    forward = [unit for group in units for unit in group]
    for unit in forward:
        set_async_unshard(unit)
    for unit_index, group in enumerate(units):
        # Not from what is inside: where a layer recomputes, its inner units would gather the next layer for nothing.
        next_layers = [
            unit for next_group in units[unit_index + 1 : unit_index + 1 + prefetch] for unit in next_group[:1]
        ]
        group[0].set_modules_to_forward_prefetch([*group[1:], *next_layers])
    for unit_index, unit in enumerate(backward):
        unit.set_modules_to_backward_prefetch(backward[unit_index + 1 : unit_index + 1 + prefetch])


def _use_axis_group(unit: nn.Module, axis_group: AxisGroup, deferred: DeferredReductions, name: str) -> None:
    """Sums instead of averaging (the loss carries the global normalisation) and sends through our collectives."""
    if axis_group.size > 1:
        # Of a group of one torch would take it as a pass over the gradients, to divide them by 1.
        unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)
    unit.set_custom_reduce_scatter(BookedReduceScatter(axis_group, deferred, name))
