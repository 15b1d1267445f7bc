"""A model to its sharding table: read off a small real clone, rehearsed there, carried over to the model's sizes."""

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
from meshwright.models.build import BuiltModel, build_meta, use_float64
from meshwright.models.clone import narrowed, with_windows
from meshwright.models.deferred import retie
from meshwright.models.forward import model_output
from meshwright.models.groups import find_groups
from meshwright.models.objective import Objective, nothing_dropped, trial_output
from meshwright.models.rescale import rescale_group
from meshwright.models.shape_attributes import find_numbers
from meshwright.models.structure import ModelStructure
from meshwright.models.trace import LayerTrace, trace
from meshwright.models.trial import TOKENS, rehearse_layer, rehearse_model
from meshwright.parallel.float64_ops import Float64Ops
from meshwright.spec.sharding_table import LayerRows, ShardingGroup, ShardingTable

SMALL = 1 << 24
"""Parameters up to which a model is its own clone."""
ROWS = 32
"""Rows that the clone reads."""
CONTEXT = 64
"""Most tokens that a smaller clone takes."""


@dataclass(frozen=True, slots=True)
class Clone:
    """A small real model in float64, of the same architecture."""

    module: nn.Module
    structure: ModelStructure
    vocab: int
    same: bool
    """Whether its sizes are the model's own."""
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
        """Returns logits (B, S / parts, V) of made-up tokens, or the loss of a model that gives nothing else.

        Args:
            rows: B.
            module: to run instead of the clone itself.
            documents: two in each row where the model can tell, so that attention takes the way with a mask.
            tokens: S.
            parts: into so many the rows are split inside ``module``.
        """
        ids = torch.randint(self.vocab, (rows, tokens), generator=torch.Generator().manual_seed(7))
        places = None
        if documents and self.structure.takes_positions and self.structure.transformers:
            places = (torch.arange(tokens) % (tokens // 2 + 1)).expand(rows, tokens)
        if not self.objective.plain:
            with Float64Ops(), nothing_dropped():
                return trial_output(module or self.module, self.structure, self.objective, ids, ids, places)
        with Float64Ops():
            output = model_output(
                module or self.module, self.structure, ids, ids, places, places is not None, token_parts=parts
            )
        found = output.logits if output.logits is not None else output.loss
        assert found is not None
        return found

    def refuses(self, tokens: int) -> bool:
        """Whether its code doesn't run on rows of so many tokens: a position table may be shorter."""
        try:
            with torch.no_grad():
                self.run(1, copy.deepcopy(self.module), tokens=tokens)
        except Exception:
            return True
        return False


def clone_of(built: BuiltModel, context: int = CONTEXT, window: int = 0, narrow: int = 0) -> Clone:
    """Makes the clone: the model itself where it is small, else one with as many heads and experts but narrower.

    Args:
        built: the model, on meta.
        context: tokens that it takes where it is made anew.
        window: most tokens of a window of attention, so that it is felt in the rows that the clone reads; 0 for any.
        narrow: elements of a head of a clone that is narrower than the model even where that is small; 0 for the
            model itself there.
    """
    small = not narrow and sum(item.numel() for item in built.module.parameters()) <= SMALL
    if small or built.config.kind == "function":
        windowed = with_windows(built, window)
        source = built if windowed is None else build_meta(windowed, built.vocab, context)
        module = copy.deepcopy(built.module) if windowed is None else source.module
    else:
        source = build_meta(narrowed(built, narrow) if narrow else narrowed(built), 128, context)
        module = source.module
    use_float64(module)
    module.to_empty(device="cpu")
    retie(module, source.recipe.ties)
    source.fill_buffers(module, "cpu")
    draw = torch.Generator().manual_seed(11)
    for parameter in module.parameters():
        values = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
        # Around one for scales of norms; small for matrices, so that no activation saturates.
        scale = 0.2 if parameter.dim() < 2 else 0.5 / max(1, parameter.shape[-1]) ** 0.5
        parameter.data = values * scale + (1.0 if parameter.dim() < 2 else 0.0)
    return Clone(module.eval(), source.structure, source.vocab or 128, small or built.config.kind == "function")


def with_objective(clone: Clone, objective: Objective | None) -> Clone:
    """Returns a clone whose output has the terms of the model's own loss in it, in training mode: some are of it."""
    if objective is None or objective.plain:
        return clone
    return dataclasses.replace(clone, module=clone.module.train(), objective=objective)


@computed_by_helper
def sharding_table(
    built: BuiltModel, degree: int = 2, objective: Objective | None = None, narrow: int = 0
) -> ShardingTable:
    """Reads the sharding table of a model.

    Args:
        built: on meta; it stays as it is.
        degree: the groups are rehearsed for this many ranks (2 where one has fewer units).
        objective: the model's own loss, which is rehearsed too.
        narrow: as `clone_of`: reads the table off a narrower clone and lets it grow, as a large model's does.

    Raises:
        ConfigError: when the model doesn't run on a small clone.
    """
    clone = with_objective(clone_of(built, narrow=narrow), objective)
    names = clone.structure.layers
    modules = {name: clone.module.get_submodule(name) for name in names}

    @cache
    def traces(opened: bool) -> dict[str, LayerTrace]:
        with torch.enable_grad():
            return trace(modules, lambda: clone.run(documents=True), opened)

    try:
        called = traces(False)
    except Exception as error:
        raise ConfigError(
            f"model '{built.config.name}': its sharding can't be read, since a small clone doesn't run: {error}"
        ) from error
    kinds: dict[Any, LayerRows] = {}
    layers: dict[str, LayerRows] = {}
    for name in names:
        if name not in called:
            layers[name] = LayerRows(groups=(), refused={"": "the layer isn't called"}, sequence=False)
            continue
        key = _kind(modules[name])
        if key not in kinds:
            kinds[key] = _rows(called[name], partial(_item, traces, name), degree)
        layers[name] = kinds[key]
    table = _with_vocabulary(clone, ShardingTable(layers=layers), degree)
    return table if clone.same else _carried(table, clone, built)


def _item(traces: Callable[[bool], dict[str, LayerTrace]], name: str) -> LayerTrace:
    return traces(True)[name]


def _kind(layer: nn.Module) -> Any:
    """What tells layers of one kind from others: code and shapes, not values."""
    shapes = tuple((name, tuple(item.shape)) for name, item in layer.named_parameters())
    kinds = tuple(type(part) for part in layer.modules())
    flags = tuple(sorted((key, str(value)) for key, value in vars(layer).items() if isinstance(value, (str, bool))))
    return shapes, kinds, flags


def _rows(traced: LayerTrace, opened: Callable[[], LayerTrace], degree: int) -> LayerRows:
    """Finds, adapts and rehearses the groups of one kind of layer; ``opened`` gives the layer with its norms open."""
    if traced.output is None or not traced.inputs:
        return LayerRows(groups=(), refused={"": "the layer takes or gives no hidden state"}, sequence=False)
    candidates, refused = find_groups(traced, ROWS)
    faults: set[str] = set()
    accepted = _fitting(traced, candidates, [], refused, faults, degree)
    if refused:
        others, _ = find_groups(opened(), ROWS)
        meeting = [group for group in others if any(item.kind == "meeting" for item in group.cuttings)]
        accepted = _fitting(traced, meeting, accepted, refused, faults, degree)
    rows = LayerRows(groups=tuple(accepted), refused=refused, faults=tuple(sorted(faults & refused.keys())))
    why = rehearse_layer(traced, rows, 2, sequence=True)
    return dataclasses.replace(rows, sequence=not why, sequence_refused=why)


def _fitting(
    traced: LayerTrace,
    candidates: Sequence[ShardingGroup],
    accepted: list[ShardingGroup],
    refused: dict[str, str],
    faults: set[str],
    degree: int,
) -> list[ShardingGroup]:
    """Adds to ``accepted`` the candidates that work, and to ``refused`` and ``faults`` the others."""
    for group in sorted(candidates, key=lambda group: -_weights(traced, group)):
        held = {name for other in accepted for name in _matrices(other)}
        if held & set(_matrices(group)):
            continue
        ranks = degree if group.shares(degree) is not None else 2

        def works(tried: ShardingGroup, ranks: int = ranks) -> str:
            if tried.shares(ranks) is None:
                return f"its {tried.units} heads or channels don't divide"
            return rehearse_layer(traced, LayerRows(groups=(tried,)), ranks)

        found, why = find_numbers(traced, group, works)
        if found is not None:
            accepted = [*accepted, found]
        else:
            faults |= set(_matrices(group))
            for name in _matrices(group):
                refused.setdefault(name, _rule(why))
    for group in accepted:
        for name in _matrices(group):
            refused.pop(name, None)
    return accepted


def _weights(traced: LayerTrace, group: ShardingGroup) -> int:
    """Parameters that a group splits: where two want the same matrix, the larger one has it."""
    return sum(traced.layer.get_parameter(split.name).numel() for split in group.splits)


def _rule(why: str) -> str:
    """What a failed trial says about the code, in words of the rule that it breaks."""
    if " is off by " in why:
        return f"computed in parts it gives something else, so its code looks at more than one head or channel ({why})"
    if why.startswith("its ") or why.startswith("the ranks"):
        return why
    return f"its code doesn't run on a part of the heads or channels ({why})"


def _matrices(group: ShardingGroup) -> tuple[str, ...]:
    return (*group.column_linears, *group.inner_row_linears, group.row_linear)


def _with_vocabulary(clone: Clone, table: ShardingTable, degree: int) -> ShardingTable:
    """Adds embedding and head where the whole model, split, is the whole model."""
    structure, vocab = clone.structure, clone.structure.vocab or 0
    names = []
    for name in (structure.embedding, structure.head):
        part = clone.module.get_submodule(name) if name else None
        if name and isinstance(part, (nn.Embedding, nn.Linear)) and part.weight.shape[0] == vocab:
            names.append(name)
    options = [tuple(names), tuple(names[:1]), ()] if structure.embedding and structure.head else [()]
    tied = any(len({f"{name}.weight" for name in names} & set(group)) > 1 for group in structure.ties)
    options = [chosen for chosen in options if not tied or len(chosen) != 1]
    why = ""
    for chosen in dict.fromkeys(options):
        tried = dataclasses.replace(table, vocabulary=chosen, vocab=vocab, headless=structure.head not in chosen)
        error = rehearse_model(clone, tried, 2)
        if not error:
            gone = [name for name in names if name not in chosen]
            return dataclasses.replace(tried, refused=dict.fromkeys(gone, why), faults=tuple(gone))
        why = why or error
    return _fitting_layers(clone, table, why)


def _fitting_layers(clone: Clone, table: ShardingTable, why: str) -> ShardingTable:
    """Keeps the kinds of layers with which the whole model, split, is the whole model; others are refused by name.

    Args:
        clone: of the model.
        table: that doesn't fit, without a vocabulary.
        why: what was off with all layers split.
    """
    layers = {name: LayerRows(groups=(), refused={"": why}, faults=("",), sequence=False) for name in table.layers}
    faults: list[str] = []
    for names in layer_kinds(table).values():
        tried = ShardingTable(layers=layers | {name: table.layers[name] for name in names})
        if not any(rows.groups for rows in (table.layers[name] for name in names)):
            continue
        if error := rehearse_model(clone, tried, 2):
            faults.append(f"with {names[0]} split over 2 ranks {error}")
            refused = dataclasses.replace(layers[names[0]], refused={"": faults[-1]})
            layers |= dict.fromkeys(names, refused)
        else:
            layers = dict(tried.layers)
    reason = f"the model, split, isn't the model: {'; '.join(faults[:3]) or why}"
    return ShardingTable(layers=layers, refused={"": reason}, faults=("",))


def _carried(table: ShardingTable, clone: Clone, built: BuiltModel) -> ShardingTable:
    """Carries a narrow clone's table over to the model: heads stay and grow, channels become more."""
    read = {name: clone.module.get_submodule(name) for name in table.layers}
    by_kind = {_carry_key(small): (small, table.layers[name]) for name, small in read.items()}
    layers = {}
    for name in built.structure.layers:
        layer = built.module.get_submodule(name)
        known = by_kind.get(_carry_key(layer))
        if known is None:
            layers[name] = LayerRows(groups=(), refused={"": "no layer of the small clone is like it"}, sequence=False)
            continue
        small, rows = known
        groups, refused = [], dict(rows.refused)
        for group in rows.groups:
            grown = rescale_group(group, small, layer)
            if grown is not None:
                groups.append(grown)
            else:
                refused |= dict.fromkeys(_matrices(group), "its parts don't grow alike with the model")
        layers[name] = dataclasses.replace(rows, groups=tuple(groups), refused=refused)
    return dataclasses.replace(table, layers=layers, vocab=built.structure.vocab or 0)


def _carry_key(layer: nn.Module) -> Any:
    return type(layer), tuple((name, item.dim()) for name, item in layer.named_parameters())


def layer_kinds(table: ShardingTable) -> Mapping[int, list[str]]:
    """Returns the names of layers that share rows, by the identity of these."""
    found: dict[int, list[str]] = {}
    for name, rows in table.layers.items():
        found.setdefault(id(rows), []).append(name)
    return found
