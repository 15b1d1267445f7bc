"""The model as `parallel.build` takes it: a meta module, its names, and where its values come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.parallel.stage_module import Compute, Halve, RowBatch
from meshwright.spec.end_units import EndUnits
from meshwright.spec.experts import LayerExperts
from meshwright.spec.layer_graph import LayerGraph
from meshwright.spec.placement import Box
from meshwright.spec.sharding_table import ShardingTable

Fill = Callable[[str, Box], torch.Tensor]
"""Returns the values of one part of a weight: (name, box) to a CPU tensor of the box's shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """The model as `build` takes it."""

    module: nn.Module
    """On the meta device (or materialised, when ``fill`` is None)."""
    layers: Sequence[str]
    """Names of its repeated blocks, in order: the units of gathering, recompute, compilation and splitting."""
    compute: Compute
    """Forward and loss of one micro-batch."""
    fill: Fill
    """Values of a part of a weight, by name and box."""
    fill_buffers: Callable[[nn.Module, torch.device], None]
    """Puts the module's buffers on a device, with their values."""
    keeps_copies: bool = False
    """Whether the optimizer keeps up copies of weights in the type of compute (`parallel.compute_copies`)."""
    random: bool = False
    """Whether forward may draw random numbers."""
    ties: Sequence[Sequence[str]] = ()
    """Groups of parameter names that are one parameter."""
    table: ShardingTable | None = None
    """What axes do to each weight; needed by layouts with an axis that splits layers."""
    layer_graph: LayerGraph | None = None
    """How forward goes through the layers; needed by layouts with a pipeline."""
    attention: str = "heads"
    """How ``cp`` computes attention: ``heads``, ``gather`` or ``ring``."""
    experts: Sequence[LayerExperts] = ()
    """Its experts modules; needed by layouts with ``ep``."""
    weigh: Callable[[RowBatch], torch.Tensor] | None = None
    """What a micro-batch counts for in each term of the model's own loss, where it has any."""
    terms: Sequence[str] = ()
    """Names of the terms that ``compute`` reports beside the cross-entropy."""
    counts_targets: bool = False
    """Whether ``compute`` reads the model's own loss inside of its forward (`parallel.inner_loss`)."""
    head: str = ""
    """Name of the linear head in front of which ``compute`` may end the forward (`parallel.head_cut`)."""
    ends: EndUnits = EndUnits()  # noqa: RUF009 - frozen
    """Modules outside the layers that ZeRO may gather by themselves."""
    halve: Halve | None = None
    """Takes the rows of a micro-batch apart; None where its loss isn't the sum over two halves of them."""
    width: int = 0
    """D, of the hidden state; 0 where the model's structure doesn't say."""
    moving: Sequence[str] = ()
    """Names of the buffers that forward changes while it trains."""
