"""The layout's ranks as a torch DeviceMesh, and its axes as groups with collectives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.parallel.axis_group import AxisGroup, TrafficLog
from meshwright.parallel.compression import CopyGroups, GradientCompressor, RoundingKey, WeightCompressor
from meshwright.parallel.feedback_compressor import FeedbackCompressor
from meshwright.parallel.low_rank import LowRankCompressor
from meshwright.parallel.row_codec import RowCodec, can_fuse
from meshwright.parallel.secondary_shards import SecondaryShards
from meshwright.parallel.top_k import TopKCompressor
from meshwright.parallel.wire import AUTO, WireOptions, open_axis_group
from meshwright.spec.axes import known_axes
from meshwright.spec.axis import Mechanics
from meshwright.spec.groups import carved_groups, loss_axes, members, round_axes
from meshwright.spec.layout import EXPERT_NODE, SECONDARY, Layout

_PRODUCT = "+"
"""Joins the names of the axes that a group is the product of."""
WORLD = "world"
"""Name under which collectives over all ranks are booked."""
ISLAND = "island"
"""Name under which those over the ranks of one island are booked, where there are several islands."""


class Mesh:
    """A layout's DeviceMesh (dimensions named as the axes, outermost first) and one `AxisGroup` per axis that is used.

    Args:
        layout: its degrees multiply to the ranks of the default process group.
        device_type: ``"cpu"`` or ``"cuda"``.
        log: where traffic is booked.
        wire: how collectives of CPU ranks travel.
    """

    def __init__(self, layout: Layout, device_type: str, log: TrafficLog, wire: WireOptions = AUTO) -> None:
        self.layout, self.device_type, self.log, self._wire = layout, device_type, log, wire
        self.rank = dist.get_rank()
        self.loss_axes = loss_axes()
        shape = layout.shape()
        self.device_mesh: DeviceMesh = init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))
        self.world = self.axis_group(WORLD, dist.group.WORLD)
        self.island = self.world if layout.islands == 1 else self._island_group(shape)
        """The ranks that take each step together: over them losses, norms and counts are summed."""
        self._carved_groups: Mapping[str, list[list[int]]] = {}
        self.compressors: list[GradientCompressor | FeedbackCompressor | WeightCompressor] = []
        """All that send less than exact values of weights or gradients."""
        is_fused = layout.compile and can_fuse(torch.device(device_type))
        self.row_codec = RowCodec(is_fused) if layout.compress_tokens != "none" else None
        """Rounds tokens on their way to experts; None sends exact values."""
        self.axis_groups = {name: self.axis_group(name, self.device_mesh.get_group(name)) for name in shape}
        for name, axis in known_axes().items():
            if axis.carves and layout.degree(name) > 1:
                self._carve(name)

    def axis_group(self, axis: str, group: dist.ProcessGroup) -> AxisGroup:
        """Returns the collectives of a process group; a collective call of its ranks, since it may share memory.

        Args:
            axis: name under which they are booked.
            group: the ranks.
        """
        return open_axis_group(axis, group, self.log, self._wire)

    def describe_wire(self) -> str:
        """Returns how collectives of CPU ranks travel, and why those of some axes go through gloo."""
        if self._wire.choice == "gloo" or self.world.size == 1:
            return "gloo"
        groups = {WORLD: self.world, **self.axis_groups}
        reasons = [f"gloo over {name}: {group.gloo_reason}" for name, group in groups.items() if group.gloo_reason]
        return "; ".join(["shared memory", *reasons])

    def _island_group(self, shape: dict[str, int]) -> AxisGroup:
        """Returns the group of this rank's island; a collective call."""
        dims = [tuple(shape).index(name) for name in round_axes()]
        # With the islands outermost, each row of the matrix is one island.
        lines = self.device_mesh.mesh.movedim(dims, tuple(range(len(dims)))).reshape(self.layout.islands, -1)
        group, _ = dist.new_subgroups_by_enumeration(lines.tolist())
        return self.axis_group(ISLAND, group)

    def _carve(self, name: str) -> None:
        """Adds the groups of an axis that factorises others' ranks a second time.

        ``ep``: its own ranks; ``ep_shard``: those of a block that hold the same part, which may share it as shards;
        ``ep_copies``: all that hold the same part.
        """
        for suffix, groups in zip(("", "_shard", "_copies"), carved_groups(name, self.layout.degrees)):
            group, _ = dist.new_subgroups_by_enumeration(groups)
            self.axis_groups[name + suffix] = self.axis_group(name + suffix, group)
            self._carved_groups = {**self._carved_groups, name + suffix: groups}

    def axis_device_mesh(self, axis_group: AxisGroup) -> DeviceMesh:
        """Returns a group's ranks as a DeviceMesh of one dimension, named as the group."""
        if axis_group.axis in self.layout.shape():
            return self.device_mesh[axis_group.axis]
        return DeviceMesh.from_group(axis_group.group, self.device_type, mesh_dim_names=(axis_group.axis,))

    def group_with(self, mechanics: Mechanics) -> AxisGroup:
        """Returns the group along the axis that has some mechanics; the layout uses one."""
        return self.axis_groups[self.layout.axis(mechanics)]

    def combined_group(self, names: Sequence[str]) -> AxisGroup:
        """Returns a group over the product of some axes; a collective call, since it may make the group."""
        # Axes of degree 1 add no ranks; of none but these the first names a group of one.
        used = [name for name in names if self.layout.degree(name) > 1] or list(names[:1])
        if len(used) == 1:
            return self.axis_groups[used[0]]
        key = _PRODUCT.join(used)
        if key not in self.axis_groups:
            group, _ = dist.new_subgroups_by_enumeration(self._ranks_along(used))
            self.axis_groups[key] = self.axis_group(key, group)
        return self.axis_groups[key]

    def _ranks_along(self, names: Sequence[str]) -> list[list[int]]:
        """Returns the ranks of every group over the product of some axes."""
        dims = [tuple(self.layout.shape()).index(name) for name in names]
        trailing_dims = range(-len(dims), 0)
        size = math.prod(self.layout.degree(name) for name in names)
        # With these axes innermost, each row of the matrix is one group.
        return self.device_mesh.mesh.movedim(dims, tuple(trailing_dims)).reshape(-1, size).tolist()  # type: ignore[no-any-return]

    def subgroup(self, name: str, size: int) -> AxisGroup:
        """Returns a group over runs of ``size`` neighbours along an axis; a collective call."""
        key = f"{name}_{size}"
        if key not in self.axis_groups:
            lines = self.device_mesh.mesh.movedim(tuple(self.layout.shape()).index(name), -1).reshape(-1, size)
            group, _ = dist.new_subgroups_by_enumeration(lines.tolist())
            self.axis_groups[key] = self.axis_group(name, group)
        return self.axis_groups[key]

    def compressor(
        self, copies: AxisGroup, key: RoundingKey, stage_index: int = 0
    ) -> GradientCompressor | FeedbackCompressor | None:
        """Returns what sums gradients over copies with fewer bytes; None where the layout sums exactly.

        A collective call, since it may make groups.

        Args:
            copies: the ranks that hold the same part of a weight.
            key: of the random roundings.
            stage_index: of the stage that the weights are in: a tied weight of two stages is rounded by other numbers
                in each.
        """
        compression = self.layout.compress
        if not compression or copies.size == 1:
            return None
        if compression.keeps_errors:
            feedback_type = LowRankCompressor if compression.is_low_rank else TopKCompressor
            self.compressors.append(feedback := feedback_type(compression, copies, key))
            return feedback
        run = compression.exact_copies(copies.size)
        inside, across = None, copies
        if run > 1:
            inside, across = self._runs(copies, run, copies.axis)
        name = f"{self._copies_name(copies)}.{stage_index}"
        compressor = GradientCompressor(compression, CopyGroups(copies, inside, across), key, name)
        self.compressors.append(compressor)
        return compressor

    def secondary_shards(self, shards: AxisGroup) -> SecondaryShards | None:
        """Returns the ranks that share gathered weights between forward and backward; None where the layout has none.

        A collective call, since it may make groups.

        Args:
            shards: the ranks that share the weights' state.
        """
        if not self.layout.secondary:
            return None
        inside, across = self._runs(shards, self.layout.secondary, SECONDARY)
        ranks = dist.get_process_group_ranks(shards.group)
        rows = torch.tensor(ranks).view(-1, inside.size)
        names = (f"{SECONDARY}_copies", SECONDARY)
        mesh = DeviceMesh.from_group([across.group, inside.group], self.device_type, rows, mesh_dim_names=names)
        return SecondaryShards(axis_group=inside, mesh=mesh)

    def expert_node(self, run: int) -> tuple[AxisGroup | None, AxisGroup]:
        """Returns the ranks of ``ep`` in this rank's node, None of one rank, and those at its place in all nodes.

        A collective call, since it may make groups.

        Args:
            run: ranks of a node, neighbours along ``ep``.
        """
        experts = self.group_with(Mechanics.EXPERTS)
        return (None, experts) if run == 1 else self._runs(experts, run, EXPERT_NODE)

    def _runs(self, axis_group: AxisGroup, run: int, booked_axis: str) -> tuple[AxisGroup, AxisGroup]:
        """Returns this rank's run of neighbours in a group, and the ranks at its position in the other runs.

        A collective call, since it makes groups.

        Args:
            axis_group: along axes of the mesh, or of an axis that carves.
            run: neighbours, which divide the group.
            booked_axis: name under which the run's traffic is booked.
        """
        groups = self._carved_groups.get(axis_group.axis) or self._ranks_along(axis_group.axis.split(_PRODUCT))
        runs = [group[start : start + run] for group in groups for start in range(0, len(group), run)]
        peers = [group[first::run] for group in groups for first in range(run)]
        inside = self._named_group(axis_group.axis, f"node_{run}", runs, booked_axis)
        return inside, self._named_group(axis_group.axis, f"nodes_{run}", peers, axis_group.axis)

    def _copies_name(self, copies: AxisGroup) -> str:
        """Returns the name of a shard's copies in draws: the first of them, by its rank at index 0 along ``tp``."""
        first_rank = dist.get_global_rank(copies.group, 0)
        # Ranks of tp hold some weights in full (norms, biases), which stay equal only under the same draws. Those that
        # it splits then repeat numbers for other elements, which biases nothing.
        return str(members(first_rank, (self.layout.axis(Mechanics.MATRICES),), self.layout.degrees)[0])

    def weight_compressor(self, shards: AxisGroup) -> WeightCompressor | None:
        """Returns what gathers weights in rounded numbers from the ranks that share them; None where they are exact."""
        name = self.layout.compress_weights
        if name == "none" or shards.size == 1:
            return None
        compressor = WeightCompressor(name, shards)
        self.compressors.append(compressor)
        return compressor

    def _named_group(self, axis: str, suffix: str, groups: list[list[int]], booked_axis: str) -> AxisGroup:
        """Returns this rank's group of a partition of an axis's groups, booked under a name."""
        key = f"{axis}_{suffix}"
        if key not in self.axis_groups:
            group, _ = dist.new_subgroups_by_enumeration(groups)
            self.axis_groups[key] = self.axis_group(booked_axis, group)
        return self.axis_groups[key]

    def barrier(self, timeout: timedelta) -> None:
        """Waits for all ranks.

        Raises:
            RuntimeError: when one doesn't come within ``timeout``.
        """
        if dist.get_backend() == "gloo":
            dist.monitored_barrier(timeout=timeout)
        else:
            dist.barrier()
