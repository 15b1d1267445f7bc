"""Pipeline and sharding descriptions as in torch's tutorials, as data that becomes a layout or a sharded tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from meshwright.errors import ConfigError, PlanError
from meshwright.spec.axis import Holds, Mechanics
from meshwright.spec.groups import axis_with, row_axes
from meshwright.spec.layout import Layout
from meshwright.strategy.mesh import layout_of_mesh


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineStrategy:
    """Stages of a pipeline and the rows of a micro-batch."""

    num_stages: int
    """Stages, one a rank."""
    microbatch_size: int
    """Rows of a micro-batch."""
    device_mesh: DeviceMesh | None = None
    """Ranks: of one dim, or of named dims among which ``pp`` is."""
    schedule: str = ""
    """Order of forwards and backwards; the default one when empty."""

    def layout(self, rows: int) -> Layout:
        """Returns the layout for batches of some rows a reader.

        Raises:
            PlanError: the micro-batches don't divide the rows, or the mesh has another number of stages.
        """
        size = self.microbatch_size
        if size < 1 or rows % size or not rows:
            near = max(size, rows // size * size) if size > 0 else 1
            raise PlanError(f"microbatch_size={size} doesn't divide {rows} rows of a batch; nearest that works: {near}")
        mesh = self.device_mesh
        # an unnamed mesh of one dim is the pipeline
        if mesh is None or (mesh.ndim == 1 and mesh.mesh_dim_names is None):
            degrees = {axis_with(Mechanics.STAGES, {}): self.num_stages}
            ranks = self.num_stages if mesh is None else mesh.size()
        else:
            degrees = dict(layout_of_mesh(mesh).degrees)
            ranks = degrees.get(axis_with(Mechanics.STAGES, degrees), 1)
        if ranks != self.num_stages:
            raise PlanError(f"num_stages={self.num_stages}, but the mesh has {ranks} ranks for stages; make them equal")
        zero = 3 if any(degrees.get(name, 1) > 1 for name in row_axes(Holds.SHARD)) else 0
        return Layout(degrees=degrees, zero=zero, microbatches=rows // size, schedule=self.schedule)


@dataclass(frozen=True, slots=True)
class ShardingSpec:
    """Placement of a tensor over the dims of a mesh: ``ShardingSpec([Shard(0)])`` cuts its first dim."""

    placements: Sequence[Placement]
    """One for each dim of the mesh: ``Shard(dim)`` or ``Replicate()`` of torch.distributed.tensor."""

    def shard(self, tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
        """Returns a tensor of any shape as a DTensor: each rank of the mesh has its shard.

        Raises:
            ConfigError: there isn't one placement for each dim of the mesh, or a dim that the tensor hasn't.
        """
        if len(self.placements) != mesh.ndim:
            raise ConfigError(
                f"the spec has {len(self.placements)} placements, but the mesh {mesh.ndim} dims: give one for each"
            )
        for placement in self.placements:
            if isinstance(placement, Shard) and not -tensor.ndim <= placement.dim < tensor.ndim:
                dims = ", ".join(map(str, range(tensor.ndim)))
                raise ConfigError(f"Shard({placement.dim}): the tensor {tuple(tensor.shape)} has dims {dims}")
        return distribute_tensor(tensor, mesh, list(self.placements))

    @property
    def mode(self) -> str:
        """The split of a linear layer's weight (out, in): ``columns``, ``rows`` or ``whole``."""
        # a linear weight is (out, in): dim 0 splits outputs, dim 1 inputs
        dims = {item.dim for item in self.placements if isinstance(item, Shard)}
        if not dims:
            return "whole"
        if len(dims) > 1 or not dims <= {0, 1, -1, -2}:
            raise ConfigError(f"placements {self.placements} cut several dims: a linear layer is split over one")
        return "columns" if dims <= {0, -2} else "rows"


__all__ = ["PipelineStrategy", "Replicate", "Shard", "ShardingSpec"]
