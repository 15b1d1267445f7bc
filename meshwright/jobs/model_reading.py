"""Reads a model on the meta device for planning: its sizes, its weights by name, its measured work."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass, field

from meshwright.errors import MeshwrightError
from meshwright.models.analysis.experts import routes_wide
from meshwright.models.analysis.table import overridden_table, sharding_table
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.compiled_bytes import layer_bytes
from meshwright.models.work import measure_model
from meshwright.parallel.transform import DTYPES
from meshwright.planner.measured_price import Measure
from meshwright.planner.memory import ModelParts, StateSizes
from meshwright.spec.axis import Mechanics
from meshwright.spec.end_units import EndUnits
from meshwright.spec.layout import Layout
from meshwright.spec.layout_fields import FLOAT8_RECIPES
from meshwright.spec.model_shape import ModelWork
from meshwright.spec.sharding_table import ShardingTable
from meshwright.train.model_analysis import ModelAnalysis, analyse_model
from meshwright.train.run_config import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadModel:
    """A model on meta with its sizes and fingerprint."""

    built: BuiltModel
    sizes: StateSizes
    fingerprint: str
    """Hash of names, shapes and types of its parameters."""
    analyses: dict[tuple[int, int, str], ModelAnalysis] = field(default_factory=dict)
    """What was found by degrees of tp and cp and the way of attention: a trial of a clone takes a second of a core."""
    measures: dict[tuple[str, int, str], Measure] = field(default_factory=dict)
    """What runs its modules on fake tensors, by attention, tokens a row and precision; each keeps what it measured."""

    def analyse(self, layout: Layout, tokens: int) -> ModelAnalysis:
        """Analyses the model for a layout, by what is known from other layouts; see `analyse_model`."""
        key = (layout.degree(Mechanics.MATRICES), layout.degree(Mechanics.TOKENS), layout.attention)
        earlier = self.analyses.get(key)
        if earlier is None and self.analyses:
            # Neither depends on how heads and tokens are split.
            newest = next(reversed(self.analyses.values()))
            earlier = ModelAnalysis(trial=newest.trial, layer_graph=newest.layer_graph)
        self.analyses[key] = analyse_model(self.built, layout, earlier, tokens)
        return self.analyses[key]

    def measure(self, built: BuiltModel, tokens: int, precision: str) -> Measure:
        """Returns what measures the model for a layout, the same for each plan of a run; see `make_measure`.

        Args:
            built: the model, as it attends on the devices of the run.
            tokens: of a row.
            precision: of compute.
        """
        key = (built.config.attention, tokens, precision)
        if key not in self.measures:
            self.measures[key] = make_measure(built, tokens, precision)
        return self.measures[key]


def read_model(config: RunConfig, vocab: int | None, context: int | None) -> ReadModel:
    """Builds the config's model on the meta device."""
    built = build_meta(config.model, vocab=vocab, context=context)
    named = [(name, item) for name, item in built.module.named_parameters() if item.requires_grad]
    layers = [
        sum(item.numel() for name, item in named if name.startswith(layer + ".")) for layer in built.structure.layers
    ]
    rows = [(name, list(item.shape), str(item.dtype)) for name, item in built.module.named_parameters()]
    return ReadModel(
        built=built,
        sizes=StateSizes(total=sum(item.numel() for _, item in named), layers=tuple(layers)),
        fingerprint=hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16],
    )


def model_parts(built: BuiltModel, analysis: ModelAnalysis) -> ModelParts:
    """Returns the weights by name with their splits, from which every axis is priced."""
    named = built.module.named_parameters(remove_duplicate=False)
    structure = built.structure
    return ModelParts.of(
        named,
        structure.layers,
        structure.ties,
        analysis.table,
        analysis.layer_graph,
        analysis.experts,
        analysis.attention,
        wide_routing=routes_wide(built.module),
        ends=analysis.trial.ends if analysis.trial is not None else EndUnits(),
    )


def make_measure(built: BuiltModel, sequence: int, precision: str) -> Measure:
    """Returns a function that runs a model's modules on fake tensors for a layout, cached by size and split.

    Args:
        built: the model on meta.
        sequence: tokens a row.
        precision: of compute.
    """
    dtype, width = DTYPES[precision], built.structure.width or 0
    read_partition = functools.partial(layer_bytes, float8=precision in FLOAT8_RECIPES, width=width)

    @functools.cache
    def table(degree: int) -> ShardingTable:
        return overridden_table(built, sharding_table(built, degree))

    @functools.cache
    def measured(rows: int, degree: int, split: bool, partition: bool) -> ModelWork | None:
        try:
            split_by = table(degree) if degree > 1 else None
            by = read_partition if partition else None
            return measure_model(built, rows, sequence, dtype, split_by, degree, split, by)
        except MeshwrightError:
            return None

    def measure_layout(layout: Layout, rows: int) -> ModelWork | None:
        degree = layout.degree(Mechanics.MATRICES)
        # What a compiled layer keeps is read off one row on one device.
        partition = layout.compile and rows == degree == 1
        work = measured(rows, degree, layout.sequence, partition) or measured(rows, degree, layout.sequence, False)
        return work.compiled() if work is not None and layout.compile else work

    return measure_layout
