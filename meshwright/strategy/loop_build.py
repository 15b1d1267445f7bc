"""Builds this rank's shards of a custom model for a loop that calls the model and backward itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from meshwright.parallel.axis_group import TrafficLog
from meshwright.parallel.build import build, check
from meshwright.parallel.forward_stack import ForwardLayer, wrap_forward
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.model_source import Fill
from meshwright.parallel.step_timer import StepTimer
from meshwright.parallel.training_modes import set_training_modes, training_modes
from meshwright.spec.layout import Layout
from meshwright.strategy.custom_module import (
    Model,
    check_equal,
    make_model_source,
    no_compute,
    read_model,
    refuse_unrecorded,
    shape_only_program,
    with_compute_precision,
)
from meshwright.strategy.first_call import FirstCall
from meshwright.strategy.mesh import compute_device
from meshwright.strategy.sharded_model import ShardedModel
from meshwright.strategy.shared_analysis import broadcast_analysis


@dataclass(frozen=True, slots=True)
class LoopUses:
    """What a loop does with a model, as its author says."""

    split_vocabulary: bool
    """Whether logits may be of a rank's shard of the vocabulary."""
    average: bool
    """Whether gradients are means over the readers, not sums."""
    local_rows: bool
    """Whether what looks at several rows is to see those of one call alone."""


def build_for_loop(
    model: Model,
    layout: Layout,
    example: torch.Tensor | None,
    device: torch.device | str | None,
    fill: Fill | None,
    seed: int,
    uses: LoopUses,
) -> ShardedModel:
    """Returns this rank's shards.

    Args:
        model: as `HybridParallelStrategy.shard` takes it.
        layout: to be run.
        example: (B, S) int64 tokens of a call, or what else the model takes; None for tokens.
        device: of the shards; that of the rank when None.
        fill: values of a box of a weight, by name; None for the module's own.
        seed: of weights that are drawn.
        uses: what the loop does.

    Raises:
        PlanError: the model doesn't allow the layout.
        ConfigError: the weights can't be had, or aren't equal.
    """
    target = compute_device(model if isinstance(model, nn.Module) else None, device)
    built = read_model(model, seed)
    modes = training_modes(built.module)
    layout = with_compute_precision(layout, built)
    device_type = "cpu" if target.type == "meta" else target.type
    check(layout, device_type, len(built.structure.layers))
    from_module = target.type != "meta" and fill is None
    if from_module:
        refuse_unrecorded(built)
    mesh = Mesh(layout, device_type, TrafficLog())
    if from_module:
        check_equal(built, mesh.world)
    analysis = broadcast_analysis(built, layout, example, uses.split_vocabulary)
    readers = layout.reader(dist.get_rank())[1]
    first_call = FirstCall(built, layout, readers, fill, uses.local_rows)
    source = make_model_source(built, analysis, fill, no_compute)
    is_meta, clock = target.type == "meta", StepTimer(device_type)
    program = shape_only_program(source, layout, mesh) if is_meta else build(source, layout, mesh, target, clock)
    program.state_meter = None
    module = program.module
    set_training_modes(module, modes)
    if layout.precision == "float64" or not layout.zero:
        # Dynamo traces neither weights with hooks nor what keeps float64 exact: torch.compile runs such a model as
        # it is, and compile=true in the layout compiles its layers.
        wrap_forward(module, ForwardLayer.COMPILE, "excluded from torch.compile", torch.compiler.disable)
    return ShardedModel(program, layout, mesh.rank, built.structure.ties, first_call, (readers, uses.average))
