"""Makes a layout true: runs the layout's transforms over a meta module, in order, then gives it its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright.axes import replicate, shard
from meshwright.errors import PlanError
from meshwright.plan import Layout
from meshwright.runtime import recompute, wide
from meshwright.runtime.clock import Clock
from meshwright.runtime.materialise import Fill, materialise
from meshwright.runtime.mesh import Mesh
from meshwright.runtime.program import Compute, Program, Sync

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Compute dtype by a layout's precision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The model as `build` takes it."""

    module: nn.Module
    """On the meta device (or materialised, when ``fill`` is None)."""
    layers: Sequence[nn.Module]
    """Its repeated blocks, in order: the units of gathering, recompute and compilation."""
    compute: Compute
    """Forward and loss of one micro-batch."""
    fill: Fill
    """Values of a part of a weight, by name and box."""
    fill_buffers: Callable[[nn.Module, torch.device], None]
    """Puts the module's buffers on a device, with their values."""
    random: bool = False
    """Whether forward draws random numbers."""


@dataclass(slots=True)
class _Work:
    """What the transforms pass along."""

    source: Source
    layout: Layout
    mesh: Mesh | None
    sync: list[Sync] = field(default_factory=list)


def _widen(work: _Work) -> None:
    if work.layout.precision == "float64":
        wide.apply([work.source.module, *work.source.layers])


def _recompute(work: _Work) -> None:
    recompute.apply(work.source.layers, work.layout.recompute, work.source.random)


def _compile(work: _Work) -> None:
    if work.layout.compile:
        for layer in work.source.layers:
            compiled: Any = torch.compile(layer.forward)
            layer.forward = compiled  # type: ignore[method-assign]


def _shard_data(work: _Work) -> None:
    """Data axes: sharded state where the layout shards, or computes in another type than it keeps, else copies."""
    layout, mesh = work.layout, work.mesh
    if layout.zero or layout.mixed or layout.offload == "parameters":
        assert mesh is not None
        options = shard.ShardOptions(
            zero=layout.zero,
            compute=DTYPES[layout.precision] if layout.mixed else None,
            offload=layout.offload == "parameters",
        )
        wires = [mesh.wires[name] for name in ("shard", "replicate") if name == "shard" or layout.degree(name) > 1]
        work.sync.append(shard.wrap(work.source.module, work.source.layers, mesh.axes("shard"), options, wires))
    elif layout.degree("replicate") > 1:
        assert mesh is not None
        work.sync.append(_LateReplicate(work.source.module, mesh))


class _LateReplicate:
    """Attaches the replicate axis's hooks to parameters once they are materialised (hooks don't survive that)."""

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        self._module, self._wire = module, mesh.wires["replicate"]
        self._reducer: Any = None

    def begin(self, last: bool) -> None:
        """Announces a micro-batch."""
        if self._reducer is None:
            self._reducer = replicate.wrap(self._module, self._wire)
        self._reducer.begin(last)

    def finish(self) -> None:
        """Waits for the sums."""
        self._reducer.finish()


TRANSFORMS: tuple[Callable[[_Work], None], ...] = (_widen, _recompute, _compile, _shard_data)
"""In this order; an axis that changes modules adds its own (split, tensor, expert, context come before recompute)."""


def check(layout: Layout, device_type: str, layers: int) -> None:
    """Refuses what a device or model can't run, before a rank starts.

    Raises:
        PlanError: with the rule and the nearest layout that works.
    """
    if layout.offload != "none" and device_type == "cpu":
        raise PlanError(
            f"offload={layout.offload} moves state from a GPU to host memory, but the ranks compute on the CPU, whose "
            "memory that is; leave offload out"
        )
    mode, _, count = layout.recompute.partition(":")
    if mode != "none" and (layers == 0 or int(count or 0) > layers):
        raise PlanError(f"recompute={layout.recompute}: the model has {layers} repeated layers; K is at most that")
    if layout.compile and layers == 0:
        raise PlanError("compile=true compiles layer by layer, but no repeated layers were found in the model")


def build(source: Source, layout: Layout, mesh: Mesh | None, device: torch.device, clock: Clock) -> Program:
    """Builds the program of this rank.

    Args:
        source: the model.
        layout: what to make true.
        mesh: ranks and wires; None for one rank without a process group.
        device: where this rank computes.
        clock: books the parts of a step.

    Returns:
        The program, its weights materialised as this rank's parts.
    """
    work = _Work(source, layout, mesh)
    for transform in TRANSFORMS:
        transform(work)
    master = torch.float64 if layout.precision == "float64" else torch.float32
    host = torch.device("cpu") if layout.offload == "parameters" else device
    materialise(source.module, host, master, source.fill)
    source.fill_buffers(source.module, device)
    settle(source.module)
    source.module.train()
    return Program(source.module, source.compute, work.sync, mesh, clock)


def settle(module: nn.Module) -> None:
    """Lets FSDP2 take over the materialised shards, so that each parameter's local tensor is final from here on."""
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.unshard()
            part.reshard()
