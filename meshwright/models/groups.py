"""Finds the groups of matrices in a traced layer, and into which units their work divides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.models.trace import LayerTrace, TracedMatrix, dependence, mixes_tokens, reached, touched
from meshwright.models.units import Blocks, blocks_of, finest_units, parameter_blocks, probes, unit_masks
from meshwright.spec.sharding_table import Block, Cutting, ParameterSplit, ShardingGroup

ROUNDS = 4
"""Most times that dependences are read, with other numbers: where a unit is zero it depends on nothing."""
MEET = "everything that it reads meets before it"


class SplitRefusal(Exception):
    """Why a matrix stays whole."""


@dataclass(slots=True)
class Graph:
    """What each matrix of a layer reads."""

    trace: LayerTrace
    rows: int
    cuts: dict[str, TracedMatrix]
    needs: dict[str, set[str]]
    """Matrices that a matrix reads directly; "" is the layer's output."""
    outside: dict[str, bool]
    """Whether it reads something that comes from no matrix of the layer."""


def find_groups(trace: LayerTrace, rows: int) -> tuple[list[ShardingGroup], dict[str, str]]:
    """Returns the groups of a layer, without numbers, and why other matrices stay whole.

    Args:
        trace: of one layer.
        rows: B of the traced batch.
    """
    graph = _graph(trace, rows)
    refused = {name: "it is called several times in a step" for name, cut in trace.cuts.items() if cut.calls > 1}
    groups: list[ShardingGroup] = []
    for name, cut in graph.cuts.items():
        if cut.experts:
            groups.extend(expert_groups(cut))
        elif graph.needs[name] and not graph.outside[name]:
            try:
                groups.append(_group(graph, name))
            except SplitRefusal as refusal:
                refused[name] = str(refusal)
    used = {name for group in groups for name in (*group.column_linears, *group.inner_row_linears, group.row_linear)}
    for name in graph.cuts:
        if name not in used:
            refused.setdefault(name, "what it reads and gives isn't shared out by heads or channels")
    return groups, {name: why for name, why in refused.items() if name not in used}


def _graph(trace: LayerTrace, rows: int) -> Graph:
    cuts = {name: cut for name, cut in trace.cuts.items() if cut.calls == 1}
    names, leaves = list(cuts), [cut.output for cut in cuts.values()]
    needs: dict[str, set[str]] = {}
    outside: dict[str, bool] = {}
    tokens = trace.inputs[0].shape[1] if trace.inputs and trace.inputs[0].dim() > 2 else 1
    for name, cut in cuts.items():
        hits = reached(cut.input, [*leaves, *trace.inputs])
        needs[name] = {other for other, hit in zip(names, hits) if hit}
        outside[name] = any(hits[len(names) :]) or cut.input.shape[0] not in (rows, rows * tokens)
    last = reached(trace.output, leaves) if trace.output is not None else [False] * len(names)
    needs[""] = {other for other, hit in zip(names, last) if hit}
    return Graph(trace, rows, cuts, needs, outside)


def _group(graph: Graph, row: str) -> ShardingGroup:
    """The group whose results a matrix brings back."""
    cuts, needs = graph.cuts, graph.needs
    target = cuts[row].input
    sources = [name for name in cuts if name in needs[row]]
    if any(cuts[name].experts for name in sources):
        raise SplitRefusal("it reads experts' outputs")
    meetings = _meetings(graph, target, sources)
    units, found = _units(target, [cuts[name].output for name in sources] + list(meetings.values()), graph.rows)
    held = dict(zip([*sources, *meetings], found))
    blocks = {name: item for name in sources if (item := held[name]) is not None}
    entries = [name for name in sources if name not in blocks]
    entries += [other for name in blocks for other in needs[name] - set(sources) if needs[other] & blocks.keys()]
    inner = [name for name in (*blocks, *entries) if needs[name] & (blocks.keys() - {name})]
    columns = tuple(name for name in blocks if name not in inner)
    entries = [name for name in dict.fromkeys(entries) if name not in inner]
    if not columns:
        raise SplitRefusal("nothing that it reads is split")
    inlets = _inlets(graph, columns, {*entries, *inner})
    _check_readers(graph, row, columns, entries, inner)
    splits = [_row_split(cuts[row], (Block(start=0, size=target.shape[-1] // units, count=units),))]
    for name in inner:
        splits.append(_row_split(cuts[name], _inner_blocks(graph, name, columns, blocks, units)))
    between, shared = _loose(graph, target, units, columns, inlets, list(meetings))
    for name in columns:
        splits += _column_splits(cuts[name], blocks[name])
    cuttings = [Cutting(kind="output", module=name, dim=-1, blocks=blocks[name]) for name in inner if name in blocks]
    for name in meetings:
        if held[name] is not None:
            cuttings.append(Cutting(kind="meeting", module=name, dim=-1, blocks=held[name] or ()))
    return ShardingGroup(
        module=_common([*columns, *entries, *inner]),
        column_linears=columns,
        column_inputs=inlets,
        replicated_inputs=tuple(entries),
        row_linear=row,
        units=units,
        splits=(*splits[:1], *between, *splits[1:]),
        shared=tuple(shared),
        inner_row_linears=tuple(inner),
        cuttings=tuple(cuttings),
        heads=mixes_tokens(target, [cuts[name].output for name in sources], graph.rows),
    )


def _units(target: torch.Tensor, sources: Sequence[torch.Tensor], rows: int) -> tuple[int, list[Blocks | None]]:
    matrices: list[torch.Tensor] = []
    for number in range(ROUNDS):
        more = dependence(target, sources, rows, number)
        before, matrices = matrices, [old | new for old, new in zip(matrices, more)] or more
        if (found := finest_units(target.shape[-1], matrices)) is not None:
            return found
        same = bool(before) and all(torch.equal(*pair) for pair in zip(before, matrices))
        if same or all(bool(matrix.all()) for matrix in matrices):
            break
    raise SplitRefusal(MEET)


def _meetings(graph: Graph, target: torch.Tensor, sources: Sequence[str]) -> dict[str, torch.Tensor]:
    """Modules between the sources and the target that were opened: each once looks at all units."""
    opened = graph.trace.opened
    hits = reached(target, list(opened.values())) if opened else []
    leaves = [graph.cuts[name].output for name in sources]
    return {name: item for (name, item), hit in zip(opened.items(), hits) if hit and any(reached(item, leaves))}


def _inlets(graph: Graph, columns: tuple[str, ...], inside: set[str]) -> tuple[str, ...]:
    """Columns whose input enters the group; the others read what is shared inside it alone."""
    found = []
    for name in columns:
        within = graph.needs[name] & inside
        if not within:
            found.append(name)
        elif graph.outside[name] or graph.needs[name] - within:
            raise SplitRefusal(f"{name} reads both what is shared and what is not")
    return tuple(found)


def _check_readers(
    graph: Graph, row: str, columns: Sequence[str], entries: Sequence[str], inner: Sequence[str]
) -> None:
    for name in (*columns, *entries, *inner):
        others = {reader for reader, read in graph.needs.items() if name in read} - {row, *columns, *inner}
        if others:
            readers = ", ".join(sorted(other or "the layer's output" for other in others))
            raise SplitRefusal(f"{name}, which it reads, is read by {readers} too")


def _inner_blocks(graph: Graph, name: str, columns: Sequence[str], blocks: dict[str, Blocks], units: int) -> Blocks:
    """Which of an inner matrix's input features belong to which unit, by the columns that they come from."""
    if graph.outside[name] or graph.needs[name] - set(columns):
        raise SplitRefusal(f"{name}, which it reads, reads both what is split and what is not")
    read = [other for other in columns if other in graph.needs[name]]
    matrices = dependence(graph.cuts[name].input, [graph.cuts[other].output for other in read], graph.rows)
    uses = torch.zeros(units, graph.cuts[name].input.shape[-1], dtype=torch.bool)
    for other, matrix in zip(read, matrices):
        uses |= (unit_masks(blocks[other], units).float() @ matrix.float().T) > 0
    found = blocks_of(uses)
    if not found or any(block.count != units for block in found):
        raise SplitRefusal(f"{name}, which it reads, reads all of what is split")
    return found


def _loose(
    graph: Graph, target: torch.Tensor, units: int, columns: Sequence[str], inlets: Sequence[str], meetings: list[str]
) -> tuple[list[ParameterSplit], list[str]]:
    """Splits of the parameters that lie between columns and row, and those that every unit shares."""
    loose = graph.trace.loose()
    number = probes(units)
    step = target.shape[-1] // number
    runs = [(index * step, (index + 1) * step) for index in range(number)]
    splits: list[ParameterSplit] = []
    shared = [name for name in loose if name.rpartition(".")[0] in meetings]
    for (name, _), masks in zip(loose.items(), touched(target, list(loose.values()), runs)):
        if name in shared or not any(bool(mask.any()) for mask in masks):
            continue
        if (found := parameter_blocks(masks, units)) is None:
            shared.append(name)
        else:
            splits.append(ParameterSplit(name=name, dim=found[0], blocks=found[1]))
    for column in columns:
        if column not in inlets:
            hits = reached(graph.cuts[column].input, list(loose.values()))
            shared += [name for name, hit in zip(loose, hits) if hit and name not in shared]
    return splits, shared


def _row_split(cut: TracedMatrix, blocks: Blocks) -> ParameterSplit:
    dim = 1 if isinstance(cut.module, nn.Linear) else 0
    return ParameterSplit(name=f"{cut.name}.weight", dim=dim, blocks=blocks)


def _column_splits(cut: TracedMatrix, blocks: Blocks) -> list[ParameterSplit]:
    dim = 0 if isinstance(cut.module, nn.Linear) else 1
    found = [ParameterSplit(name=f"{cut.name}.weight", dim=dim, blocks=blocks)]
    if getattr(cut.module, "bias", None) is not None:
        found.append(ParameterSplit(name=f"{cut.name}.bias", dim=0, blocks=blocks))
    return found


def expert_groups(cut: TracedMatrix) -> Iterator[ShardingGroup]:
    """Yields ways in which stacked experts could be split by channel; a rehearsal tells which is right."""
    width = cut.input.shape[-1]
    stacked = {name: item for name, item in cut.module._parameters.items() if item is not None and item.dim() >= 2}
    matrices = {name: item for name, item in stacked.items() if item.dim() == 3}
    inner = {name: _inner(cut.module, item, width) for name, item in matrices.items()}
    if any(dim is None for dim in inner.values()):
        return
    channels = min(item.shape[inner[name] or 0] for name, item in matrices.items())
    for together in (True, False):
        splits = []
        for name, item in stacked.items():
            dim = inner.get(name, 1)
            assert dim is not None
            size = item.shape[dim]
            if name not in inner and (size == width or size % channels):
                continue  # a bias of the output: whole
            blocks: Blocks = (Block(start=0, size=size // channels, count=channels),)
            if together:
                blocks = tuple(Block(start=at, size=1, count=channels) for at in range(0, size, channels))
            splits.append(ParameterSplit(name=f"{cut.name}.{name}", dim=dim, blocks=blocks))
        yield ShardingGroup(
            module=cut.name,
            column_linears=(),
            column_inputs=(cut.name,),
            replicated_inputs=(),
            row_linear=cut.name,
            units=channels,
            splits=tuple(splits),
        )


def _inner(module: nn.Module, item: torch.Tensor, width: int) -> int | None:
    """The dim of stacked matrices (X, a, b) that isn't the model's width."""
    dims = [dim for dim in (1, 2) if item.shape[dim] != width]
    if len(dims) == 1:
        return dims[0]
    if dims:
        return None
    return 1 if bool(getattr(module, "is_transposed", False)) else 2


def _common(names: Sequence[str]) -> str:
    """The dotted name of the smallest module that holds all of them."""
    parts = [name.split(".")[:-1] for name in names]
    shared = []
    for keys in zip(*parts):
        if len(set(keys)) > 1:
            break
        shared.append(keys[0])
    return ".".join(shared)
