"""The sharding table: what splits each layer, independent of the degree; runtime applies it, planner prices it.

A layer's `ShardingGroup` is a set of matrices that read the same replicated input (columns split), what lies between
them, and the matrix that brings the result back (rows split). Its work divides into ``units`` that don't meet before
that last matrix: heads of attention, groups of heads that share a key head, single channels of a feed-forward part. A
`Block` says which indices of a weight belong to which unit, so every degree follows from one description.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from meshwright.spec.placement import Span


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """``count`` runs of ``size`` indices from ``start`` on; unit u of n uses run ``u * count // n``."""

    start: int
    size: int
    count: int

    def span(self, start_unit: int, stop_unit: int, units: int) -> Span:
        """Returns the indices that units [start_unit, stop_unit) of ``units`` use."""
        # Round down and up: a run that several units share (a key head of grouped queries) belongs to each of them.
        low, high = start_unit * self.count // units, -(-stop_unit * self.count // units)
        return self.start + low * self.size, self.start + max(high, low) * self.size


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSplit:
    """One parameter that a group splits."""

    name: str
    """Dotted name, from the layer on."""
    dim: int
    """The dim that is split."""
    blocks: tuple[Block, ...]
    """What of it belongs to which unit, in order; together they cover the dim."""

    def spans(self, start_unit: int, stop_unit: int, units: int) -> tuple[Span, ...]:
        """Returns the runs of the dim that units [start_unit, stop_unit) use, one a block."""
        return tuple(block.span(start_unit, stop_unit, units) for block in self.blocks)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeAttribute:
    """An integer that the code between the matrices reads, and that is another on a rank which holds a part."""

    module: str
    """Dotted name of the module that has it, from the layer on; "" is the layer."""
    attribute: str
    """Its attribute; ``config.<name>`` for one that the module reads off its config."""
    scales_with: str
    """What it counts: the name of a `ParameterSplit` whose local share scales it; ``a/b``, the ratio of two shares;
    ``=a``, the local indices of one."""


class CuttingKind(Enum):
    """Where a tensor comes from that is whole on every rank."""

    OUTPUT = "output"
    """The output of a module that is computed whole."""
    GLOBAL_NORM = "global_norm"
    """The output of a norm over all units, whose inputs are all-gathered first."""
    ARGUMENT = "argument"
    """An argument that the group's module is called with."""
    BUFFER = "buffer"
    """A tensor that a module holds and doesn't train."""
    WIDTH = "hidden width"
    """The last dim of the hidden state, which the module's code reads and reshapes parts by; its numbers stay whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cutting:
    """A tensor that is whole where it comes from, and of which each rank takes what its units use."""

    kind: CuttingKind
    module: str
    """Dotted name of the module, from the layer on."""
    key: str = ""
    """Position or name of an argument, attribute of a buffer."""
    dim: int
    """The dim that is cut; it may hold the blocks several times over, one after the other."""
    blocks: tuple[Block, ...]
    """What of it belongs to which unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingGroup:
    """One unit of tensor parallelism inside a layer."""

    module: str
    """The smallest module that holds all of it but the row, from the layer on."""
    column_linears: tuple[str, ...]
    """Modules whose outputs are split."""
    column_inputs: tuple[str, ...]
    """Those columns whose input is equal on all ranks and enters the group there; for experts the module itself."""
    replicated_inputs: tuple[str, ...]
    """Modules that are computed whole and whose output enters the group: a key that all heads share."""
    row_linear: str
    """Module whose input is split; its output is a sum over the ranks. For experts, the module itself."""
    units: int
    """Parts that can't be divided further."""
    splits: tuple[ParameterSplit, ...]
    """Every parameter that is split: weights and biases of columns, the row's weight, and what lies between."""
    shared: tuple[str, ...] = ()
    """Parameters between columns and row that every unit uses: held whole, gradients summed over the ranks."""
    shape_attributes: tuple[ShapeAttribute, ...] = ()
    """Integers that the code between the matrices reads, to be set to the local sizes."""
    inner_row_linears: tuple[str, ...] = ()
    """Matrices between columns and row whose input is split and whose sum over the ranks goes back into the group."""
    side_row_linears: tuple[str, ...] = ()
    """Matrices called behind the row that read what it reads, and whose own sum leaves the group: of adapters."""
    cuttings: tuple[Cutting, ...] = ()
    """What lies between columns and row, isn't trained by units, and is cut as it passes."""
    heads: bool = False
    """Whether tokens meet between columns and row (attention, scans), so that it needs all tokens of a row."""

    @property
    def row_linears(self) -> tuple[str, ...]:
        """The row linear, and those beside it in the order of their calls."""
        return self.row_linear, *self.side_row_linears

    def shares(self, degree: int) -> tuple[tuple[int, int], ...] | None:
        """Returns the units of each index, (start, stop); None where the degree doesn't fit.

        Runs that several indices use must be used by equally many, whole: key heads fewer than ranks.
        """
        if degree > self.units:
            return None
        even = self.units % degree == 0
        # A norm over all units gathers its inputs, of which every rank must have an equal part of its own: not so where
        # neighbours share a key head.
        gathered_blocks = [
            block for cutting in self.cuttings if cutting.kind is CuttingKind.GLOBAL_NORM for block in cutting.blocks
        ]
        if gathered_blocks and (not even or any(block.count % degree for block in gathered_blocks)):
            return None
        block_lists = [split.blocks for split in self.splits] + [cutting.blocks for cutting in self.cuttings]
        for block in (block for blocks in block_lists for block in blocks if block.count != self.units):
            # 8 key heads over 16 ranks, or 8 over 4: fine. 8 over 3, or 3 over 8, would split or share unevenly.
            if not even or (block.count % degree and degree % block.count):
                return None
        # As even as can be; where units don't divide, the first ranks have one more.
        base, larger_shares = divmod(self.units, degree)
        edges = [index * base + min(index, larger_shares) for index in range(degree + 1)]
        return tuple(pairwise(edges))


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSharding:
    """How the layers of one kind are split: the groups of their matrices, and what stays whole."""

    groups: tuple[ShardingGroup, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    """Matrices that stay whole on every rank, and why."""
    faults: tuple[str, ...] = ()
    """Those of them that divide by their structure, but whose trial gave something else."""
    sequence: bool = True
    """Whether everything outside of the groups works token by token."""
    sequence_refused: str = ""
    """Why not, if not."""
    saves_after_sums: bool = False
    """Whether backward reads what follows the last row-parallel linear, so that recompute sends its sum again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingTable:
    """What to do with every weight of a model."""

    layers: Mapping[str, LayerSharding]
    """By layer name; layers of one kind share the object."""
    vocabulary: tuple[str, ...] = ()
    """Modules whose weight's dim 0 is the vocabulary: embedding and head."""
    vocab: int = 0
    """Rows of these."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """What outside of the layers stays whole, and why."""
    faults: tuple[str, ...] = ()
    """Those of them that divide by their structure, but whose trial gave something else."""
    headless: bool = False
    """Whether the head, unlike the embedding, stays whole."""

    def splits(self, degree: int) -> Iterator[tuple[str, ParameterSplit, tuple[tuple[int, int], ...], ShardingGroup]]:
        """Yields (layer, split, units of each index, group) of every parameter in the layers that a degree splits."""
        for layer, rows in self.layers.items():
            for group in rows.groups:
                shares = group.shares(degree)
                if shares is not None:
                    for split in group.splits:
                        yield layer, split, shares, group

    def without_experts(self, modules: Collection[str]) -> ShardingTable:
        """Returns the table without the groups of experts that another axis spreads.

        Args:
            modules: dotted names of those that hold experts; none leaves the table as it is.
        """
        if not modules:
            return self
        prefixes = tuple(f"{module}." for module in modules)
        layers = {
            name: dataclasses.replace(
                rows,
                groups=tuple(
                    group
                    for group in rows.groups
                    # stacked experts, whose group has no columns, or modules of a list
                    if group.column_linears and not f"{name}.{group.row_linear}".startswith(prefixes)
                ),
            )
            for name, rows in self.layers.items()
        }
        return dataclasses.replace(self, layers=layers)

    def reasons_whole(self, degree: int) -> dict[str, str]:
        """Returns why a degree leaves matrices whole on every rank: name to reason.

        Names in the layers are relative to their layer, each once, with the reason of the first layer that has one.
        """
        reasons = dict(self.refused)
        # Layers of one kind share their rows.
        for rows in {id(rows): rows for rows in self.layers.values()}.values():
            reasons |= {name: reason for name, reason in rows.refused.items() if name not in reasons}
            for group in rows.groups:
                if group.shares(degree) is None:
                    units = f"{group.units} heads" if group.heads else f"{group.units} units"
                    reason = f"its {units} can't be shared out over {degree} ranks"
                    reasons |= {name: reason for name in (*group.column_linears, *group.row_linears) if name}
        return reasons


def vocabulary_span(vocab: int, degree: int, index: int) -> Span:
    """Returns the run of the vocabulary that an index holds; where it doesn't divide the first ones hold one more."""
    base, larger_spans = divmod(vocab, degree)
    start = index * base + min(index, larger_spans)
    return start, start + base + (index < larger_spans)


def local_group(group: ShardingGroup, index: int, degree: int) -> ShardingGroup:
    """Returns a group as a rank of ``tp`` has it: its units alone."""
    shares = group.shares(degree) if degree > 1 else None
    if shares is None:
        return group
    start_unit, stop_unit = shares[index]
    splits = []
    for split in group.splits:
        blocks, local_start = [], 0
        for block in split.blocks:
            start, stop = block.span(start_unit, stop_unit, group.units)
            # Blocks follow one another in the local tensor, without the other ranks' indices between.
            blocks.append(Block(start=local_start, size=block.size, count=(stop - start) // block.size))
            local_start += stop - start
        splits.append(ParameterSplit(name=split.name, dim=split.dim, blocks=tuple(blocks)))
    return dataclasses.replace(group, units=stop_unit - start_unit, splits=tuple(splits))
