"""The secondary copy of ZeRO-3's weights: between forward and backward a few neighbours share each layer.

Forward gathers a layer from all ranks that share the state. Then each rank keeps 1/K of the gathered layer instead of
freeing it, so that backward gathers it among K neighbours: inside a node, where K ranks are on one. FSDP2 does so
natively (`reshard_after_forward`); the groups and the account are ours.
Source: Wang et al., ZeRO++ (2023), section 3.2 (hpZ).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.axis_group import AxisGroup
from meshwright.parallel.fsdp_collectives import BookedAllGather
from meshwright.torch_compat.fsdp2 import set_post_forward_mesh


@dataclass(frozen=True, kw_only=True, slots=True)
class SecondaryShards:
    """The ranks that share gathered weights between forward and backward."""

    axis_group: AxisGroup
    """This rank's run of neighbours."""
    mesh: DeviceMesh
    """Of two dims: the runs, and the ranks of a run."""

    def share(self, units: Sequence[nn.Module]) -> None:
        """Makes units of FSDP2, which free their weights after forward, share them instead."""
        for unit in units:
            set_post_forward_mesh(unit, self.mesh)


class SecondaryAllGather(BookedAllGather):
    """Gathers a unit's weights from all ranks in forward, and from the secondary copy in backward.

    Args:
        primary: gathers from all ranks that share the state; may round.
        axis_group: the ranks that share the gathered weights. They gather them as they are: backward has forward's
            weights, rounded or not.
        of: names the unit in messages.
    """

    def __init__(self, primary: BookedAllGather, axis_group: AxisGroup, of: str = "") -> None:
        super().__init__(axis_group, of)
        self._primary = primary

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gathers ``input_tensor: (n,)`` of the group's ranks into ``output_tensor: (size * n,)``."""
        if group.size() == self._axis_group.size:
            return super().__call__(output_tensor, input_tensor, group, async_op)
        return self._primary(output_tensor, input_tensor, group, async_op)
