"""Lists what one rank sends in a step: every collective of a layout, by kind, group and bytes.

The list is exact for what a model's weights and tables say; the tokens that a router sends to each rank of ``ep`` are
taken as equal. It stands beside what a run counted, and beside what the real program does on fake ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.planner.model_parts import ModelParts, Places
from meshwright.planner.rank_weights import StageWeights, Tensors, elements, shard_elements
from meshwright.spec.axes import known_axes
from meshwright.spec.axis import Mechanics
from meshwright.spec.groups import carved_groups, coordinates, gradient_axes, members, state_index
from meshwright.spec.layout import Layout

ACTIVE_STAGES = 3
"""Stages of a rank that stay gathered in a pipeline. Source: torch 2.13, pipelining, `_add_unshard_reshard`."""


@dataclass(frozen=True, slots=True)
class CollectiveGroup:
    """The ranks of a collective."""

    axis: str
    """Name under which the runtime books it."""
    ranks: tuple[int, ...]
    """Global, in order."""


@dataclass(slots=True)
class Collectives:
    """Bytes that one rank hands to collectives in a step, added up by kind and group.

    Of an all-reduce these are the bytes of the tensor; of an all-gather and a reduce-scatter those of the rank's part;
    of an all-to-all and a send those for other ranks.
    """

    bytes: dict[tuple[CollectiveGroup, str], float] = field(default_factory=dict)

    def add(self, group: CollectiveGroup, kind: str, size: float) -> None:
        """Adds a collective; one rank alone sends nothing."""
        if len(group.ranks) > 1 and size:
            self.bytes[group, kind] = self.bytes.get((group, kind), 0.0) + size

    def sent(self) -> dict[str, int]:
        """Returns the bytes that cross wires, by axis, as `parallel.axis_group.AxisGroup` counts them."""
        found: dict[str, float] = {}
        for (group, kind), size in self.bytes.items():
            others = len(group.ranks) - 1
            # An all-reduce is a scatter and a gather of parts: Rabenseifner (2004).
            share = {"all_reduce": 2 * others / (others + 1), "all_gather": others, "reduce_scatter": others}
            found[group.axis] = found.get(group.axis, 0.0) + size * share.get(kind, 1)
        return {axis: round(size) for axis, size in found.items()}


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of an element."""

    compute: int
    """Of activations and gathered parameters."""
    master: int
    """Of reduced gradients."""

    @classmethod
    def of(cls, layout: Layout) -> Bytes:
        """Returns those of a layout's precision."""
        master = 8 if layout.precision == "float64" else 4
        return cls(2 if layout.mixed else master, master)


class RankGroups:
    """The groups that one rank is in.

    Args:
        layout: its axes.
        rank: which rank.
    """

    def __init__(self, layout: Layout, rank: int) -> None:
        self._layout, self._rank = layout, rank
        self._carved: dict[str, CollectiveGroup] = {}
        for name in (name for name, axis in known_axes().items() if axis.carves and layout.degree(name) > 1):
            for suffix, parts in zip(("", "_shard", "_copies"), carved_groups(name, layout.degrees)):
                ranks = next(part for part in parts if rank in part)
                self._carved[name + suffix] = CollectiveGroup(name + suffix, tuple(ranks))

    def across(self, names: Sequence[str]) -> CollectiveGroup:
        """Returns the group over the product of some axes."""
        used = [name for name in names if self._layout.degree(name) > 1]
        return CollectiveGroup("+".join(used), members(self._rank, used, self._layout.degrees))

    def carved(self, name: str) -> CollectiveGroup:
        """Returns a group of an axis that divides the ranks of others: ``ep``, ``ep_shard``, ``ep_copies``."""
        return self._carved.get(name) or CollectiveGroup(name, (self._rank,))

    def neighbours(self, name: str, size: int) -> CollectiveGroup:
        """Returns the run of ``size`` neighbours along an axis."""
        ranks = self.across((name,)).ranks
        first = ranks.index(self._rank) // size * size
        return CollectiveGroup(name, ranks[first : first + size])


class StateTraffic:
    """Collectives of a rank on weights and gradients: gathers, sums, and what several ranks hold of a weight.

    Args:
        model: as names and sizes.
        layout: of the job.
        rank: which rank.
    """

    def __init__(self, model: ModelParts, layout: Layout, rank: int) -> None:
        self._model, self._layout, self._rank = model, layout, rank
        self._places, self._groups, self._width = Places(model, layout), RankGroups(layout, rank), Bytes.of(layout)
        place = coordinates(rank, layout.degrees)
        self._line, self._split = layout.axis(Mechanics.STAGES), layout.axis(Mechanics.MATRICES)
        self._spread = layout.axis(Mechanics.EXPERTS)
        self._stage, self._part = place[self._line], place[self._split]
        self._expert = self._groups.carved(self._spread).ranks.index(rank)
        self._sharded = bool(layout.zero) or layout.mixed or layout.offload == "parameters"

    def add_to(self, found: Collectives) -> None:
        """Adds all of them."""
        for number, names in enumerate(self._places.stages(self._stage)):
            stage = self._places.held_stage(names, self._part, self._expert)
            if self._sharded:
                self._units(found, stage, number)
            else:
                self._copies(found, stage)
            self._partial(found, names)
        self._shared(found)

    def _units(self, found: Collectives, stage: StageWeights, number: int) -> None:
        """FSDP2's units of a stage: the rest, every layer, every module of experts."""
        layout, groups = self._layout, self._groups
        shards, copies = groups.across(layout.state_axes), groups.across(gradient_axes(layout.state_axes))
        own, holders = groups.carved(f"{self._spread}_copies"), groups.carved(f"{self._spread}_shard")
        if layout.zero:
            own = groups.across(gradient_axes(known_axes()[self._spread].carves))
        else:
            holders = CollectiveGroup(f"{self._spread}_shard", (self._rank,))
        unsharded = self._gathers(number)
        self._unit(found, stage.rest, shards, copies, unsharded[0])
        for layer in stage.layers:
            self._unit(found, layer.own, shards, copies, unsharded[1])
            self._unit(found, layer.experts, holders, own, unsharded[1])

    def _unit(
        self, found: Collectives, held: Tensors, shards: CollectiveGroup, copies: CollectiveGroup, gathers: int
    ) -> None:
        layout, micro = self._layout, self._layout.microbatches
        part = shard_elements(held, len(shards.ranks))  # padded: all shards are as long as the first
        found.add(shards, "all_gather", part * self._width.compute * gathers)
        # A pipeline scatters once, after its last backward; below ZeRO-2 gradients stay whole until the last one.
        scatters = micro if layout.zero >= 2 and layout.degree(Mechanics.STAGES) == 1 else 1
        found.add(shards, "reduce_scatter", part * self._width.master * scatters)
        found.add(copies, "all_reduce", part * self._width.master)

    def _gathers(self, number: int) -> tuple[int, int]:
        """How often a stage's rest and its layers are gathered in a step."""
        layout, micro = self._layout, self._layout.microbatches
        if layout.degree(Mechanics.STAGES) > 1:
            times = list(self._unsharded()).count(number)
            return times, times
        # ZeRO-3: the rest stays gathered from a micro-batch's forward to its backward, layers are gathered for each.
        return (micro, 2 * micro) if layout.zero == 3 else (1, 1)

    def _unsharded(self) -> Iterator[int]:
        """Yields this rank's stages in the order in which the schedule gathers them."""
        schedule = self._layout.pipeline()
        numbers = schedule.rank_stages(self._stage)
        order = [part.stage for action in schedule.actions[self._stage] for part in action.parts]
        active: set[int] = set()
        for at in range(len(order)):
            ahead = list(dict.fromkeys(order[at:]))[:ACTIVE_STAGES]
            active &= set(ahead)
            for stage in (stage for stage in ahead if stage not in active):
                active.add(stage)
                yield numbers.index(stage)

    def _copies(self, found: Collectives, stage: StageWeights) -> None:
        """Gradients of weights that every reader holds whole."""
        own = elements(stage.rest) + sum(elements(layer.own) for layer in stage.layers)
        experts = sum(elements(layer.experts) for layer in stage.layers)
        found.add(self._groups.across(gradient_axes(())), "all_reduce", own * self._width.master)
        found.add(self._groups.carved(f"{self._spread}_copies"), "all_reduce", experts * self._width.master)

    def _local(self, tensors: Tensors) -> int:
        """Elements of weights that lie on this rank once they are sharded."""
        layout = self._layout
        return shard_elements(tensors, layout.state_shards, state_index(self._rank, layout.degrees, layout.zero))

    def _partial(self, found: Collectives, names: Sequence[str]) -> None:
        """Gradients of which each rank of ``tp`` has a summand: weights that its part of a group shares with others."""
        table, degree = self._model.table, self._layout.degree(Mechanics.MATRICES)
        if degree == 1 or table is None:
            return
        shapes, shared = self._places.shapes(self._part, self._expert), set[str]()
        spread = {row.module for row in self._model.experts} if self._layout.degree(Mechanics.EXPERTS) > 1 else set()
        for layer, rows in table.layers.items():
            groups = [group for group in rows.groups if group.shares(degree) and (group.column_linears or not spread)]
            split = {f"{layer}.{item.name}" for group in groups for item in group.splits}
            if self._layout.sequence:
                shared |= {name for name in names if name.startswith(f"{layer}.") and name not in split}
            else:
                shared |= {f"{layer}.{name}" for group in groups for name in group.shared}
        chosen = [name for name in names if name in shared and name.rpartition(".")[0] not in spread]
        size = sum(self._local(((shapes[name][0], _columns(shapes[name])),)) for name in chosen)
        found.add(self._groups.across((self._split,)), "all_reduce", size * self._width.master)
        for ranks, count in self._copied(names, spread).items():
            found.add(self._groups.neighbours(self._split, ranks), "all_reduce", count * self._width.master)

    def _copied(self, names: Sequence[str], spread: set[str]) -> Mapping[int, int]:
        """Elements that some neighbours along ``tp`` hold alike, by the number of these: key heads fewer than ranks."""
        table, degree, found = self._model.table, self._layout.degree(Mechanics.MATRICES), dict[int, int]()
        assert table is not None
        shapes = self._places.shapes(self._part, self._expert)
        for layer, split, shares, group in table.splits(degree):
            name, at = f"{layer}.{split.name}", 0
            if name not in names or (spread and not group.column_linears):
                continue
            for block in split.blocks:
                start, stop = block.span(*shares[self._part], group.units)
                if block.count < degree:
                    size = self._run(shapes[name], split.dim, at, at + stop - start)
                    found[degree // block.count] = found.get(degree // block.count, 0) + size
                at += stop - start
        return found

    def _run(self, shape: tuple[int, ...], dim: int, start: int, stop: int) -> int:
        """Elements of a run of one dim that lie on this rank once dim 0 is sharded."""
        layout = self._layout
        if dim:
            return (stop - start) * self._local(((shape[0], _columns(shape)),)) // shape[dim]
        index = state_index(self._rank, layout.degrees, layout.zero)
        run = -(-shape[0] // layout.state_shards)
        return max(0, min(stop, (index + 1) * run) - max(start, index * run)) * _columns(shape)

    def _shared(self, found: Collectives) -> None:
        """Gradients of tied weights that stages on several ranks hold."""
        degree, first = self._layout.degree(Mechanics.STAGES), self._model.first_names()
        if degree == 1:
            return
        holders: dict[str, set[int]] = {}
        for place in range(degree):
            for name in (name for stage in self._places.stages(place) for name in stage):
                holders.setdefault(first.get(name, name), set()).add(place)
        shapes, line = self._places.shapes(self._part, self._expert), self._groups.across((self._line,)).ranks
        for name, places in holders.items():
            if len(places) > 1 and self._stage in places:
                size = self._local(((shapes[name][0], _columns(shapes[name])),))
                group = CollectiveGroup(self._line, tuple(line[place] for place in sorted(places)))
                found.add(group, "all_reduce", size * self._width.master)


def _columns(shape: tuple[int, ...]) -> int:
    size = 1
    for count in shape[1:]:
        size *= count
    return size
