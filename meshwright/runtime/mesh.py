"""The layout's ranks as a torch DeviceMesh, and its groups as wires."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.axes.comm.wire import TrafficLog, Wire
from meshwright.axes.groups import loss_axes
from meshwright.plan import Layout

WORLD = "world"
"""Name under which collectives over all ranks are booked."""


class Mesh:
    """A layout's DeviceMesh (dimensions named as the axes, outermost first) and one `Wire` per axis that is used.

    Args:
        layout: its degrees multiply to the ranks of the default process group.
        device_type: ``"cpu"`` or ``"cuda"``.
        log: where traffic is booked.
    """

    def __init__(self, layout: Layout, device_type: str, log: TrafficLog) -> None:
        self.layout, self.device_type, self.log = layout, device_type, log
        self.rank = dist.get_rank()
        self.loss_axes = loss_axes()
        shape = layout.shape()
        self.device_mesh: DeviceMesh = init_device_mesh(
            device_type, tuple(shape.values()), mesh_dim_names=tuple(shape)
        )
        self.world = Wire(WORLD, dist.group.WORLD, log)
        self.wires = {name: Wire(name, self.device_mesh.get_group(name), log) for name in shape}

    def axes(self, *names: str) -> DeviceMesh:
        """Returns the sub-mesh over some axes."""
        return self.device_mesh[names]

    def barrier(self, timeout: timedelta) -> None:
        """Waits for all ranks.

        Raises:
            RuntimeError: when one doesn't come within ``timeout``.
        """
        if dist.get_backend() == "gloo":
            dist.monitored_barrier(timeout=timeout)
        else:
            dist.barrier()
