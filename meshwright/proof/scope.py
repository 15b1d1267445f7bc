"""What a proof covered: which share of the weights each axis really split, and on which layers, sizes and rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from meshwright.json_types import JsonObject
from meshwright.models.analysis.experts import find_experts
from meshwright.models.build import BuiltModel
from meshwright.models.sizes import SYNONYMS, WINDOWS, size_of
from meshwright.spec.axes import known_axes
from meshwright.spec.axis import Holds, Mechanics
from meshwright.spec.groups import axes_with
from meshwright.spec.layout import Layout
from meshwright.spec.sharding_table import ShardingTable
from meshwright.train.model_analysis import ModelAnalysis


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """What was proven, so that a pass can't be read as more than it is."""

    lengths: tuple[int, ...]
    """Tokens of the rows that were trained on."""
    layers: Mapping[str, int]
    """Kind of layer to the number of such layers."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the model that was run, by the names of `ModelConfig`; empty for a function."""
    windows: Mapping[str, bool] = field(default_factory=dict)
    """Window of attention as ``name=tokens`` to whether a row was longer than it."""
    split: Mapping[str, float] = field(default_factory=dict)
    """Axis to the share of the model's elements that it splits, as the ranks held them."""
    layer_share: float = 1.0
    """Share of the layers' elements that ``tp`` splits; 1 without ``tp``."""
    whole: Mapping[str, str] = field(default_factory=dict)
    """Matrices that every rank of ``tp`` holds whole, and why: their structure doesn't divide."""
    unsplit: Mapping[str, str] = field(default_factory=dict)
    """What the layout asked to split and wasn't, and why: a trial found a fault, or nothing of a layer is split."""
    attention: str = ""
    """How ``cp`` computes attention."""
    grown: bool = False
    """Whether the table of ``tp`` and ``cp`` was read off a narrower clone and grown to these sizes."""
    tried: str = ""
    """Rows on which token splits were tried, and why none longer."""
    heads_refused: str = ""
    """Why ``cp`` gathers keys and values where no way was named: what a trial found against exchanging heads."""
    experts_used: int = 0
    """Experts that changed the loss of some batch."""
    experts_idle: int = 0
    """Experts that no token visited: nothing is proven of them."""
    calls: int = 1
    """Calls of the model a step, where its loss is no mean over targets or rows: one device made the same."""
    terms: str = ""
    """Terms of such a loss that depend on which rows share a call."""

    def to_json(self) -> dict[str, object]:
        """Returns plain values."""
        return asdict(self)

    @property
    def summary(self) -> str:
        """One line for people."""
        shares = ", ".join(f"{axis} {share:.0%}" for axis, share in self.split.items())
        phrases = [f"split {shares}" if shares else "no weight split"]
        tensor_axis = next((name for name in axes_with(Mechanics.MATRICES) if name in self.split), "")
        if tensor_axis:
            grown_note = " with a table grown from a narrower clone" if self.grown else ""
            phrases.append(f"{self.layer_share:.0%} of the layers by {tensor_axis}{grown_note}")
        phrases.append("rows of " + " and ".join(map(str, self.lengths)))
        phrases.append("layers " + " + ".join(f"{count} {kind}" for kind, count in self.layers.items()))
        if "heads" in self.sizes:
            phrases.append(f"{self.sizes['heads']} heads, {self.sizes.get('kv_heads', self.sizes['heads'])} of keys")
        phrases += [f"{name} {'bit' if is_reached else 'never bit'}" for name, is_reached in self.windows.items()]
        if self.attention:
            phrases.append(f"tokens split by attention={self.attention}, tried on {self.tried}")
        if self.heads_refused:
            phrases.append(f"not by attention=heads: {self.heads_refused}")
        if self.experts_used or self.experts_idle:
            phrases.append(f"experts {self.experts_used} used, {self.experts_idle} idle")
        if self.calls > 1:
            phrases.append(
                f"its own loss ({self.terms}) depends on which rows share a call: compared with one device that is "
                f"called {self.calls} times a step, not with one call of all rows"
            )
        if self.whole:
            phrases.append(f"whole: {', '.join(self.whole)}")
        return "; ".join(phrases)


def read_scope(
    built: BuiltModel, layout: Layout, analysis: ModelAnalysis, lengths: Sequence[int], grown: bool = False
) -> Scope:
    """Returns what is known of a proof before its ranks run.

    Args:
        built: the model that is proven, on meta.
        layout: to be proven.
        analysis: of the model.
        lengths: tokens of its rows.
        grown: whether its sharding table grew from a narrower clone.
    """
    module, config = built.module, built.hf_config
    config_values = config.get_text_config(decoder=True).to_dict() if config is not None else {}
    kinds = Counter(
        layer_label(module, name, config_values, layer_index) for layer_index, name in enumerate(built.structure.layers)
    )
    sizes = {key: size for key in SYNONYMS if (size := size_of(config_values, key)) is not None}
    windows = {key: size for key in WINDOWS if isinstance(size := config_values.get(key), int) and size > 0}
    scope = Scope(
        lengths=tuple(dict.fromkeys(lengths)),
        layers=dict(kinds),
        sizes=sizes,
        windows={f"{key}={size}": max(lengths) > size for key, size in windows.items()},
        attention=analysis.attention if layout.degree(Mechanics.TOKENS) > 1 else "",
        tried=analysis.tried if layout.degree(Mechanics.TOKENS) > 1 else "",
        heads_refused=analysis.heads_refused if layout.degree(Mechanics.TOKENS) > 1 else "",
        grown=grown and layout.degree(Mechanics.MATRICES) * layout.degree(Mechanics.TOKENS) > 1,
    )
    trial = analysis.trial
    if trial is not None and not trial.objective.exact:
        terms = ", ".join(term.name for term in trial.objective.terms if not term.exact)
        scope = replace(scope, calls=len(layout.reader_shares()) * layout.calls, terms=terms)
    degree = layout.degree(Mechanics.MATRICES)
    if degree == 1 or analysis.table is None:
        return scope
    whole_reasons, unsplit_reasons = whole_matrices(module, analysis.table, degree)
    return replace(
        scope, layer_share=layer_share(module, analysis.table, degree), whole=whole_reasons, unsplit=unsplit_reasons
    )


def layer_label(module: nn.Module, name: str, config_values: JsonObject, layer_index: int) -> str:
    """Returns a layer's class, with the kind that the config gives the layer at its place."""
    kinds = config_values.get("layer_types")
    label = type(module.get_submodule(name)).__name__
    return f"{label} ({kinds[layer_index]})" if isinstance(kinds, list) and layer_index < len(kinds) else label


def layer_share(module: nn.Module, table: ShardingTable, degree: int) -> float:
    """Returns the share of the called layers' elements that a degree of ``tp`` splits."""
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters(remove_duplicate=False)}
    layer_prefixes = tuple(f"{name}." for name in _called(table))
    total = sum(size for name, size in sizes.items() if name.startswith(layer_prefixes)) if layer_prefixes else 0
    split_names = {f"{layer}.{split.name}" for layer, split, _, _ in table.splits(degree)}
    return sum(sizes[name] for name in split_names) / max(1, total)


def whole_matrices(module: nn.Module, table: ShardingTable, degree: int) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the matrices that stay whole: by their structure, and against what the layout asked for.

    Args:
        module: the model.
        table: of the model.
        degree: of ``tp``.

    Returns:
        (name to reason, name to reason); a name stands for all layers of its kind.
    """
    split_by_layer: dict[str, set[str]] = {}
    for layer, item, _, _ in table.splits(degree):
        split_by_layer.setdefault(layer, set()).add(item.name)
    whole_reasons: dict[str, str] = {}
    unsplit_reasons = {name: table.refused[name] for name in table.faults if name in table.refused}
    for layer in _called(table):
        rows = table.layers[layer]
        layer_module = module.get_submodule(layer)
        matrices = [name for name, item in layer_module.named_parameters() if item.dim() > 1 and item.requires_grad]
        for name, reason in rows.refused.items():
            (unsplit_reasons if name in rows.faults else whole_reasons).setdefault(name or "the layer", reason)
        for group in rows.groups:
            if group.shares(degree) is None:
                unsplit_reasons.setdefault(
                    group.row_linear, f"its {group.units} heads or channels don't divide over tp={degree}"
                )
        if matrices and not split_by_layer.get(layer):
            reason = next(iter(rows.refused.values()), "no group of its matrices divides")
            unsplit_reasons.setdefault(layer, f"nothing of the layer is split: {reason}")
    return whole_reasons, unsplit_reasons


def _called(table: ShardingTable) -> list[str]:
    return [name for name, rows in table.layers.items() if rows.refused.get("") != "the layer isn't called"]


def split_shares(ranks: Sequence[Mapping[str, Any]], layout: Layout) -> dict[str, float]:
    """Returns for each axis that splits weights the share of the model's elements that it splits.

    Args:
        ranks: per rank ``held``: weight to (elements of the whole weight, axes that split it there).
        layout: of these ranks.
    """
    sizes: dict[str, int] = {}
    axes: dict[str, set[str]] = {}
    for rank in ranks:
        for name, (size, axis_names) in rank["held"].items():
            sizes[name] = size
            axes.setdefault(name, set()).update(axis_names)
    if layout.degree(Mechanics.STAGES) > 1:
        for name in sizes:
            # a weight that some rank lacks is another stage's; one that all hold is shared between stages
            if not all(name in rank["held"] for rank in ranks):
                axes[name].add(layout.axis(Mechanics.STAGES))
    total_elements = max(1, sum(sizes.values()))
    splitting_axes = [name for name, axis in known_axes().items() if axis.holds is not Holds.COPY]
    splitting_axes.sort(key=lambda name: bool(known_axes()[name].carves))
    return {
        axis: sum(size for name, size in sizes.items() if axis in axes[name]) / total_elements
        for axis in splitting_axes
        if layout.degree(axis) > 1
    }


def expert_use(built: BuiltModel, gradients: Sequence[Mapping[str, torch.Tensor]]) -> tuple[int, int]:
    """Returns how many experts took part in some batch, and how many in none, read off their gradients.

    Args:
        built: the model.
        gradients: of some steps; weight to its gradient, of the weight's shape.
    """
    used = idle = 0
    for rows in find_experts(built.module):
        took_part = torch.zeros(rows.experts, dtype=torch.bool)
        for step in gradients:
            for name in rows.parameters:
                if (grad := step.get(f"{rows.module}.{name}")) is not None:
                    # an expert that no token visited has a gradient of exact zeros
                    if rows.children:
                        took_part[rows.expert_of(name)] |= bool(grad.ne(0).any())
                    else:
                        took_part |= grad.reshape(rows.experts, -1).ne(0).any(1).cpu()
        used += int(took_part.sum())
        idle += rows.experts - int(took_part.sum())
    return used, idle
