"""Finds the sharding groups of a traced layer, and the units (heads, channels) into which each group's work divides."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.models.analysis.evidence import Dependence, GroupEvidence, MatrixReads
from meshwright.models.analysis.expert_groups import expert_groups
from meshwright.models.analysis.trace import (
    LayerTrace,
    TracedMatrix,
    depends_on,
    elements_used,
    feature_dependence,
    mixes_tokens,
)
from meshwright.models.analysis.units import Blocks, blocks_of, finest_units, parameter_blocks, probes, unit_masks
from meshwright.spec.sharding_table import Block, Cutting, CuttingKind, ParameterSplit, ShardingGroup

DRAWS = 4
"""Largest number of random draws by which dependences are read: a unit that is zero depends on nothing."""
MIXED = "all that it reads is mixed before it, across heads and channels"


class SplitRefusal(Exception):
    """A reason for which a matrix can't be split, with the dependence that shows it."""

    def __init__(self, reason: str, dependence: Dependence | None = None) -> None:
        super().__init__(reason)
        self.dependence = dependence


@dataclass(frozen=True, slots=True)
class TracedGroups:
    """What a trace says of a layer's matrices."""

    matrices: tuple[MatrixReads, ...]
    """In order of their calls."""
    candidates: tuple[GroupEvidence, ...]
    """A record for each row linear and module of experts: a group without shape attributes, or its refusal."""
    refused: dict[str, str]
    """The reason for each matrix that is in no group."""


@dataclass(slots=True)
class Graph:
    """The data flow between a layer's matrices."""

    trace: LayerTrace
    rows: int
    matrices: dict[str, TracedMatrix]
    reads: dict[str, set[str]]
    """Matrices whose outputs reach a matrix's input past all others; "" is the layer's output."""
    reads_layer_input: dict[str, bool]
    """Whether it reads the layer's input past all matrices, or what isn't the batch's, such as a table of queries."""


def find_groups(trace: LayerTrace, rows: int) -> TracedGroups:
    """Returns the groups of a layer, without shape attributes, and the reason for each matrix that can't be split.

    Args:
        trace: of one layer.
        rows: B of the traced batch.
    """
    graph = _build_graph(trace, rows)
    # a matrix may belong to a group although it was refused as the row of another
    called_again = [name for name, matrix in trace.matrices.items() if matrix.calls > 1]
    refused = dict.fromkeys(called_again, "it is called several times in a step")
    candidates: list[GroupEvidence] = []
    for name, matrix in graph.matrices.items():
        if matrix.experts:
            candidates += [GroupEvidence(row_linear=name, group=group) for group in expert_groups(matrix)]
        elif graph.reads[name] and not graph.reads_layer_input[name]:
            if any(candidate.group and name in candidate.group.side_row_linears for candidate in candidates):
                continue
            try:
                group, dependence = _group_of_row(graph, name)
                candidates.append(GroupEvidence(row_linear=name, group=group, dependence=dependence))
            except SplitRefusal as refusal:
                refused[name] = str(refusal)
                candidates.append(GroupEvidence(row_linear=name, refusal=str(refusal), dependence=refusal.dependence))
    grouped = {name for candidate in candidates if candidate.group for name in matrix_names(candidate.group)}
    for name in graph.matrices:
        if name not in grouped:
            refused.setdefault(name, "what it reads and gives isn't shared out by heads or channels")
    ungrouped = {name: reason for name, reason in refused.items() if name not in grouped}
    return TracedGroups(tuple(_reads_of_matrices(graph)), tuple(candidates), ungrouped)


def matrix_names(group: ShardingGroup) -> tuple[str, ...]:
    """Returns the dotted names of a group's linears, column-parallel first."""
    return (*group.column_linears, *group.inner_row_linears, *group.row_linears)


def _reads_of_matrices(graph: Graph) -> Iterator[MatrixReads]:
    """Yields what the graph says of each matrix, those that are called several times too."""
    for name, matrix in graph.trace.matrices.items():
        yield MatrixReads(
            name=name,
            calls=matrix.calls,
            experts=matrix.experts,
            reads=tuple(source for source in graph.matrices if source in graph.reads.get(name, ())),
            reads_layer_input=graph.reads_layer_input.get(name, False),
            read_by=tuple(reader for reader in (*graph.matrices, "") if name in graph.reads.get(reader, ())),
        )


def _build_graph(trace: LayerTrace, rows: int) -> Graph:
    """Reads the data flow between matrices off autograd's graph, without matrices that are called more than once."""
    matrices = {name: matrix for name, matrix in trace.matrices.items() if matrix.calls == 1}
    matrix_names, leaves = list(matrices), [matrix.output for matrix in matrices.values()]
    reads: dict[str, set[str]] = {}
    reads_layer_input: dict[str, bool] = {}
    tokens = trace.inputs[0].shape[1] if trace.inputs and trace.inputs[0].dim() > 2 else 1
    for name, matrix in matrices.items():
        read_flags = depends_on(matrix.input, [*leaves, *trace.inputs])
        reads[name] = {source_name for source_name, is_read in zip(matrix_names, read_flags) if is_read}
        # an input of another leading shape (an expert's tokens, a query table) isn't the batch's
        is_of_batch = matrix.input.shape[0] in (rows, rows * tokens)
        reads_layer_input[name] = any(read_flags[len(matrix_names) :]) or not is_of_batch
    read_by_output = depends_on(trace.output, leaves) if trace.output is not None else [False] * len(matrix_names)
    reads[""] = {source_name for source_name, is_read in zip(matrix_names, read_by_output) if is_read}
    return Graph(trace, rows, matrices, reads, reads_layer_input)


def _group_of_row(graph: Graph, row: str) -> tuple[ShardingGroup, Dependence]:
    """Builds the group of the row-parallel linear ``row``, all from its columns to its input, and what shows its units.

    Raises:
        SplitRefusal: the trace shows no units, or readers outside of the group.
    """
    matrices, reads = graph.matrices, graph.reads
    target = matrices[row].input
    sources = [name for name in matrices if name in reads[row]]
    if stacks := [name.rpartition(".")[2] for name in sources if matrices[name].experts]:
        raise SplitRefusal(f"it reads what {stacks[0]} gives, whose weights are stacks of matrices")
    global_norms = _global_norms_between(graph, target, sources)
    dependence = _find_units(target, {name: matrices[name].output for name in sources} | global_norms, graph.rows)
    units, blocks_by_source = dependence.units, dependence.sources
    # sources with blocks are split by unit; the others feed every unit and stay replicated
    blocks = {name: source_block for name in sources if (source_block := blocks_by_source[name]) is not None}
    replicated = [name for name in sources if name not in blocks]
    # a replicated matrix between two split ones
    replicated += [
        read_name for name in blocks for read_name in reads[name] - set(sources) if reads[read_name] & blocks.keys()
    ]
    # reads another split matrix: row-parallel inside the group
    inner_rows = [name for name in (*blocks, *replicated) if reads[name] & (blocks.keys() - {name})]
    columns = tuple(name for name in blocks if name not in inner_rows)
    replicated = [name for name in dict.fromkeys(replicated) if name not in inner_rows]
    if not columns:
        raise SplitRefusal("nothing that it reads is split", dependence)
    column_inputs = _input_columns(graph, columns, {*replicated, *inner_rows})
    side_rows = _side_rows(graph, row, dependence)
    _refuse_outside_readers(graph, (row, *side_rows), columns, replicated, inner_rows)
    # the row's own split is first; others may refer to it by position
    row_blocks = (Block(start=0, size=target.shape[-1] // units, count=units),)
    splits = [_row_split(matrices[name], row_blocks) for name in (row, *side_rows)]
    splits += [_row_split(matrices[name], _inner_blocks(graph, name, columns, blocks, units)) for name in inner_rows]
    standalone_splits, shared = _split_standalone_parameters(graph, row, units, columns, column_inputs, global_norms)
    for name in columns:
        splits += _column_splits(matrices[name], blocks[name])
    split_inner = [name for name in inner_rows if name in blocks]
    cuttings = [Cutting(kind=CuttingKind.OUTPUT, module=name, dim=-1, blocks=blocks[name]) for name in split_inner]
    # a norm over all features needs its sum of squares reduced over the ranks
    for name in global_norms:
        if (norm_blocks := blocks_by_source[name]) is not None:
            cuttings.append(Cutting(kind=CuttingKind.GLOBAL_NORM, module=name, dim=-1, blocks=norm_blocks))
    group = ShardingGroup(
        module=_common_module([*columns, *replicated, *inner_rows]),
        column_linears=columns,
        column_inputs=column_inputs,
        replicated_inputs=tuple(replicated),
        row_linear=row,
        units=units,
        splits=(*splits[:1], *standalone_splits, *splits[1:]),
        shared=tuple(shared),
        inner_row_linears=tuple(inner_rows),
        side_row_linears=side_rows,
        cuttings=tuple(cuttings),
        heads=mixes_tokens(target, [matrices[name].output for name in sources], graph.rows),
    )
    standalone = dict.fromkeys(graph.trace.standalone_parameters(), "unread") | dict.fromkeys(shared, "shared")
    standalone |= {split.name: "units" for split in standalone_splits}
    return group, dataclasses.replace(dependence, mixes_tokens=group.heads, standalone=standalone)


def _side_rows(graph: Graph, row: str, dependence: Dependence) -> tuple[str, ...]:
    """Returns the matrices called behind a row linear that read what it reads, unit by unit, in order.

    An adapter beside a row-parallel matrix begins with one: x A, whose sum over the ranks is whole as that of x W.

    Args:
        graph: of the layer.
        row: name of the row linear.
        dependence: of its input.
    """
    names = list(graph.matrices)
    side_rows = []
    for name in names[names.index(row) + 1 :]:
        matrix = graph.matrices[name]
        if matrix.experts or graph.reads[name] != graph.reads[row] or graph.reads_layer_input[name]:
            continue
        sources = [source for source in names if source in graph.reads[name]]
        norms = _global_norms_between(graph, matrix.input, sources)
        try:
            found = _find_units(matrix.input, {key: graph.matrices[key].output for key in sources} | norms, graph.rows)
        except SplitRefusal:
            continue
        reads_alike = (found.features, found.units) == (dependence.features, dependence.units)
        if reads_alike and found.sources == dependence.sources:
            side_rows.append(name)
    return tuple(side_rows)


def _find_units(target: torch.Tensor, sources: Mapping[str, torch.Tensor], rows: int) -> Dependence:
    """Finds the finest units of a row linear's input features.

    Args:
        target: (B, S, F) or (B S, F) input of the row linear, in the graph.
        sources: (B, S, F') or (B S, F') leaves by name.
        rows: B.

    Raises:
        SplitRefusal: when every feature depends on all others.
    """
    features = target.shape[-1]
    matrices: list[torch.Tensor] = []
    for draw in range(DRAWS):
        # A unit whose activation is zero shows no dependence, so the union over several random draws is used.
        new_matrices = feature_dependence(target, list(sources.values()), rows, draw)
        previous, matrices = (
            matrices,
            [previous_matrix | new_matrix for previous_matrix, new_matrix in zip(matrices, new_matrices)]
            or new_matrices,
        )
        if (units_and_blocks := finest_units(features, matrices)) is not None:
            units, source_blocks = units_and_blocks
            return Dependence(features=features, units=units, draws=draw + 1, sources=dict(zip(sources, source_blocks)))
        # no new dependence, or everything depends on everything: more draws can't help
        unchanged = bool(previous) and all(torch.equal(*pair) for pair in zip(previous, matrices))
        if unchanged or all(bool(matrix.all()) for matrix in matrices):
            break
    mixed = Dependence(features=features, units=0, draws=draw + 1, sources=dict.fromkeys(sources))
    raise SplitRefusal(MIXED, mixed)


def _global_norms_between(graph: Graph, target: torch.Tensor, sources: Sequence[str]) -> dict[str, torch.Tensor]:
    """Returns the passed-through norms over all features that lie between the sources and the target, by name.

    Args:
        graph: of the layer.
        target: (B, S, F) or (B S, F), in the graph.
        sources: names of matrices.

    Returns:
        (B, S, F) or (B S, F) each.
    """
    passed_norms = graph.trace.passed_norms
    read_flags = depends_on(target, list(passed_norms.values())) if passed_norms else []
    source_outputs = [graph.matrices[name].output for name in sources]
    return {
        name: norm_output
        for (name, norm_output), is_read in zip(passed_norms.items(), read_flags)
        if is_read and any(depends_on(norm_output, source_outputs))
    }


def _input_columns(graph: Graph, column_names: tuple[str, ...], inside: set[str]) -> tuple[str, ...]:
    """Returns the columns whose input comes from outside of the group; others read replicated tensors inside it."""
    column_inputs = []
    for name in column_names:
        inside_reads = graph.reads[name] & inside
        if not inside_reads:
            column_inputs.append(name)
        elif graph.reads_layer_input[name] or graph.reads[name] - inside_reads:
            raise SplitRefusal(f"{name} reads both what is shared and what is not")
    return tuple(column_inputs)


def _refuse_outside_readers(
    graph: Graph, rows: Sequence[str], columns: Sequence[str], entries: Sequence[str], inner: Sequence[str]
) -> None:
    """Refuses a group of which a matrix is read by code outside the group."""
    for name in (*columns, *entries, *inner):
        outside_readers = {reader for reader, read_names in graph.reads.items() if name in read_names} - {
            *rows,
            *columns,
            *inner,
        }
        if outside_readers:
            readers = ", ".join(sorted(reader_name or "the layer's output" for reader_name in outside_readers))
            raise SplitRefusal(f"{name}, which it reads, is read by {readers} too")


def _inner_blocks(graph: Graph, name: str, columns: Sequence[str], blocks: dict[str, Blocks], units: int) -> Blocks:
    """Returns the input features of an inner row linear by unit, from the columns that they come from."""
    if graph.reads_layer_input[name] or graph.reads[name] - set(columns):
        raise SplitRefusal(f"{name}, which it reads, reads both what is split and what is not")
    read_columns = [column for column in columns if column in graph.reads[name]]
    column_outputs = [graph.matrices[column].output for column in read_columns]
    matrices = feature_dependence(graph.matrices[name].input, column_outputs, graph.rows)
    used_by_unit = torch.zeros(units, graph.matrices[name].input.shape[-1], dtype=torch.bool)
    for column, matrix in zip(read_columns, matrices):
        # (units, F): features that depend on any output of the unit's columns
        used_by_unit |= (unit_masks(blocks[column], units).float() @ matrix.float().T) > 0
    input_blocks = blocks_of(used_by_unit)
    if not input_blocks or any(block.count != units for block in input_blocks):
        raise SplitRefusal(f"{name}, which it reads, reads all of what is split")
    return input_blocks


def _split_standalone_parameters(
    graph: Graph,
    row: str,
    units: int,
    columns: Sequence[str],
    column_inputs: Sequence[str],
    global_norms: Collection[str],
) -> tuple[list[ParameterSplit], list[str]]:
    """Returns the splits of standalone parameters between columns and row, and the names of those that units share.

    Args:
        graph: of the layer.
        row: name of the row linear.
        units: number of units.
        columns: names of the column-parallel linears.
        column_inputs: those of them whose input comes from outside the group.
        global_norms: names of norms over all features.
    """
    standalone, target = graph.trace.standalone_parameters(), graph.matrices[row].input
    # a few runs of units suffice to see along which dim a parameter follows the units
    probe_count = probes(units)
    features_per_probe = target.shape[-1] // probe_count
    feature_runs = [(index * features_per_probe, (index + 1) * features_per_probe) for index in range(probe_count)]
    splits: list[ParameterSplit] = []
    shared = [name for name in standalone if name.rpartition(".")[0] in global_norms]
    for (name, _), masks in zip(standalone.items(), elements_used(target, list(standalone.values()), feature_runs)):
        if name in shared or not any(bool(mask.any()) for mask in masks):
            continue
        if (split_dim_and_blocks := parameter_blocks(masks, units)) is None:
            shared.append(name)
        else:
            splits.append(ParameterSplit(name=name, dim=split_dim_and_blocks[0], blocks=split_dim_and_blocks[1]))
    for column in columns:
        if column not in column_inputs:
            read_flags = depends_on(graph.matrices[column].input, list(standalone.values()))
            shared += [name for name, is_read in zip(standalone, read_flags) if is_read and name not in shared]
    return splits, shared


def _row_split(matrix: TracedMatrix, blocks: Blocks) -> ParameterSplit:
    """Returns the split of a row-parallel weight along its input features."""
    dim = 1 if isinstance(matrix.module, nn.Linear) else 0
    return ParameterSplit(name=f"{matrix.name}.weight", dim=dim, blocks=blocks)


def _column_splits(matrix: TracedMatrix, blocks: Blocks) -> list[ParameterSplit]:
    """Returns the splits of a column-parallel weight and its bias along their output features."""
    dim = 0 if isinstance(matrix.module, nn.Linear) else 1
    splits = [ParameterSplit(name=f"{matrix.name}.weight", dim=dim, blocks=blocks)]
    if getattr(matrix.module, "bias", None) is not None:
        splits.append(ParameterSplit(name=f"{matrix.name}.bias", dim=0, blocks=blocks))
    return splits


def _common_module(names: Sequence[str]) -> str:
    """Returns the dotted name of the smallest module that contains all of them."""
    module_paths = [name.split(".")[:-1] for name in names]
    common_path = []
    for level_names in zip(*module_paths):
        if len(set(level_names)) > 1:
            break
        common_path.append(level_names[0])
    return ".".join(common_path)
