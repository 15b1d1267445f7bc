"""The `shard` axis: ranks read other rows and hold parts of the state; ZeRO 1, 2 and 3 by FSDP2.

One mechanism gives all levels: parameters rest as shards, are gathered for compute, and gradients are scattered. The
level says how long the gathered form lives: to the end of the step (1 and 2) or of the layer's pass (3), and whether an
accumulation step scatters its gradients (2 and 3) or keeps them whole (1).
Source: Rajbhandari et al., ZeRO (SC 2020), section 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from meshwright.parallel.axis_group import AxisGroup, PendingCollective
from meshwright.parallel.fsdp_collectives import BookedAllGather, BookedReduceScatter, DeferredReductions
from meshwright.parallel.layer_names import REST, spell
from meshwright.parallel.scalar_parameters import hold_as_rows


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
    first: int = 0
    """Number, in the model, of the first of the layers: what messages call them by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertFsdpGroup:
    """Modules inside the layers whose copies, and so whose shards, live on other ranks than those of the rest."""

    modules: Sequence[nn.Module]
    """Each a unit of gathering of its own, in order."""
    mesh: DeviceMesh
    """Of one dimension: the ranks that share the shards."""
    axis_groups: Sequence[AxisGroup]
    """As `wrap` takes them."""


class FsdpSync:
    """Steers the sharded module through a step: which micro-batch communicates what, and when shards are restored."""

    def __init__(
        self,
        module: Any,
        options: ShardOptions,
        copies: Sequence[ReplicaAllReduce],
        late: DeferredReductions,
        on_cpu: bool,
    ) -> None:
        self._module, self._zero, self._copies = module, options.zero, copies
        self._late, self._on_cpu = late, on_cpu
        self._fresh = False

    def begin(self, last: bool, fresh: bool = False) -> None:
        """Announces a micro-batch of the step; ``fresh`` where no shard holds a gradient yet."""
        self._late.finish()
        summed = last or self._zero >= 2
        self._fresh = self._fresh or fresh
        # A sum that is added to gradients of earlier micro-batches is read where it starts.
        self._late.enabled = self._on_cpu and summed and self._fresh and (last or not self._copies)
        if summed:
            self._fresh = False
        self._module.set_is_last_backward(last)
        self._module.set_requires_gradient_sync(summed)
        for copy in self._copies:
            copy.last = last
        if self._zero < 3:
            self._module.set_reshard_after_backward(last)

    def finish(self) -> None:
        """Waits for the reductions that the last backward left under way."""
        self._late.finish()

    def forget(self) -> None:
        """Drops sums over micro-batches that no gradient shows yet, as zero_grad() has dropped those that do."""
        for copy in self._copies:
            copy.forget()
        # ZeRO 1 keeps them in the gathered weights, which FSDP2 has no public way to clear.
        for held in fsdp_parameters(self._module):
            held.unsharded_accumulated_grad = None
            if hasattr(held, "_unsharded_param"):
                held._unsharded_param.grad = None


class ReplicaAllReduce:
    """Sums one unit's scattered gradients over the copies of the shards, once a step.

    FSDP2 calls it after each scatter. Before the last micro-batch it keeps the part for later. ``of`` names the unit.
    """

    def __init__(self, axis_group: AxisGroup, late: DeferredReductions, of: str = "") -> None:
        self.last = True
        self._axis_group, self._late, self._of = axis_group, late, of
        self._kept: torch.Tensor | None = None

    def __call__(self, part: torch.Tensor) -> None:
        """Turns ``part: (n,)``, this micro-batch's sum over the shard axis, into what the step still owes.

        That is nothing yet, or at last everything, summed over the copies.
        """
        if not self.last:
            self._kept = part.clone() if self._kept is None else self._kept.add_(part)
            part.zero_()
            return
        self._late.sum(lambda: self._whole(part))

    def forget(self) -> None:
        """Drops what was kept."""
        self._kept = None

    def _whole(self, part: torch.Tensor) -> PendingCollective:
        if self._kept is not None:
            part.add_(self._kept)
            self._kept = None
        return self._axis_group.all_reduce(part, self._of)


def wrap(
    module: nn.Module,
    layers: Sequence[nn.Module],
    mesh: DeviceMesh,
    options: ShardOptions,
    axis_groups: Sequence[AxisGroup],
    apart: ExpertFsdpGroup | None = None,
) -> FsdpSync:
    """Shards ``module`` over a mesh of one dimension, layer by layer.

    Args:
        module: the model, on the meta device or materialised; parameters become DTensors, sharded on dim 0 (a number
            as one row, by `hold_as_rows`).
        layers: its repeated blocks, each a unit of gathering; the rest is one unit that stays gathered in the step.
        mesh: of one dimension: the ranks that share the state.
        options: how.
        axis_groups: collectives of these ranks and, where the shards have copies, of the ranks of the copies.
        apart: modules that are sharded over other ranks; None for none.

    Returns:
        The state that the step steers.
    """
    mixed = MixedPrecisionPolicy(
        param_dtype=options.compute, reduce_dtype=torch.float32 if options.compute else None, cast_forward_inputs=False
    )
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": mixed,
        "offload_policy": CPUOffloadPolicy() if options.offload else OffloadPolicy(),
        "reshard_after_forward": options.zero == 3,
    }
    hold_as_rows(module)
    others: Sequence[Any] = apart.modules if apart else ()
    for inner in others:
        assert apart is not None
        fully_shard(inner, **{**settings, "mesh": apart.mesh})
    for layer in layers:
        fully_shard(layer, **settings)
    root: Any = fully_shard(module, **{**settings, "reshard_after_forward": False})
    if mesh.device_type == "cpu":
        _gather_ahead(layers, others, options.prefetch)
    late, names = (
        DeferredReductions(),
        [spell([number]) for number in range(options.first, options.first + len(layers))],
    )
    copies = _connect((root, *layers), axis_groups, late, (spell([REST]), *names))
    if apart is not None:
        experts = [f"the experts of {name}" for name in _around(others, layers, names)]
        copies += _connect(others, apart.axis_groups, late, experts)
    return FsdpSync(root, options, copies, late, mesh.device_type == "cpu")


def accumulate_gradients(module: nn.Module) -> None:
    """Adds a backward's gradients, in the type of compute, to the sums of micro-batches in float32.

    FSDP2 does so as a backward reaches a unit's inputs. A backward in halves has no weights' gradients yet then, and
    those of consecutive second halves would add up in the type of compute, bf16.
    """
    for held in fsdp_parameters(module):
        if hasattr(held, "_unsharded_param"):  # as `FSDPParamGroup.post_backward` does; there is no public way
            held.accumulate_unsharded_grad_if_needed()
            held.to_accumulated_grad_if_needed()


def fsdp_parameters(module: nn.Module) -> Iterator[Any]:
    """Yields FSDP2's own objects (`FSDPParam`) of all parameters that it shards in a module."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            for group in fsdp_groups(part):
                yield from group.fsdp_params


def fsdp_groups(unit: Any) -> list[Any]:
    """Returns FSDP2's own groups (`FSDPParamGroup`) of one unit: any number since torch 2.12, one or none in 2.11."""
    state = unit._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _around(inner: Sequence[Any], layers: Sequence[Any], names: Sequence[str]) -> list[str]:
    """Returns the name of the layer that each of some modules is in."""
    found = {part: name for layer, name in zip(layers, names) for part in layer.modules()}
    return [found.get(part, spell([REST])) for part in inner]


def _connect(
    units: Sequence[Any], axis_groups: Sequence[AxisGroup], late: DeferredReductions, names: Sequence[str]
) -> list[ReplicaAllReduce]:
    """Makes units communicate through ``axis_groups``; returns what sums over the second, one a unit."""
    copies = []
    for unit, name in zip(units, names, strict=True):
        _use_wire(unit, axis_groups[0], late, name)
        for axis_group in axis_groups[1:]:
            copies.append(ReplicaAllReduce(axis_group, late, name))
            unit.set_all_reduce_hook(copies[-1])
    return copies


def _gather_ahead(layers: Sequence[Any], others: Sequence[Any], prefetch: int) -> None:
    """Gathers ahead of compute, forward in order and backward in reverse, by asynchronous collectives.

    A layer is needed before what is inside it, either way. On CUDA FSDP2 does so by itself, with streams of its own;
    the CPU has none.
    """
    inside = [[part for part in others if part in set(layer.modules())] for layer in layers]
    units = [[layer, *parts] for layer, parts in zip(layers, inside)]
    forward = [unit for group in units for unit in group]
    backward = [unit for group in reversed(units) for unit in group]
    for unit in forward:
        unit._set_unshard_async_op(True)
    for place, group in enumerate(units):
        # Not from what is inside: where a layer recomputes, its inner units would gather the next layer for nothing.
        ahead = [unit for later in units[place + 1 : place + 1 + prefetch] for unit in later[:1]]
        group[0].set_modules_to_forward_prefetch([*group[1:], *ahead])
    for place, unit in enumerate(backward):
        unit.set_modules_to_backward_prefetch(backward[place + 1 : place + 1 + prefetch])


def _use_wire(unit: Any, axis_group: AxisGroup, late: DeferredReductions, name: str) -> None:
    """Sums instead of averaging (the loss carries the global normalisation) and sends through our collectives."""
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)
    unit.set_custom_all_gather(BookedAllGather(axis_group, name))
    unit.set_custom_reduce_scatter(BookedReduceScatter(axis_group, late, name))
