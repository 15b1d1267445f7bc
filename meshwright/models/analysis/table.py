"""Reads a model's sharding table off a small float64 clone.

The table is traced on the clone, every split is rehearsed there in threads, and the groups that pass are rescaled to
the model's sizes.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from meshwright.autograd_helper import computed_by_helper
from meshwright.errors import ConfigError
from meshwright.models.analysis.clone import narrowed, with_windows
from meshwright.models.analysis.groups import find_groups
from meshwright.models.analysis.objective import Objective, nothing_dropped, trial_output
from meshwright.models.analysis.rescale import rescale_group
from meshwright.models.analysis.shape_attributes import find_numbers
from meshwright.models.analysis.trace import LayerTrace, trace
from meshwright.models.analysis.trial import TOKENS, rehearse_layer, rehearse_model
from meshwright.models.build import BuiltModel, build_meta, use_float64
from meshwright.models.deferred import retie
from meshwright.models.forward import model_output
from meshwright.models.structure import ModelStructure
from meshwright.parallel.float64_ops import Float64Ops
from meshwright.spec.sharding_table import LayerRows, ShardingGroup, ShardingTable

SMALL = 1 << 24
"""Parameters up to which a model is its own clone."""
ROWS = 32
"""Rows of the clone's batch."""
CONTEXT = 64
"""Longest sequence of a smaller clone in tokens."""


@dataclass(frozen=True, slots=True)
class Clone:
    """A small real model in float64, of the same architecture: what traces and rehearsals run."""

    module: nn.Module
    structure: ModelStructure
    vocab: int
    full_size: bool
    """Whether its sizes are the model's."""
    objective: Objective = field(default_factory=Objective)
    """The model's own loss, where it is more than the cross-entropy of the logits."""

    def run(
        self,
        rows: int = ROWS,
        module: nn.Module | None = None,
        documents: bool = False,
        tokens: int = TOKENS,
        parts: int = 1,
    ) -> torch.Tensor:
        """Runs a forward on random tokens and returns its logits, or its loss where the model returns no logits.

        Args:
            rows: B.
            module: to run instead of the clone itself.
            documents: packs two documents into each row where the model takes position ids, so that attention uses a
                mask.
            tokens: S.
            parts: number of shards into which ``module`` splits the rows' tokens.

        Returns:
            (B, S / parts, V) float64 logits, or a float64 scalar.
        """
        ids = torch.randint(self.vocab, (rows, tokens), generator=torch.Generator().manual_seed(7))
        position_ids = None
        # positions restart at the middle of a row: two packed documents
        if documents and self.structure.takes_positions and self.structure.transformers:
            position_ids = (torch.arange(tokens) % (tokens // 2 + 1)).expand(rows, tokens)
        if not self.objective.plain:
            with Float64Ops(), nothing_dropped():
                return trial_output(module or self.module, self.structure, self.objective, ids, ids, position_ids)
        with Float64Ops():
            output = model_output(
                module or self.module,
                self.structure,
                ids,
                ids,
                position_ids,
                position_ids is not None,
                token_parts=parts,
            )
        output_tensor = output.logits if output.logits is not None else output.loss
        assert output_tensor is not None
        return output_tensor

    def refuses(self, tokens: int) -> bool:
        """Returns whether its forward fails on rows of so many tokens: a position table may be shorter."""
        try:
            # a copy, since forward may change buffers before it fails
            with torch.no_grad():
                self.run(1, copy.deepcopy(self.module), tokens=tokens)
        except Exception:
            return True
        return False


def clone_of(built: BuiltModel, context: int = CONTEXT, window: int = 0, narrow: int = 0) -> Clone:
    """Builds the clone: the model itself where it is small, else one with as many heads and experts but narrower.

    Args:
        built: the model, on meta.
        context: longest sequence of a clone that is built anew, in tokens.
        window: upper limit of attention windows in tokens, so that a window matters in rows of the clone's length; 0
            for no limit.
        narrow: elements of a head of a clone that is narrower than the model even where that is small; 0 for the
            model itself there.
    """
    keeps_size = not narrow and sum(parameter.numel() for parameter in built.module.parameters()) <= SMALL
    if keeps_size or built.config.kind == "function":
        # a window longer than the clone's rows would never mask anything
        windowed = with_windows(built, window)
        source_model = built if windowed is None else build_meta(windowed, built.vocab, context)
        module = copy.deepcopy(built.module) if windowed is None else source_model.module
    else:
        # vocabulary 128: the head's width doesn't matter to the layers' groups
        source_model = build_meta(narrowed(built, narrow) if narrow else narrowed(built), 128, context)
        module = source_model.module
    # float64, so that a rehearsal's rounding (1e-13) is far below a wrong split's error
    use_float64(module)
    module.to_empty(device="cpu")
    retie(module, source_model.recipe.ties)
    source_model.fill_buffers(module, "cpu")
    generator = torch.Generator().manual_seed(11)
    for parameter in module.parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        # Around one for scales of norms; small for matrices, so that no activation saturates.
        scale = 0.2 if parameter.dim() < 2 else 0.5 / max(1, parameter.shape[-1]) ** 0.5
        parameter.data = values * scale + (1.0 if parameter.dim() < 2 else 0.0)
    return Clone(
        module.eval(), source_model.structure, source_model.vocab or 128, keeps_size or built.config.kind == "function"
    )


def with_objective(clone: Clone, objective: Objective | None) -> Clone:
    """Returns a clone in training mode with the model's own loss in its output; some terms exist in training alone."""
    if objective is None or objective.plain:
        return clone
    return dataclasses.replace(clone, module=clone.module.train(), objective=objective)


@computed_by_helper
def sharding_table(
    built: BuiltModel, degree: int = 2, objective: Objective | None = None, narrow: int = 0
) -> ShardingTable:
    """Reads the sharding table of a model.

    Args:
        built: on meta; it stays unchanged.
        degree: number of ranks in each rehearsal of a group (2 where a group has fewer units).
        objective: the model's own loss, which is rehearsed too.
        narrow: elements of a head of a clone narrower than the model, whose table is rescaled as a large model's is;
            0 for the model's own sizes where it is small.

    Raises:
        ConfigError: when the model doesn't run on a small clone.
    """
    clone = with_objective(clone_of(built, narrow=narrow), objective)
    names = clone.structure.layers
    modules = {name: clone.module.get_submodule(name) for name in names}

    @cache
    # opened traces are needed only where a group is refused, so both runs are lazy
    def traces(opened: bool) -> dict[str, LayerTrace]:
        with torch.enable_grad():
            return trace(modules, lambda: clone.run(documents=True), opened)

    try:
        layer_traces = traces(False)
    except Exception as error:
        raise ConfigError(
            f"model '{built.config.name}': its sharding can't be read, since a small clone doesn't run: {error}"
        ) from error
    rows_by_kind: dict[Any, LayerRows] = {}
    layers: dict[str, LayerRows] = {}
    for name in names:
        if name not in layer_traces:
            layers[name] = LayerRows(groups=(), refused={"": "the layer isn't called"}, sequence=False)
            continue
        kind_key = _layer_kind_key(modules[name])
        # layers of one kind share one LayerRows object; layer_kinds() relies on its identity
        if kind_key not in rows_by_kind:
            rows_by_kind[kind_key] = _read_layer_rows(layer_traces[name], partial(_opened_trace, traces, name), degree)
        layers[name] = rows_by_kind[kind_key]
    table = _add_vocabulary(clone, ShardingTable(layers=layers), degree)
    return table if clone.full_size else _carry_to_full_size(table, clone, built)


def _opened_trace(traces_of: Callable[[bool], dict[str, LayerTrace]], name: str) -> LayerTrace:
    """Returns a layer's trace with norms over all features passed through."""
    return traces_of(True)[name]


def _layer_kind_key(layer: nn.Module) -> Any:
    """Returns a key that is equal for layers of the same code and shapes; weights' values don't count."""
    parameter_shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    module_types = tuple(type(child) for child in layer.modules())
    attributes = tuple(
        sorted((key, str(value)) for key, value in vars(layer).items() if isinstance(value, (str, bool)))
    )
    return parameter_shapes, module_types, attributes


def _read_layer_rows(traced: LayerTrace, opened: Callable[[], LayerTrace], degree: int) -> LayerRows:
    """Finds, adapts and rehearses the groups of one kind of layer; ``opened`` traces it with norms passed through."""
    if traced.output is None or not traced.inputs:
        return LayerRows(groups=(), refused={"": "the layer takes or gives no hidden state"}, sequence=False)
    candidates, refused = find_groups(traced, ROWS)
    faults: set[str] = set()
    accepted = _accept_working_groups(traced, candidates, [], refused, faults, degree)
    # Second attempt for refused matrices: a norm over all features hides the units, so trace with norms passed through
    # and give these norms a global reduction.
    if refused:
        opened_groups, _ = find_groups(opened(), ROWS)
        global_norm_groups = [
            group for group in opened_groups if any(item.kind == "global_norm" for item in group.cuttings)
        ]
        accepted = _accept_working_groups(traced, global_norm_groups, accepted, refused, faults, degree)
    rows = LayerRows(groups=tuple(accepted), refused=refused, faults=tuple(sorted(faults & refused.keys())))
    reason = rehearse_layer(traced, rows, 2, sequence=True)
    return dataclasses.replace(rows, sequence=not reason, sequence_refused=reason)


def _accept_working_groups(
    traced: LayerTrace,
    candidates: Sequence[ShardingGroup],
    accepted: list[ShardingGroup],
    refused: dict[str, str],
    faults: set[str],
    degree: int,
) -> list[ShardingGroup]:
    """Adds the candidates whose rehearsal passes to ``accepted``, and their failures to ``refused`` and ``faults``."""
    # largest first, so that of two overlapping groups the one with more weights is accepted
    for group in sorted(candidates, key=lambda group: -_split_elements(traced, group)):
        taken_matrices = {name for accepted_group in accepted for name in _matrix_names(accepted_group)}
        if taken_matrices & set(_matrix_names(group)):
            continue
        # fewer units than ranks: rehearse at degree 2
        trial_ranks = degree if group.shares(degree) is not None else 2

        def works(candidate: ShardingGroup, trial_ranks: int = trial_ranks) -> str:
            if candidate.shares(trial_ranks) is None:
                return f"its {candidate.units} heads or channels don't divide"
            return rehearse_layer(traced, LayerRows(groups=(candidate,)), trial_ranks)

        working_group, reason = find_numbers(traced, group, works)
        if working_group is not None:
            accepted = [*accepted, working_group]
        else:
            faults |= set(_matrix_names(group))
            for name in _matrix_names(group):
                refused.setdefault(name, _refusal_sentence(reason))
    for group in accepted:
        for name in _matrix_names(group):
            refused.pop(name, None)
    return accepted


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


def _matrix_names(group: ShardingGroup) -> tuple[str, ...]:
    """Returns the dotted names of a group's linears, column-parallel first."""
    return (*group.column_linears, *group.inner_row_linears, group.row_linear)


def _add_vocabulary(clone: Clone, table: ShardingTable, degree: int) -> ShardingTable:
    """Splits embedding and head by vocabulary, as far as the rehearsed model still matches the whole model."""
    structure, vocab = clone.structure, clone.structure.vocab or 0
    vocab_names = []
    for name in (structure.embedding, structure.head):
        vocab_module = clone.module.get_submodule(name) if name else None
        if name and isinstance(vocab_module, (nn.Embedding, nn.Linear)) and vocab_module.weight.shape[0] == vocab:
            vocab_names.append(name)
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
        failure = rehearse_model(clone, candidate_table, 2)
        if not failure:
            refused_names = [name for name in vocab_names if name not in vocabulary]
            return dataclasses.replace(
                candidate_table, refused=dict.fromkeys(refused_names, first_failure), faults=tuple(refused_names)
            )
        first_failure = first_failure or failure
    return _keep_working_layers(clone, table, first_failure)


def _keep_working_layers(clone: Clone, table: ShardingTable, reason_all_split: str) -> ShardingTable:
    """Keeps the kinds of layers with which the split model matches the whole model; refuses the others by name.

    Args:
        clone: of the model.
        table: that doesn't match, without a vocabulary.
        reason_all_split: difference with all layers split.
    """
    # start from nothing split and add one kind of layer at a time
    layers = {
        name: LayerRows(groups=(), refused={"": reason_all_split}, faults=("",), sequence=False)
        for name in table.layers
    }
    failures: list[str] = []
    for names in layer_kinds(table).values():
        candidate_table = ShardingTable(layers=layers | {name: table.layers[name] for name in names})
        if not any(rows.groups for rows in (table.layers[name] for name in names)):
            continue
        if failure := rehearse_model(clone, candidate_table, 2):
            failures.append(f"with {names[0]} split over 2 ranks {failure}")
            refused = dataclasses.replace(layers[names[0]], refused={"": failures[-1]})
            layers |= dict.fromkeys(names, refused)
        else:
            layers = dict(candidate_table.layers)
    reason = f"the model, split, isn't the model: {'; '.join(failures[:3]) or reason_all_split}"
    return ShardingTable(layers=layers, refused={"": reason}, faults=("",))


def _carry_to_full_size(table: ShardingTable, clone: Clone, built: BuiltModel) -> ShardingTable:
    """Rescales a narrow clone's table to the model: heads grow in size, channels in number."""
    clone_layers = {name: clone.module.get_submodule(name) for name in table.layers}
    # match by code and parameter names, not by index: the clone may have fewer layers
    by_kind = {_carry_key(clone_layer): (clone_layer, table.layers[name]) for name, clone_layer in clone_layers.items()}
    layers = {}
    for name in built.structure.layers:
        layer = built.module.get_submodule(name)
        clone_match = by_kind.get(_carry_key(layer))
        if clone_match is None:
            layers[name] = LayerRows(groups=(), refused={"": "no layer of the small clone is like it"}, sequence=False)
            continue
        clone_layer, rows = clone_match
        groups, refused = [], dict(rows.refused)
        for group in rows.groups:
            rescaled_group = rescale_group(group, clone_layer, layer)
            if rescaled_group is not None:
                groups.append(rescaled_group)
            else:
                refused |= dict.fromkeys(_matrix_names(group), "its parts don't grow alike with the model")
        layers[name] = dataclasses.replace(rows, groups=tuple(groups), refused=refused)
    return dataclasses.replace(table, layers=layers, vocab=built.structure.vocab or 0)


def _carry_key(layer: nn.Module) -> Any:
    """Returns a key that a clone's layer and the model's layer share: type, parameter names and their ranks."""
    return type(layer), tuple((name, parameter.dim()) for name, parameter in layer.named_parameters())


def layer_kinds(table: ShardingTable) -> Mapping[int, list[str]]:
    """Returns the names of layers that share rows, by the identity of these."""
    names_by_rows: dict[int, list[str]] = {}
    for name, rows in table.layers.items():
        names_by_rows.setdefault(id(rows), []).append(name)
    return names_by_rows
