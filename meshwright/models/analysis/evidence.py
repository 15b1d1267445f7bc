"""The evidence of an analysis: what the trace showed and what each trial compared, carried out beside its results.

Nothing here is derived a second time: each record is filled by the step that decided by it, so that an explanation can
show only what the analysis really used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.spec.layer_graph import Path
from meshwright.spec.sharding_table import Block, Cutting, ShapeAttribute, ShardingGroup

Shape = tuple[int, ...]
"""Sizes of a tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitTrial:
    """One comparison of a split layer or model, run in threads, with the unsplit one: output and every gradient."""

    degree: int
    """Ranks."""
    failure: str = ""
    """What differed or was raised; "" when everything agreed."""
    error: float = 0.0
    """Largest relative error of any output or gradient that was compared."""
    parameters: Mapping[str, tuple[Shape, Shape]] = field(default_factory=dict)
    """Full shape and the first rank's, of each parameter whose shape differs on that rank."""
    attributes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Full value and the first rank's, of each shape attribute that was adapted, by ``module.attribute``."""
    numbers: tuple[ShapeAttribute, ...] = ()
    """Shape attributes of the group under trial."""
    cuttings: tuple[Cutting, ...] = ()
    """Cuttings of the group under trial."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixReads:
    """What the trace shows of one matrix: where its input comes from, and who reads its output."""

    name: str
    """From the layer on."""
    calls: int
    """Calls in one forward of the layer."""
    experts: bool
    """Whether it is a module of stacked experts."""
    reads: tuple[str, ...]
    """Matrices whose outputs reach its input without passing through another matrix."""
    reads_layer_input: bool
    """Whether its input depends on the layer's own input past all matrices, or isn't the batch's."""
    read_by: tuple[str, ...]
    """Matrices that read its output so; "" is the layer's output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dependence:
    """Which features of the sources each feature of a row linear's input depends on, off autograd's graph."""

    features: int
    """Of the row linear's input."""
    units: int
    """The finest units into which they divide; 0 where every feature depends on all others."""
    draws: int
    """Random draws of activations by which it was read."""
    sources: Mapping[str, tuple[Block, ...] | None]
    """For each source its runs by unit; None for one of which every unit reads all."""
    mixes_tokens: bool = False
    """Whether a token's features depend on other tokens' (attention, scans)."""
    standalone: Mapping[str, str] = field(default_factory=dict)
    """How parameters of no matrix reach the input past all matrices: ``units``, each unit its own run of one;
    ``shared``, every unit all of it; ``unread``, not at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupEvidence:
    """What was found and tried for one row linear, or one module of experts."""

    row_linear: str
    """From the layer on."""
    dependence: Dependence | None = None
    """None for experts, whose stacked shapes name the candidates."""
    group: ShardingGroup | None = None
    """The candidate by the trace; None where the trace refuses one."""
    refusal: str = ""
    """The trace's rule that refuses a group; "" where there is a candidate."""
    through_norms: bool = False
    """Whether norms over all features were passed through, to get a global reduction."""
    trials: tuple[SplitTrial, ...] = ()
    """In order; the last is the one that decided."""
    accepted: ShardingGroup | None = None
    """The group that entered the table, in the clone's sizes; None where no trial passed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerEvidence:
    """What one kind of layer was decided by."""

    layer: str
    """The traced layer of the clone; layers of its kind share the evidence."""
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    """Shapes of the traced layer's parameters."""
    matrices: tuple[MatrixReads, ...] = ()
    """In order of their calls."""
    groups: tuple[GroupEvidence, ...] = ()
    """In the order in which they were tried."""
    sequence: SplitTrial | None = None
    """The trial of a split of tokens between the groups."""

    def group_of(self, row_linear: str) -> GroupEvidence | None:
        """Returns the evidence of the accepted group of a row linear; None without one."""
        return next((item for item in self.groups if item.accepted and item.row_linear == row_linear), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTrial:
    """A comparison of the model with layers, embedding or head split, with the unsplit model."""

    vocabulary: tuple[str, ...]
    """Modules that were split by vocabulary."""
    layers: tuple[str, ...]
    """Layers that were split; all of one kind where kinds were added one by one."""
    trial: SplitTrial


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingEvidence:
    """What a sharding table was decided by."""

    full_size: bool
    """Whether the clone has the model's sizes."""
    parameters: int
    """Elements of the clone."""
    layers: Mapping[str, LayerEvidence]
    """By layer of the model."""
    model_trials: tuple[ModelTrial, ...]
    """In order; the last one that passed decided."""
    tied: bool = False
    """Whether embedding and head are one weight, and so are split together or not at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorUse:
    """One tensor among a layer's arguments, with the sources that autograd's graph shows behind it."""

    path: Path
    """Keys in ``(args, kwargs)``; ``("side", ...)`` for a source that reaches the layer's output past its arguments."""
    shape: Shape
    """Its sizes on the clone."""
    layers: tuple[int, ...]
    """Calls of layers that it was made from."""
    weights: tuple[str, ...]
    """Weights outside of these that it was made from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTrial:
    """A comparison of stages, run one after another, with the uncut model: output and every gradient."""

    bounds: tuple[int, ...]
    """First layer of each stage, and the number of layers."""
    error: float
    """Largest relative error."""
    whole_backward: str
    """Why backward can't come in halves; "" where it can."""
    refused_ends: Mapping[int, str] = field(default_factory=dict)
    """Why the embedding (0) or the head (number of layers) can't be a stage without layers; by boundary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGraphEvidence:
    """What a layer graph was decided by."""

    inputs: tuple[tuple[TensorUse, ...], ...]
    """For each layer the tensors that it reads; at last those of the model's output."""
    trial: StageTrial
