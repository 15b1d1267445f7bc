"""Reads a model's sharding table off a small float64 clone.

The table is traced on the clone, every split is rehearsed there in threads, and the groups that pass are rescaled to
the model's sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from meshwright.autograd_helper import computed_by_helper
from meshwright.models.analysis.clone import ROWS, TOKENS, Clone, make_clone, train_frozen_layers, with_objective
from meshwright.models.analysis.evidence import GroupEvidence, LayerEvidence, ModelTrial, ShardingEvidence, SplitTrial
from meshwright.models.analysis.groups import find_groups, matrix_names
from meshwright.models.analysis.objective import Objective
from meshwright.models.analysis.outside_reads import unreadable_sharding
from meshwright.models.analysis.rehearsal import rehearse_layer, rehearse_model
from meshwright.models.analysis.rescale import rescale_group
from meshwright.models.analysis.saved_tensors import SavedCounts, count_saved_tensors, saves_after_sums
from meshwright.models.analysis.shape_attributes import fit_shape_attributes
from meshwright.models.analysis.trace import LayerTrace, trace
from meshwright.models.build import BuiltModel
from meshwright.parallel.tensor_hooks import object_hint
from meshwright.spec.sharding_override import apply_overrides
from meshwright.spec.sharding_table import CuttingKind, LayerSharding, ShardingGroup, ShardingTable


@dataclass(frozen=True, slots=True)
class ShardingAnalysis:
    """A model's sharding table, and the evidence by which it was decided."""

    table: ShardingTable
    evidence: ShardingEvidence


def sharding_table(
    built: BuiltModel, degree: int = 2, objective: Objective | None = None, narrow: int = 0
) -> ShardingTable:
    """Reads the sharding table of a model; arguments and errors are those of `analyse_sharding`."""
    return analyse_sharding(built, degree, objective, narrow).table


def overridden_table(built: BuiltModel, table: ShardingTable) -> ShardingTable:
    """Returns a model's sharding table under the rows of its ``model.sharding``, as a run applies it.

    Raises:
        ConfigError: for a row that the table doesn't allow.
    """
    if not built.config.sharding:
        return table
    names = [name for name, _ in built.module.named_parameters(remove_duplicate=False)]
    return apply_overrides(table, built.config.sharding, names)


@computed_by_helper
def analyse_sharding(
    built: BuiltModel, degree: int = 2, objective: Objective | None = None, narrow: int = 0
) -> ShardingAnalysis:
    """Reads the sharding table of a model, and keeps what it was decided by.

    Args:
        built: on meta; it stays unchanged.
        degree: number of ranks in each rehearsal of a group (2 where a group has fewer units).
        objective: the model's own loss, which is rehearsed too.
        narrow: elements of a head of a clone narrower than the model, whose table is rescaled as a large model's is;
            0 for the model's own sizes where it is small.

    Raises:
        ConfigError: when the model doesn't run on a small clone.
    """
    clone = with_objective(train_frozen_layers(make_clone(built, narrow=narrow)), objective)
    names = clone.structure.layers
    modules = {name: clone.module.get_submodule(name) for name in names}

    @cache
    # The trace through norms is needed only where a group is refused: at most one more forward for all layers.
    def trace_layers(pass_norms: bool) -> dict[str, LayerTrace]:
        with torch.enable_grad():
            return trace(modules, lambda: clone.run(documents=True), pass_norms)

    try:
        layer_traces = trace_layers(False)
    except Exception as error:
        raise unreadable_sharding(clone, TOKENS, built.config.name, error) from error
    saved_counts = count_saved_tensors(modules, lambda: clone.run(documents=True))
    read_by_kind: dict[Hashable, tuple[LayerSharding, LayerEvidence]] = {}
    layers: dict[str, LayerSharding] = {}
    evidence: dict[str, LayerEvidence] = {}
    for name in names:
        if name not in layer_traces:
            layers[name] = LayerSharding(groups=(), refused={"": "the layer isn't called"}, sequence=False)
            evidence[name] = LayerEvidence(layer=name)
            continue
        kind_key = _layer_kind_key(modules[name])
        # layers of one kind share one LayerSharding object; layer_kinds() relies on its identity
        if kind_key not in read_by_kind:
            read_by_kind[kind_key] = _read_layer_rows(layer_traces[name], trace_layers, saved_counts[name], degree)
        layers[name], evidence[name] = read_by_kind[kind_key]
    model_trials: list[ModelTrial] = []
    table = _add_vocabulary(clone, ShardingTable(layers=layers), model_trials)
    if not clone.full_size:
        table, evidence = _carry_to_full_size(table, evidence, clone, built)
    vocab_weights = {f"{name}.weight" for name in (clone.structure.embedding, clone.structure.head) if name}
    return ShardingAnalysis(
        table,
        ShardingEvidence(
            full_size=clone.full_size,
            parameters=sum(parameter.numel() for parameter in clone.module.parameters()),
            layers=evidence,
            model_trials=tuple(model_trials),
            tied=any(len(vocab_weights & set(names)) > 1 for names in clone.structure.ties),
        ),
    )


def _layer_kind_key(layer: nn.Module) -> Hashable:
    """Returns a key that is equal for layers of the same code and shapes; weights' values don't count."""
    parameter_shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    module_types = tuple(type(child) for child in layer.modules())
    attributes = tuple(
        sorted((key, str(value)) for key, value in vars(layer).items() if isinstance(value, (str, bool)))
    )
    return parameter_shapes, module_types, attributes


def _read_layer_rows(
    traced: LayerTrace, trace_layers: Callable[[bool], dict[str, LayerTrace]], saved_counts: SavedCounts, degree: int
) -> tuple[LayerSharding, LayerEvidence]:
    """Finds, adapts and rehearses the groups of one kind of layer.

    Args:
        traced: a layer of that kind.
        trace_layers: returns every layer's trace; with True, norms over all features are passed through.
        saved_counts: of the layer.
        degree: number of ranks in each rehearsal of a group.
    """
    evidence = LayerEvidence(
        layer=traced.name, shapes={name: tuple(item.shape) for name, item in traced.layer.named_parameters()}
    )
    if traced.output is None or not traced.inputs:
        hint = object_hint((*traced.args, *traced.kwargs.values()))
        refused = {"": f"the layer takes or gives no hidden state{hint}"}
        return LayerSharding(groups=(), refused=refused, sequence=False), evidence
    traced_groups = find_groups(traced, ROWS)
    attempt = _GroupTrials(traced, traced_groups.refused, degree)
    attempt.try_candidates(traced_groups.candidates)
    # Second attempt for refused matrices: a norm over all features hides the units, so trace with norms passed through
    # and give these norms a global reduction.
    if attempt.refused:
        attempt.try_candidates(
            [
                dataclasses.replace(candidate, through_norms=True)
                for candidate in find_groups(trace_layers(True)[traced.name], ROWS).candidates
                if candidate.group and any(item.kind is CuttingKind.GLOBAL_NORM for item in candidate.group.cuttings)
            ]
        )
    rows = LayerSharding(
        groups=tuple(attempt.accepted),
        refused=attempt.refused,
        faults=tuple(sorted(attempt.faults & attempt.refused.keys())),
    )
    trial = rehearse_layer(traced, rows, 2, sequence=True)
    rows = dataclasses.replace(rows, saves_after_sums=saves_after_sums(saved_counts, rows))
    return (
        dataclasses.replace(rows, sequence=not trial.failure, sequence_refused=trial.failure),
        dataclasses.replace(evidence, matrices=traced_groups.matrices, groups=tuple(attempt.evidence), sequence=trial),
    )


class _GroupTrials:
    """Tries the candidates of one layer, and keeps which groups work, why others don't, and the evidence.

    Args:
        traced: the layer.
        refused: the trace's reasons, by matrix; failures of trials are added, and groups that pass taken out.
        degree: number of ranks of a trial (2 where a group has fewer units).
    """

    def __init__(self, traced: LayerTrace, refused: dict[str, str], degree: int) -> None:
        self._traced, self._degree = traced, degree
        self.refused = refused
        self.accepted: list[ShardingGroup] = []
        self.faults: set[str] = set()
        self.evidence: list[GroupEvidence] = []

    def try_candidates(self, candidates: Sequence[GroupEvidence]) -> None:
        """Tries the candidates that have a group; one whose matrices are taken by a larger one is left out."""
        candidates = [self._without_computed(candidate) for candidate in candidates]
        self.evidence += [candidate for candidate in candidates if candidate.group is None]
        with_groups = [(candidate, candidate.group) for candidate in candidates if candidate.group is not None]
        # largest first, so that of two overlapping groups the one with more weights is accepted
        for candidate, group in sorted(with_groups, key=lambda pair: -_split_elements(self._traced, pair[1])):
            overlapping = [item for item in self.accepted if set(matrix_names(item)) & set(matrix_names(group))]
            if not overlapping:
                self._try_group(candidate, group)
            elif all(item.row_linear != group.row_linear for item in overlapping):
                self._leave_out(candidate, group, overlapping[0])
        for group in self.accepted:
            for name in matrix_names(group):
                self.refused.pop(name, None)

    def _without_computed(self, candidate: GroupEvidence) -> GroupEvidence:
        """Returns a candidate, without its group where a weight of it is computed and so has no rows to hold."""
        held = {name for name, _ in self._traced.layer.named_parameters(remove_duplicate=False)}
        names = [split.name for split in candidate.group.splits if split.name not in held] if candidate.group else []
        if candidate.group is None or not names:
            return candidate
        reason = f"{names[0]} is computed from other parameters, as by a parametrization, and has no rows"
        for name in matrix_names(candidate.group):
            self.refused.setdefault(name, reason)
        return dataclasses.replace(candidate, group=None, refusal=reason)

    def _leave_out(self, candidate: GroupEvidence, group: ShardingGroup, larger: ShardingGroup) -> None:
        """Records that a larger group has taken a matrix of a candidate."""
        taken = ", ".join(name for name in matrix_names(group) if name in matrix_names(larger))
        reason = f"{taken}, which it reads, is split with {larger.row_linear}, a group of more weights"
        self.refused.setdefault(group.row_linear, reason)
        self.evidence.append(dataclasses.replace(candidate, group=None, refusal=reason))

    def _try_group(self, candidate: GroupEvidence, group: ShardingGroup) -> None:
        """Rehearses one group under likely shape attributes until it passes."""
        # fewer units than ranks: rehearse at degree 2
        ranks = self._degree if group.shares(self._degree) is not None else 2
        trials: list[SplitTrial] = []

        def rehearse(adapted_group: ShardingGroup) -> str:
            if adapted_group.shares(ranks) is None:
                trials.append(SplitTrial(degree=ranks, failure=f"its {group.units} heads or channels don't divide"))
            else:
                trials.append(rehearse_layer(self._traced, LayerSharding(groups=(adapted_group,)), ranks))
            return trials[-1].failure

        working_group, reason = fit_shape_attributes(self._traced, group, rehearse)
        if working_group is not None:
            self.accepted.append(working_group)
        else:
            self.faults |= set(matrix_names(group))
            for name in matrix_names(group):
                self.refused.setdefault(name, _refusal_sentence(reason))
        self.evidence.append(dataclasses.replace(candidate, trials=tuple(trials), accepted=working_group))


def _split_elements(traced: LayerTrace, group: ShardingGroup) -> int:
    """Returns the number of parameters that a group splits: of two groups with one matrix, the larger wins."""
    return sum(traced.layer.get_parameter(split.name).numel() for split in group.splits)


def _refusal_sentence(reason: str) -> str:
    """Turns a failed rehearsal's message into a sentence about the rule that the layer's code breaks."""
    if " is off by " in reason:
        return (
            f"computed in parts it gives something else, so its code looks at more than one head or channel ({reason})"
        )
    if reason.startswith("its ") or reason.startswith("the ranks"):
        return reason
    return f"its code doesn't run on a part of the heads or channels ({reason})"


def _add_vocabulary(clone: Clone, table: ShardingTable, model_trials: list[ModelTrial]) -> ShardingTable:
    """Splits embedding and head by vocabulary, as far as the rehearsed model still matches the unsplit model.

    Args:
        clone: of the model.
        table: its layers' rows.
        model_trials: gets every trial, in order.
    """
    structure, vocab = clone.structure, clone.structure.vocab or 0
    vocab_names: list[str] = []
    computed: dict[str, str] = {}
    for name in filter(None, (structure.embedding, structure.head)):
        vocab_module = clone.module.get_submodule(name)
        if not isinstance(vocab_module, (nn.Embedding, nn.Linear)) or vocab_module.weight.shape[0] != vocab:
            continue
        if vocab_module._parameters.get("weight") is not None:
            vocab_names.append(name)
        else:
            computed[name] = "its weight is computed from other parameters, as by a parametrization, and has no rows"
    # in order of preference: both split, embedding alone, neither
    vocabulary_choices = (
        [tuple(vocab_names), tuple(vocab_names[:1]), ()] if structure.embedding and structure.head else [()]
    )
    tied = any(len({f"{name}.weight" for name in vocab_names} & set(group)) > 1 for group in structure.ties)
    # a tied weight can't be split in one module and whole in the other
    vocabulary_choices = [vocabulary for vocabulary in vocabulary_choices if not tied or len(vocabulary) != 1]
    first_failure = ""
    for vocabulary in dict.fromkeys(vocabulary_choices):
        candidate_table = dataclasses.replace(
            table, vocabulary=vocabulary, vocab=vocab, headless=structure.head not in vocabulary
        )
        failure = _try_model(clone, candidate_table, tuple(table.layers), model_trials)
        if not failure:
            refused_names = [name for name in vocab_names if name not in vocabulary]
            # Nothing was tried without either: code that multiplies by the embedding's weight has no head.
            reason = _vocabulary_refusal(first_failure) if first_failure else "the model's other end wasn't found"
            return dataclasses.replace(
                candidate_table, refused=computed | dict.fromkeys(refused_names, reason), faults=tuple(refused_names)
            )
        first_failure = first_failure or failure
    return _keep_working_layers(clone, table, first_failure, model_trials)


def _vocabulary_refusal(reason: str) -> str:
    """Turns a failed rehearsal's message about embedding and head into a sentence."""
    if reason.startswith(("its ", "the ")):
        return reason
    return f"the model's code doesn't run on logits of a part of the vocabulary, as a loss inside of it ({reason})"


def _try_model(clone: Clone, table: ShardingTable, layers: tuple[str, ...], model_trials: list[ModelTrial]) -> str:
    """Rehearses the model over two ranks and records the trial; returns its failure, "" for none."""
    trial = rehearse_model(clone, table, 2)
    model_trials.append(ModelTrial(vocabulary=table.vocabulary, layers=layers, trial=trial))
    return trial.failure


def _keep_working_layers(
    clone: Clone, table: ShardingTable, reason_all_split: str, model_trials: list[ModelTrial]
) -> ShardingTable:
    """Keeps the kinds of layers with which the split model matches the whole model; refuses the others by name.

    Args:
        clone: of the model.
        table: that doesn't match, without a vocabulary.
        reason_all_split: difference with all layers split.
        model_trials: gets every trial, in order.
    """
    # start from nothing split and add one kind of layer at a time
    layers = {
        name: LayerSharding(groups=(), refused={"": reason_all_split}, faults=("",), sequence=False)
        for name in table.layers
    }
    failures: list[str] = []
    for names in layer_kinds(table).values():
        candidate_table = ShardingTable(layers=layers | {name: table.layers[name] for name in names})
        if not any(rows.groups for rows in (table.layers[name] for name in names)):
            continue
        if failure := _try_model(clone, candidate_table, tuple(names), model_trials):
            failures.append(f"with {names[0]} split over 2 ranks {failure}")
            refused = dataclasses.replace(layers[names[0]], refused={"": failures[-1]})
            layers |= dict.fromkeys(names, refused)
        else:
            layers = dict(candidate_table.layers)
    reason = f"the model, split, isn't the model: {'; '.join(failures[:3]) or reason_all_split}"
    return ShardingTable(layers=layers, refused={"": reason}, faults=("",))


def _carry_to_full_size(
    table: ShardingTable, evidence: Mapping[str, LayerEvidence], clone: Clone, built: BuiltModel
) -> tuple[ShardingTable, dict[str, LayerEvidence]]:
    """Rescales a narrow clone's table to the model: heads grow in size, channels in number.

    Returns:
        The table of the model's layers, and the evidence of the clone's layer that each was read off.
    """
    clone_layers = {name: clone.module.get_submodule(name) for name in table.layers}
    # match by code and parameter names, not by index: the clone may have fewer layers
    name_by_kind = {_carry_key(clone_layer): name for name, clone_layer in clone_layers.items()}
    layers: dict[str, LayerSharding] = {}
    carried_evidence: dict[str, LayerEvidence] = {}
    for name in built.structure.layers:
        layer = built.module.get_submodule(name)
        clone_name = name_by_kind.get(_carry_key(layer))
        if clone_name is None:
            layers[name] = LayerSharding(
                groups=(), refused={"": "no layer of the small clone is like it"}, sequence=False
            )
            carried_evidence[name] = LayerEvidence(layer="")
            continue
        clone_layer, rows = clone_layers[clone_name], table.layers[clone_name]
        carried_evidence[name] = evidence[clone_name]
        groups, refused = [], dict(rows.refused)
        for group in rows.groups:
            rescaled_group = rescale_group(group, clone_layer, layer)
            if rescaled_group is not None:
                groups.append(rescaled_group)
            else:
                refused |= dict.fromkeys(matrix_names(group), "its parts don't grow alike with the model")
        layers[name] = dataclasses.replace(rows, groups=tuple(groups), refused=refused)
    return dataclasses.replace(table, layers=layers, vocab=built.structure.vocab or 0), carried_evidence


def _carry_key(layer: nn.Module) -> Hashable:
    """Returns a key that a clone's layer and the model's layer share: type, parameter names and their ranks."""
    return type(layer), tuple((name, parameter.dim()) for name, parameter in layer.named_parameters())


def layer_kinds(table: ShardingTable) -> Mapping[int, list[str]]:
    """Returns the names of layers that share rows, by the identity of these."""
    names_by_rows: dict[int, list[str]] = {}
    for name, rows in table.layers.items():
        names_by_rows.setdefault(id(rows), []).append(name)
    return names_by_rows
