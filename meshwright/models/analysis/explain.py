"""Explains the decisions on one layer's weights by the evidence that the analysis used, weight by weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwright.models.analysis.evidence import (
    GroupEvidence,
    LayerEvidence,
    MatrixReads,
    Shape,
    ShardingEvidence,
    SplitTrial,
)
from meshwright.models.analysis.groups import matrix_names
from meshwright.spec.experts import LayerExperts
from meshwright.spec.sharding_table import (
    Block,
    LayerSharding,
    ParameterSplit,
    ShardingGroup,
    ShardingTable,
    vocabulary_span,
)

SPLITS = ("column", "row", "units", "expert channels", "vocabulary", "shared", "replicated")
"""What `tp` does to a weight. ``units``: a parameter between column and row linears that belongs to heads or channels;
``shared``: one of which every unit uses all; ``replicated``: one outside of every group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightExplanation:
    """The decision on one weight, and the evidence for it."""

    name: str
    """In the model."""
    shape: Shape
    """Of the model's weight."""
    split: str
    """One of `SPLITS`."""
    dim: int | None = None
    """The dim that is split; None where the weight stays whole."""
    units: str = ""
    """What the dim consists of: ``32 heads``; "" where the weight stays whole."""
    local_shapes: tuple[Shape, ...] = ()
    """Shape on each rank under the degree of the explanation."""
    row_linear: str = ""
    """The row linear of its group, after which partial sums are added up; "" outside of groups."""
    evidence: tuple[str, ...] = ()
    """Facts of the trace and results of trials, in the order in which they decided."""
    prevents: str = ""
    """The rule that keeps the weight whole; "" for one that is split."""
    expert_axis: str = ""
    """What ``ep`` does to it; "" for a weight that isn't an expert's."""


def explain_weights(
    names: Mapping[str, Shape],
    layer: str,
    table: ShardingTable,
    evidence: ShardingEvidence,
    experts: Sequence[LayerExperts],
    degree: int,
) -> list[WeightExplanation]:
    """Explains the split of each weight of a layer.

    Args:
        names: shape of each weight of the model below the layer, by full name.
        layer: name of the layer.
        table: the model's, which the runtime applies.
        evidence: what the table was decided by.
        experts: the model's experts.
        degree: of ``tp``, for the shapes on its ranks.
    """
    rows, layer_evidence = table.layers[layer], evidence.layers[layer]
    explained = []
    for name, shape in names.items():
        local_name = name.removeprefix(f"{layer}.")
        explained.append(_explain_weight(name, local_name, shape, rows, layer_evidence, degree))
    return [_with_expert_axis(item, experts) for item in explained]


def _explain_weight(
    name: str, local_name: str, shape: Shape, rows: LayerSharding, evidence: LayerEvidence, degree: int
) -> WeightExplanation:
    """Explains one weight by the group that splits or shares it, else by what keeps it whole."""
    for group in rows.groups:
        split = next((split for split in group.splits if split.name == local_name), None)
        group_evidence = evidence.group_of(group.row_linear)
        if split is not None:
            return WeightExplanation(
                name=name,
                shape=shape,
                split=_role(group, local_name),
                dim=split.dim,
                units=_runs_text(group, split),
                local_shapes=_local_shapes(group, split, shape, degree),
                row_linear=group.row_linear,
                evidence=tuple(_split_evidence(group, split, shape, evidence, group_evidence)),
            )
        if local_name in group.shared:
            return WeightExplanation(
                name=name,
                shape=shape,
                split="shared",
                local_shapes=(shape,) * degree,
                row_linear=group.row_linear,
                evidence=(
                    f"trace: every one of the {_units_text(group)} of {group.row_linear} uses all of it",
                    "so each rank's gradient is a partial sum, added up over tp after backward",
                ),
                prevents="a parameter of which every unit uses all can't be divided by units",
            )
    prevents, reasons = _whole_reasons(local_name, rows, evidence)
    return WeightExplanation(
        name=name,
        shape=shape,
        split="replicated",
        local_shapes=(shape,) * degree,
        evidence=tuple(reasons),
        prevents=prevents,
    )


def _role(group: ShardingGroup, local_name: str) -> str:
    """Returns what a group does to one of the parameters that it splits."""
    module = local_name.rpartition(".")[0]
    if not group.column_linears:
        return "expert channels"
    if module in group.column_linears:
        return "column"
    return "row" if module in (*group.row_linears, *group.inner_row_linears) else "units"


def _units_text(group: ShardingGroup) -> str:
    """Returns ``32 heads`` or ``128 channels``."""
    return f"{group.units} {'heads' if group.heads else 'channels'}"


def _runs_text(group: ShardingGroup, split: ParameterSplit) -> str:
    """Returns what a split dim consists of: its units, or the runs that several units share."""
    counts = sorted({block.count for block in split.blocks})
    shared = [f"{count} runs, each shared by {group.units // count} of {_units_text(group)}" for count in counts[:-1]]
    if counts[-1] < group.units:
        return f"{counts[-1]} runs, each shared by {group.units // counts[-1]} of {_units_text(group)}"
    return " and ".join([_units_text(group), *shared])


def _local_shapes(group: ShardingGroup, split: ParameterSplit, shape: Shape, degree: int) -> tuple[Shape, ...]:
    """Returns a parameter's shape on each rank; the full shape where the degree doesn't fit the group."""
    shares = group.shares(degree)
    if shares is None:
        return (shape,) * degree
    dim = split.dim % len(shape)
    return tuple(
        (*shape[:dim], sum(stop - start for start, stop in split.spans(*units, group.units)), *shape[dim + 1 :])
        for units in shares
    )


def _split_evidence(
    group: ShardingGroup,
    split: ParameterSplit,
    shape: Shape,
    layer: LayerEvidence,
    evidence: GroupEvidence | None,
) -> Iterator[str]:
    """Yields why a group splits a parameter: dependence, company, trial, sum."""
    if evidence is None:
        yield "no evidence: the group was stated by the user, not read off the model"
        return
    module, role = split.name.rpartition(".")[0], _role(group, split.name)
    if evidence.dependence is not None:
        yield from _dependence_evidence(evidence, module, role)
    else:
        yield (
            f"shape: {split.name} stacks one matrix an expert, and its dim {split.dim} isn't the layer's width: the "
            "channels between its products"
        )
    if role == "column":
        yield _company_of(module, group, layer)
    yield from _trial_evidence(evidence, split.name)
    clone_shape = layer.shapes.get(split.name, shape)
    if clone_shape != shape:
        yield f"scaled: read off a narrower clone, where it is {clone_shape}; {_growth_text(group)}"
    if role == "row":
        bias = ", before its bias" if f"{module}.bias" in layer.shapes else ""
        yield f"so {module} gives a partial sum on each rank, added up over tp right after it{bias}"


def _dependence_evidence(evidence: GroupEvidence, module: str, role: str) -> Iterator[str]:
    """Yields what autograd's graph shows of a row linear's input."""
    facts = evidence.dependence
    assert facts is not None
    draws = f"{facts.draws} random draw{'s' if facts.draws > 1 else ''}"
    kind = "heads, since tokens meet in them" if facts.mixes_tokens else "channels, since tokens stay apart"
    norms = ", with norms over all features passed through" if evidence.through_norms else ""
    head = f"trace: the {facts.features} input features of {evidence.row_linear} are {facts.units} {kind}"
    blocks = facts.sources.get(module)
    if role == "column" and blocks:
        yield f"{head}: each depends on {_blocks_text(blocks, facts.units)} outputs of {module} alone ({draws}{norms})"
        return
    sources = ", ".join(
        f"{name} ({_blocks_text(source_blocks, facts.units)})" if source_blocks else f"{name} (all of it)"
        for name, source_blocks in facts.sources.items()
    )
    yield f"{head}: each depends on its own run of {sources} ({draws}{norms})"


def _blocks_text(blocks: Sequence[Block], units: int) -> str:
    """Returns a unit's share of a source in words."""
    texts = []
    for block in blocks:
        sharing = f" (shared by {units // block.count} neighbours)" if block.count < units else ""
        texts.append(f"{block.size} of {block.count * block.size}{sharing}")
    # fused matrices, such as q, k and v in one, have a run of each
    counts = {text: texts.count(text) for text in texts}
    return " and ".join(f"{count} times {text}" if count > 1 else text for text, count in counts.items())


def _company_of(module: str, group: ShardingGroup, layer: LayerEvidence) -> str:
    """Returns which matrices a column linear is split together with, and the reads that tie them."""
    others = [name for name in (*group.column_linears, *group.inner_row_linears) if name != module]
    reads = next((matrix for matrix in layer.matrices if matrix.name == module), None)
    readers = _names(reads.read_by) if reads else group.row_linear
    together = f", together with {_names(others)}" if others else ""
    return f"trace: its output reaches {readers} and no other matrix{together}, so it is split with {group.row_linear}"


def _names(names: Sequence[str]) -> str:
    """Returns names in one phrase; "" is the layer's output."""
    return ", ".join(name or "the layer's output" for name in names)


def _trial_evidence(evidence: GroupEvidence, parameter: str) -> Iterator[str]:
    """Yields the trial that passed, what it changed on a rank, and what failed without that."""
    passed = next((trial for trial in reversed(evidence.trials) if not trial.failure and _fits(trial, evidence)), None)
    if passed is None:
        return
    change = ""
    if parameter in passed.parameters:
        full, local = passed.parameters[parameter]
        change = f" with {parameter} {full} -> {local}"
    yield (
        f"trial: split over {passed.degree} threads{change}, the layer gives the unsplit layer's output and every "
        f"gradient, off by at most {passed.error:.0e}"
    )
    first_failure = next((trial.failure for trial in evidence.trials if trial.failure), "")
    for name, (full_value, local_value) in passed.attributes.items():
        yield f"trial: its code reads {name}, {full_value} -> {local_value} on a rank; without that: {first_failure}"
    for cutting in passed.cuttings:
        subject = f"{cutting.kind.value} {cutting.key or ''} of {cutting.module or 'the layer'}".replace("  ", " ")
        yield f"trial: {subject} is cut to the rank's units along dim {cutting.dim}"


def _fits(trial: SplitTrial, evidence: GroupEvidence) -> bool:
    """Returns whether a trial was of the group that was accepted."""
    group = evidence.accepted
    return group is not None and trial.numbers == group.shape_attributes and trial.cuttings == group.cuttings


def _growth_text(group: ShardingGroup) -> str:
    """Returns how a group of a clone was carried to the model's sizes."""
    return "its heads keep their number and widen" if group.heads else "its channels keep their size and multiply"


def _whole_reasons(local_name: str, rows: LayerSharding, evidence: LayerEvidence) -> tuple[str, list[str]]:
    """Returns the rule that keeps a weight whole, and the facts behind it."""
    module, _, attribute = local_name.rpartition(".")
    for group in rows.groups:
        if module == group.row_linear and attribute == "bias":
            return "it is added once, to the sum", [f"{module} gives partial sums; each rank adds the bias after them"]
        if module in group.replicated_inputs:
            return (
                "every unit reads all of its output",
                [f"trace: all {_units_text(group)} of {group.row_linear} depend on all of it: each rank computes it"],
            )
    refusal = rows.refused.get(module) or rows.refused.get("", "")
    reads = next((matrix for matrix in evidence.matrices if matrix.name == module), None)
    if reads is None and module not in rows.refused:
        rule = refusal or "it lies outside of all groups: each rank computes it on all features of its tokens"
        without_read = [
            item.row_linear
            for item in evidence.groups
            if item.dependence is not None and item.dependence.standalone.get(local_name) == "unread"
        ]
        fact = f"trace: the input of {_names(without_read)} depends on it through other matrices alone"
        return rule, [fact] if without_read else []
    return refusal, list(_refusal_facts(module, reads, evidence))


def _refusal_facts(module: str, reads: MatrixReads | None, evidence: LayerEvidence) -> Iterator[str]:
    """Yields what the trace and the trials showed of a matrix that stays whole."""
    if reads is not None:
        sources = [*reads.reads, *(["the layer's input"] if reads.reads_layer_input else [])]
        yield f"trace: it reads {_names(sources) or 'nothing'}, and is read by {_names(reads.read_by) or 'nothing'}"
        if reads.calls > 1:
            yield f"trace: it is called {reads.calls} times in one forward"
    for item in evidence.groups:
        facts = item.dependence
        if item.group is None and item.row_linear == module:
            if facts is not None and not facts.units:
                yield (
                    f"trace: every one of its {facts.features} input features depends on all of "
                    f"{_names(tuple(facts.sources))} ({facts.draws} random draws): no two ranks could share them"
                )
            else:
                yield f"trace: as a row linear it is refused: {item.refusal}"
        elif item.group is not None and item.accepted is None and module in matrix_names(item.group):
            failures = list(dict.fromkeys(trial.failure for trial in item.trials))
            yield (
                f"trial: by {_units_text(item.group)} with {_names(matrix_names(item.group))}, {len(item.trials)} "
                f"attempts failed; the first: {failures[0] if failures else item.refusal}"
            )


def _with_expert_axis(item: WeightExplanation, experts: Sequence[LayerExperts]) -> WeightExplanation:
    """Adds what ``ep`` does to a weight of experts."""
    for rows in experts:
        name = item.name.removeprefix(f"{rows.module}.")
        if name != item.name and name in rows.parameters:
            text = f"dim 0 is {rows.experts} experts, counted by {', '.join(rows.counts)}"
            if rows.children:
                text = f"of expert {rows.expert_of(name)}, one of {rows.experts} in a list that {rows.caller} calls"
            return dataclasses.replace(item, expert_axis=f"{text}; each rank gets some of them, undivided")
    return item


def explain_vocabulary(
    names: Mapping[str, Shape], module: str, table: ShardingTable, evidence: ShardingEvidence, degree: int
) -> list[WeightExplanation]:
    """Explains the weights of a module outside of the layers: an embedding, a head or a norm.

    Args:
        names: shape of each of its weights by full name.
        module: its name.
        table: the model's.
        evidence: what the table was decided by.
        degree: of ``tp``.
    """
    return [_explain_outer_weight(name, shape, module, table, evidence, degree) for name, shape in names.items()]


def _explain_outer_weight(
    name: str, shape: Shape, module: str, table: ShardingTable, evidence: ShardingEvidence, degree: int
) -> WeightExplanation:
    """Explains one weight outside of the layers."""
    owner = name.rpartition(".")[0]
    tried = [item for item in evidence.model_trials if owner in item.vocabulary]
    facts = [_model_trial_text(item.vocabulary, item.trial) for item in tried]
    if evidence.tied:
        facts.append("structure: embedding and head are one weight, so they are split together or not at all")
    if owner in table.vocabulary:
        spans = [vocabulary_span(table.vocab, degree, index) for index in range(degree)]
        return WeightExplanation(
            name=name,
            shape=shape,
            split="vocabulary",
            dim=0,
            units=f"{table.vocab} tokens",
            local_shapes=tuple((stop - start, *shape[1:]) for start, stop in spans),
            evidence=(f"structure: its dim 0 is the vocabulary of {table.vocab}", *facts),
        )
    refusal = table.refused.get(owner) or table.refused.get("", "")
    rule = refusal or "only a table over the vocabulary is split outside of the layers"
    return WeightExplanation(
        name=name,
        shape=shape,
        split="replicated",
        local_shapes=(shape,) * degree,
        evidence=tuple(facts),
        prevents=rule,
    )


def _model_trial_text(vocabulary: Sequence[str], trial: SplitTrial) -> str:
    """Returns a trial of the model in words."""
    subject = f"trial: with {_names(vocabulary)} split by vocabulary over {trial.degree} threads, the model"
    if trial.failure:
        return f"{subject} isn't the unsplit one: {trial.failure}"
    return f"{subject} gives the unsplit logits and every gradient, off by at most {trial.error:.0e}"
