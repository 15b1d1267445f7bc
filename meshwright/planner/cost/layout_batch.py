"""The inputs of the cost model: a job (model and batch), and N layouts as arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.array_types import Index
from meshwright.errors import PlanError
from meshwright.planner.cost.axis_columns import column_degrees, priced_columns
from meshwright.planner.cost.measured_bytes import ActivationBytes, MovedBytes
from meshwright.schedules.file import find_choice
from meshwright.schedules.spec import ScheduleSpec, known_schedules
from meshwright.spec.axis import Mechanics
from meshwright.spec.compression import METHODS
from meshwright.spec.groups import axes_with, carved_shards, state_shards
from meshwright.spec.layout import Layout
from meshwright.spec.layout_fields import DEFAULT_SCHEDULE, OFFLOADS
from meshwright.spec.model_shape import ModelShape

Array = NDArray[Any]
"""float64, unless it is an index or a mask."""
RECOMPUTES = ("none", "selective", "full", "block")
"""Recompute modes by code: ``selective`` keeps products and recomputes the rest, ``block`` only attention scores."""
SELECTIVE, FULL, BLOCK = (RECOMPUTES.index(mode) for mode in ("selective", "full", "block"))

COMPRESSIONS = ("none", *METHODS)
"""Numbers and methods of compressed collectives by code."""


def schedule_names() -> tuple[str, ...]:
    """Returns the names of the schedules by code: the default first, then every other known one."""
    return (DEFAULT_SCHEDULE, *(name for name in known_schedules() if name != DEFAULT_SCHEDULE))


def splits_backward(schedules: Array) -> Array:
    """Returns the layouts whose schedule splits the backward, (N,) bool; in the search these never recompute.

    Args:
        schedules: (N,) codes of the layouts' schedules.
    """
    codes = [code for code, name in enumerate(schedule_names()) if known_schedules()[name].splits_backward]
    return np.isin(schedules, codes)


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedJob:
    """A model and the batch of one step."""

    shape: ModelShape
    """The model, with its blocks."""
    sequence: int
    """S: tokens in a row."""
    rows: int
    """Rows of the global batch."""
    precision: str = "bf16"
    """Data type of compute outside the products."""
    products: str = ""
    """Data type of the products where it differs: ``fp8``, ``fp4``, ``tf32``."""
    adapters: bool = False
    """Weights are frozen and small adapters are trained (LoRA): no gradients of weights."""
    splits_backward: bool = True
    """Whether a stage's backward can come in two halves, inputs first and weights later; where it can't, a schedule
    that asks for halves runs all of it in the first (`spec.layer_graph.LayerGraph.whole_backward`)."""
    activations: ActivationBytes | None = None
    """What the model's own modules take, where they were read; else the closed form is used."""
    compiled_activations: ActivationBytes | None = None
    """The same of compiled layers, where the compiler's partition was read."""
    moved: MovedBytes | None = None
    """What the model's own operators move, where they were read; else the closed form is used."""

    def __post_init__(self) -> None:
        """Refuses a shape without blocks."""
        if not self.shape.blocks:
            raise PlanError(f"{self.shape.name}: its blocks weren't read, so its time can't be priced")
        if self.sequence < 1 or self.rows < 1:
            raise PlanError(f"{self.rows} rows of {self.sequence} tokens: both must be at least 1")

    def activations_of(self, compiled: bool) -> ActivationBytes | None:
        """Returns what the modules take over the closed form of eager or of compiled layers, where they were read.

        Of compiled layers that couldn't be traced it is what eager ones take over theirs, which then scales the closed
        form of compiled ones (`measured_price.untraced_note`); without either the closed form stands alone.
        """
        return (self.compiled_activations if compiled else None) or self.activations

    def uncounted(self) -> PricedJob:
        """Returns the job without what was counted on the model's modules, which holds for its own sizes."""
        return dataclasses.replace(self, activations=None, compiled_activations=None, moved=None)

    @property
    def dtype(self) -> str:
        """Data type of the products."""
        return self.products or self.precision

    @property
    def step_flops(self) -> float:
        """Model FLOPs of a step: 6 N + 12 L S H E a token, without what is recomputed.

        Source: Chowdhery et al., PaLM (2022), appendix B.
        """
        return self.shape.train_flops_per_token(self.sequence) * self.rows * self.sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutBatch:
    """N layouts as arrays (N,) float64, so that one formula prices all of them."""

    pp: Array
    replicate: Array
    """Product of the degrees of all axes whose ranks read other rows and hold copies."""
    shard: Array
    """Product of the degrees of all axes whose ranks read other rows and share the state."""
    cp: Array
    tp: Array
    ep: Array
    zero: Array
    """ZeRO level."""
    microbatches: Array
    recompute: Array
    """Index into `RECOMPUTES`."""
    recompute_share: Array
    """Share of the layers that recompute in this way."""
    recompute_rest: Array
    """Index into `RECOMPUTES` of what the other layers do."""
    sequence: Array
    """1 with sequence parallelism: tokens outside tp's linears are split over tp."""
    tp_overlap: Array
    """Chunks of tokens in which products hide tp's traffic; 0 where nothing does."""
    ep_node: Array
    """Neighbours of ep to which a token travels once; 0 where it travels once for each of its experts."""
    ep_overlap: Array
    """Chunks of tokens, of which one travels while experts compute another; 0 where nothing does."""
    ep_halves: Array
    """1 where a micro-batch's rows are two halves that take turns."""
    ep_keep: Array
    """1 where recompute keeps what came from the ranks of experts."""
    stages: Array
    """Stages of each rank of pp."""
    schedule: Array
    """Index into `schedules`."""
    rows: Array
    """Rows of the global batch where they differ from the job's; else 0."""
    offload: Array
    """Index into `OFFLOADS`."""
    compress: Array
    """Index into `COMPRESSIONS`: how gradients are summed over copies."""
    node_copies: Array
    """Neighbouring copies that sum exactly first; 1 for none."""
    low_rank: Array
    """Rank in which they are summed; 0 for other methods."""
    inverse_density: Array
    """Of so many of their values one travels; 0 for other methods."""
    compress_weights: Array
    """Index into `COMPRESSIONS`: numbers in which weights are gathered."""
    compress_tokens: Array
    """1 where tokens go to experts in float8."""
    secondary: Array
    """Neighbours that share gathered weights from forward to backward under ZeRO-3; 0 for all ranks of the state."""
    loss_chunk: Array
    """Tokens whose logits exist at once; `AUTO_CHUNK` or `WHOLE_LOGITS`."""
    splits: tuple[tuple[float, ...] | None, ...] = ()
    """Layers of each stage, for layouts that name them; empty where none does."""
    files: tuple[str, ...] = ()
    """Schedules from files, whose codes follow those of the known ones."""
    inside_scale: Array
    """Measured rate of links inside nodes over the catalogue's; 1 where it wasn't measured."""
    outside_scale: Array
    """Measured rate of links between nodes over the catalogue's; 1 where it wasn't measured."""

    @property
    def schedules(self) -> tuple[ScheduleSpec, ...]:
        """The spec of each schedule, by code."""
        return tuple(find_choice(name) for name in (*schedule_names(), *self.files))

    @property
    def paired_share(self) -> Array:
        """Share of a rank's passes that take turns with one of another stage and micro-batch, (N,).

        That is where a schedule pairs them, and both exchange rows with experts (`parallel.turns`).
        """
        share = np.zeros(self.count)
        takes_turns = (self.ep > 1) & (self.ep_halves == 0) & (self.pp > 1)
        if not takes_turns.any():
            return share
        for code, spec in enumerate(self.schedules):
            if spec.paired_share is not None:
                chosen = takes_turns & (self.schedule == code)
                share[chosen] = spec.paired_share(self.pp[chosen], self.microbatches[chosen])
        return share

    @property
    def count(self) -> int:
        """N."""
        return len(self.pp)

    @property
    def data(self) -> Array:
        """Ranks that read other rows: replicate x shard."""
        return self.replicate * self.shard

    @property
    def readers(self) -> Array:
        """Ranks that hold the same weights: replicate x shard x cp."""
        return self.replicate * self.shard * self.cp

    @property
    def state_shards(self) -> Array:
        """Ranks that share the state of a weight, (N,)."""
        return np.where(self.zero > 0, state_shards(self._by_axis(), 1), 1.0)

    @property
    def expert_shards(self) -> Array:
        """Ranks that share the state of an expert, (N,); `state_shards` where ep is 1."""
        axis = axes_with(Mechanics.EXPERTS)[0]
        carved = np.where(self.zero > 0, carved_shards(axis, self._by_axis(), 1), 1.0)
        return np.where(self.ep > 1, carved, self.state_shards)

    def expert_parts(self, experts: int) -> Array:
        """Returns `expert_shards` where a shard has full experts only: a rank's experts over the largest shard's, (N,).

        Args:
            experts: X, of a layer.
        """
        rows = np.maximum(1.0, experts / self.ep)
        return np.asarray(rows / np.ceil(rows / self.expert_shards))

    def _by_axis(self) -> dict[str, Array]:
        """Returns degrees by axis, each column's all on its first axis."""
        axis_of_column: dict[str, str] = {}
        for name, column in priced_columns().items():
            axis_of_column.setdefault(column, name)
        return {name: getattr(self, column) for column, name in axis_of_column.items()}

    @property
    def world(self) -> Array:
        """Ranks of each layout."""
        return self.pp * self.replicate * self.shard * self.cp * self.tp

    def share_of(self, mode: int) -> Array:
        """Returns the share of the layers that recompute by a mode, an index into `RECOMPUTES`, (N,)."""
        share = np.where(self.recompute == mode, self.recompute_share, 0.0)
        return share + np.where(self.recompute_rest == mode, 1.0 - self.recompute_share, 0.0)

    def layer_kinds(self) -> tuple[Array, Array]:
        """Returns the first layout of each kind, and the kind of each layout, (N,): layers of a kind cost the same.

        A layer sees the rows that its ranks read and whether there is a pipeline, and not who shares the state.
        """
        columns = [self.cp, self.tp, self.ep, self.sequence, self.loss_chunk]
        columns += [self.recompute, self.recompute_share, self.recompute_rest]
        columns += [self.tp_overlap, self.ep_node, self.ep_overlap, self.ep_halves, self.ep_keep, self.compress_tokens]
        columns += [self.inside_scale, self.outside_scale, self.world, self.pp > 1, self.pp * self.stages]
        columns += [self.rows, self.data * self.microbatches, self.paired_share]
        varied = [column for column in columns if (column != column[0]).any()]
        if not varied:
            return np.zeros(1, int), np.zeros(self.count, int)
        order = np.lexsort(varied)
        is_new = np.ones(self.count, bool)
        is_new[1:] = np.any([np.diff(column[order]) for column in varied], axis=0)
        kind_of = np.empty(self.count, int)
        kind_of[order] = np.cumsum(is_new) - 1
        return order[is_new], kind_of

    def take(self, index: Index) -> LayoutBatch:
        """Returns the layouts at an index or mask."""
        names = array_fields()
        indices = np.arange(self.count)[index]
        splits = tuple(self.splits[index] for index in indices) if self.splits else ()
        return LayoutBatch(**{name: getattr(self, name)[index] for name in names}, splits=splits, files=self.files)

    @classmethod
    def of(
        cls,
        columns: Mapping[str, Any],
        splits: Sequence[tuple[float, ...] | None] = (),
        files: tuple[str, ...] = (),
    ) -> LayoutBatch:
        """Builds a batch from columns that broadcast to (N,); missing degrees are 1, missing choices 0.

        Args:
            columns: by field name; ``schedule``, ``recompute`` and ``offload`` as codes.
            splits: layers of each stage, for layouts that name them.
            files: schedules from files, whose codes follow those of the known ones.
        """
        zeros = {"zero", "recompute", "sequence", "schedule", "rows", "offload", "secondary", "loss_chunk"}
        zeros |= {"compress", "compress_weights", "low_rank", "inverse_density", "tp_overlap", "ep_node", "ep_overlap"}
        zeros |= {"ep_halves", "ep_keep", "compress_tokens", "recompute_rest"}
        names = array_fields()
        values = {
            name: np.atleast_1d(np.asarray(columns.get(name, 0 if name in zeros else 1), float)) for name in names
        }
        arrays = np.broadcast_arrays(*values.values())
        kept_splits = tuple(splits) if any(split is not None for split in splits) else ()
        return cls(**dict(zip(names, arrays)), splits=kept_splits, files=files)

    @classmethod
    def from_layouts(
        cls, layouts: Sequence[Layout], layers: int, scales: tuple[float, float] = (1.0, 1.0)
    ) -> LayoutBatch:
        """Builds a batch from layouts.

        Args:
            layouts: N of them.
            layers: number of the model's layers, to which ``full:3`` refers.
            scales: measured rates over the catalogue's, inside and between nodes.
        """
        names = [layout.schedule or DEFAULT_SCHEDULE for layout in layouts]
        files = tuple(dict.fromkeys(name for name in names if name not in schedule_names()))
        for layout, name in zip(layouts, names):
            if name in files:
                layout.pipeline()  # raises where the file is for other sizes
        codes = {name: code for code, name in enumerate((*schedule_names(), *files))}
        rows = [_row(layout, layers) | {"schedule": codes[name]} for layout, name in zip(layouts, names)]
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        splits = [tuple(map(float, layout.split.layers)) or None for layout in layouts]
        return cls.of(columns | {"inside_scale": scales[0], "outside_scale": scales[1]}, splits, files)


def array_fields() -> list[str]:
    """Returns the names of the fields of `LayoutBatch` that are arrays (N,)."""
    return [item.name for item in dataclasses.fields(LayoutBatch) if item.name not in ("splits", "files")]


def _row(layout: Layout, layers: int) -> dict[str, float]:
    row: dict[str, float] = dict(column_degrees(layout))
    return row | {
        "zero": layout.zero,
        "microbatches": layout.microbatches,
        "recompute": RECOMPUTES.index(layout.recompute.mode),
        "recompute_share": layout.recompute.share(layers),
        "recompute_rest": RECOMPUTES.index(layout.recompute.rest),
        "sequence": layout.sequence,
        "tp_overlap": layout.tp_overlap,
        "ep_node": layout.ep_node,
        "ep_overlap": layout.ep_overlap,
        "ep_halves": layout.ep_halves,
        "ep_keep": layout.ep_keep,
        "offload": OFFLOADS.index(layout.offload),
        "stages": layout.stages_per_rank,
        "compress": COMPRESSIONS.index(layout.compress.name),
        "node_copies": layout.compress.node_copies,
        "low_rank": layout.compress.rank,
        "inverse_density": layout.compress.inverse_density,
        "compress_weights": COMPRESSIONS.index(layout.compress_weights),
        "compress_tokens": layout.compress_tokens != "none",
        "secondary": layout.secondary,
        "loss_chunk": layout.loss_chunk.tokens,
    }
