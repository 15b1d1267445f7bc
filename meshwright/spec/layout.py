"""A layout: the degree of every axis and the choices that go with them, which planner and runtime agree on.

Its text form is what a user types and what every log line carries:
``replicate=2,shard=2,zero=3,microbatches=4,recompute=full``. Keys that stand at their default are left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from meshwright.errors import PlanError, nearest
from meshwright.json_types import JsonObject
from meshwright.schedules.action import Schedule
from meshwright.schedules.file import build_schedule, find_choice
from meshwright.spec.axes import known_axes
from meshwright.spec.axis import Holds, Mechanics
from meshwright.spec.compression import Compression
from meshwright.spec.error_feedback import error_feedback_refusal
from meshwright.spec.groups import (
    axis_with,
    describe_rank,
    gradient_axes,
    island_count,
    island_index,
    mesh_shape,
    reader,
    round_axes,
    row_axes,
    state_copies,
    world_size,
)
from meshwright.spec.layout_choices import BatchShares, LossChunk, Recompute, StageSplit, parse_choice, parse_int
from meshwright.spec.layout_fields import (
    DEFAULT_SCHEDULE,
    FLOAT8_RECIPES,
    MECHANICS_OF_CHOICE,
    LayoutFields,
)
from meshwright.spec.layout_rules import check_layout, expert_node_over, secondary_over

HOST_CHUNK = 1 << 23
"""Weights that are updated in host memory between two copies to the device. 32 MiB of float32: on an H100's host of 16
cores a copy of 0.6 ms and an update of 1.5 ms, beside the 0.1 ms that the host takes to begin them."""
SECONDARY = "secondary"
"""Name under which gathers of the secondary copy of the weights are booked."""
EXPERT_NODE = "ep_node"
"""Name under which what ``ep_node`` sends between neighbours of ``ep`` is booked."""
_GRAMMARS: Mapping[str, type[Recompute | StageSplit | BatchShares | Compression | LossChunk]] = {
    "recompute": Recompute,
    "split": StageSplit,
    "rows": BatchShares,
    "compress": Compression,
    "loss_chunk": LossChunk,
}
"""Choices that have a text form of their own."""
LOSSY_CHOICES = ("compress", "compress_weights", "compress_tokens")
"""Choices by which ranks send each other less than exact values; ``none`` sends these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout(LayoutFields):
    """The degrees of every axis and the choices that go with them; all that the runtime needs to build a program.

    `LayoutFields` says what each choice means, `spec.layout_rules` which go together.
    """

    def __post_init__(self) -> None:
        """Refuses values that no run could have; choices with a grammar may be given as text."""
        for name, kind in _GRAMMARS.items():
            if isinstance(value := getattr(self, name), str):
                # The dataclass is frozen; parsing is part of building it.
                object.__setattr__(self, name, kind.parse(value))
        axes = known_axes()
        for name, degree in self.degrees.items():
            if name not in axes:
                raise PlanError(f"unknown axis '{name}'{nearest(name, axes)}")
            if not isinstance(degree, int) or degree < 1:
                raise PlanError(f"{name}={degree}: a degree is a whole number of at least 1")
        # In the axes' order and without degree 1, so that equal layouts compare and print alike.
        used_degrees = {name: self.degrees[name] for name in axes if self.degrees.get(name, 1) > 1}
        object.__setattr__(self, "degrees", used_degrees)
        check_layout(self)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads the text form.

        Raises:
            PlanError: for an unknown key (naming the nearest), a repeated key, or a value that can't be.
        """
        choices = {item.name: item for item in dataclasses.fields(cls) if item.name != "degrees"}
        degrees: dict[str, int] = {}
        values: dict[str, Any] = {}
        for assignment in (assignment.strip() for assignment in text.split(",")):
            if not assignment:
                continue
            key, equals, value = (token.strip() for token in assignment.partition("="))
            if not equals or not value:
                raise PlanError(f"layout: '{assignment}' has no value; write key=value,key=value")
            if key in degrees or key in values:
                raise PlanError(f"layout: '{key}' is given twice")
            if key in known_axes():
                degrees[key] = parse_int(key, value)
            elif key in choices:
                values[key] = parse_choice(key, value, str(choices[key].type))
            else:
                raise PlanError(f"layout: unknown key '{key}'{nearest(key, [*known_axes(), *choices])}")
        # A shard axis without a level means ZeRO 3.
        if "zero" not in values and _shards_rows(degrees):
            values["zero"] = 3
        return cls(degrees=degrees, **values)

    def __str__(self) -> str:
        """Returns the text form; ``replicate=1`` for a single rank with every choice at its default."""
        assignments = [f"{name}={degree}" for name, degree in self.degrees.items()]
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name != "degrees" and value != item.default:
                assignments.append(f"{item.name}={str(value).lower() if isinstance(value, bool) else value}")
        return ",".join(assignments) or "replicate=1"

    def __hash__(self) -> int:
        """Returns the hash of its text, which equal layouts share; degrees, a mapping, have none."""
        return hash(str(self))

    @property
    def world(self) -> int:
        """Number of ranks."""
        return world_size(self.degrees)

    @property
    def is_mixed_precision(self) -> bool:
        """Whether compute runs in a lower precision than the master weights."""
        return self.compute_precision in ("bf16", "fp16")

    @property
    def compute_precision(self) -> str:
        """Data type of gathered weights and activations."""
        if self.precision == "tf32":
            return "float32"
        return "bf16" if self.precision in FLOAT8_RECIPES else self.precision

    @property
    def has_compute_copies(self) -> bool:
        """Whether each rank keeps all of its weights in the type of compute, beside their masters.

        The masters are whole and on the device, no schedule frees the weights of a stage, and gradients are summed
        exactly: rounded ones travel by FSDP unit.
        """
        rests = self.zero == 0 and self.offload != "parameters" and self.degree(Mechanics.STAGES) == 1
        return self.is_mixed_precision and rests and not self.compress

    @property
    def has_host_masters(self) -> bool:
        """Whether a single rank keeps all of its weights on the device to compute, and their masters in host memory."""
        return self.offload == "parameters" and self.world == 1

    @property
    def sums_no_gradients(self) -> bool:
        """Whether no axis has ranks that read other data than their peers and so sum gradients with them."""
        return all(self.degree(axis) == 1 for axis in gradient_axes(()))

    @property
    def product_precision(self) -> str:
        """Data type of products of matrices where it differs from `compute_precision`; else empty."""
        if self.precision == "tf32":
            return "tf32"
        return "fp8" if self.precision in FLOAT8_RECIPES else ""

    def pipeline(self) -> Schedule:
        """Builds the schedule; of one rank and stage without ``pp``.

        Where layers recompute, no backward is split: each group of weights of its second half would run the layer's
        forward again, about ten times in all, which selective recompute refuses. With ``tp_overlap`` weight gradients
        hide the sums of input gradients, so both belong to one half; with ``ep_halves`` a weight is used twice, which
        torch's halves of a backward count once.

        Raises:
            PlanError: there is no such schedule, or it doesn't fit.
        """
        name = self.schedule or DEFAULT_SCHEDULE
        schedule = build_schedule(name, self.degree(Mechanics.STAGES), self.stages, self.microbatches)
        return schedule.unsplit() if self.recompute or self.tp_overlap or self.ep_halves else schedule

    @property
    def unsplit_backward_reason(self) -> str:
        """Why the schedule's backward isn't split though it could be, in a clause; empty where that isn't so."""
        splits = self.degree(Mechanics.STAGES) > 1 and find_choice(self.schedule or DEFAULT_SCHEDULE).splits_backward
        if not splits or not (self.recompute or self.tp_overlap or self.ep_halves):
            return ""
        if self.ep_halves:
            return (
                f"schedule={self.schedule} runs each backward whole with ep_halves=true, since a half of it would take "
                "apart what the turns of two halves share, so it fills no bubble with weight gradients"
            )
        if not self.recompute:
            return (
                f"schedule={self.schedule} runs each backward whole with tp_overlap={self.tp_overlap}, whose sums hide "
                "under the weight gradients, so it fills no bubble with them"
            )
        return (
            f"schedule={self.schedule} runs each backward whole under recompute={self.recompute}, since a half would "
            "run the layers' forward again for each group of weights, so it fills no bubble with weight gradients"
        )

    @property
    def stages_per_rank(self) -> int:
        """Stages that each rank of ``pp`` runs, 1 without a pipeline.

        Raises:
            PlanError: there is no such schedule.
        """
        return self.stages or find_choice(self.schedule or DEFAULT_SCHEDULE).least_stages

    def shape(self) -> dict[str, int]:
        """Returns the mesh's axes and sizes, outermost first."""
        return mesh_shape(self.degrees)

    @property
    def is_lossy(self) -> bool:
        """Whether ranks send each other less than exact values, which trains otherwise than these."""
        return any(str(getattr(self, name)) != "none" for name in LOSSY_CHOICES)

    @property
    def islands(self) -> int:
        """Number of islands: groups of ranks that take each step together and join once in a round; usually 1."""
        return island_count(self.degrees)

    def island(self, rank: int) -> int:
        """Returns the index of a rank's island."""
        return island_index(rank, self.degrees)

    def within_island(self) -> Layout:
        """Returns the layout of the first island's ranks by themselves; itself where there is one island."""
        return self.with_islands(1)

    def with_islands(self, islands: int) -> Layout:
        """Returns the layout of the first so many islands, at most as many as there are."""
        if self.islands == islands:
            return self
        degrees = {name: degree for name, degree in self.degrees.items() if name not in round_axes()}
        degrees |= {round_axes()[0]: islands}
        shares = self.rows.shares[: reader(0, degrees)[1]]
        rows = BatchShares.of(shares) if len(set(shares)) > 1 else BatchShares()
        return dataclasses.replace(self, degrees=degrees, rows=rows)

    def reader(self, rank: int) -> tuple[int, int]:
        """Returns (index, count): which part of each global batch a rank reads."""
        return reader(rank, self.degrees)

    def reader_shares(self) -> list[int]:
        """Returns the share of each reader in the rows of every micro-batch."""
        return list(self.rows.shares) or [1] * reader(0, self.degrees)[1]

    def span(self, rank: int, rows: int) -> tuple[int, int]:
        """Returns (first row, row after the last) of a global batch of ``rows`` that a rank reads."""
        index, shares = self.reader(rank)[0], self.reader_shares()
        # Rows of one share; the batch divides by `batch_unit`.
        unit = rows // sum(shares)
        return unit * sum(shares[:index]), unit * sum(shares[: index + 1])

    @property
    def calls(self) -> int:
        """Number of forwards in which a reader's rows of a step go through the model."""
        return self.microbatches * (2 if self.ep_halves else 1)

    @property
    def batch_unit(self) -> int:
        """The rows of a global batch must be a multiple of this."""
        return sum(self.reader_shares()) * self.microbatches

    def describe_rank(self, rank: int) -> str:
        """Returns ``rank 3: replicate 1, shard 1``."""
        return describe_rank(rank, self.degrees)

    def coordinates(self, rank: int) -> str:
        """Returns ``replicate 1, shard 1``; empty when there is one rank."""
        return self.describe_rank(rank).partition(": ")[2]

    def check_ranks(self, ranks: int) -> None:
        """Refuses degrees that don't multiply to the ranks.

        Raises:
            PlanError: names the product and the nearest layout that works.
        """
        if self.world == ranks:
            return
        # An axis that carves others' ranks (ep) multiplies nothing.
        product = " x ".join(f"{name} {degree}" for name, degree in self.shape().items() if degree > 1) or "1"
        raise PlanError(
            f"layout {self}: its degrees multiply to {self.world} ({product}), but there are {ranks} ranks; "
            f"nearest that works: --layout {self._with_ranks(ranks)}, or --devices {self.world}"
        )

    def check_batch(self, rows: int) -> None:
        """Refuses a global batch of ``rows`` that readers and micro-batches don't divide.

        Raises:
            PlanError: names the numbers and the nearest batches that work.
        """
        unit = self.batch_unit
        if rows % unit:
            near = [size for size in (rows // unit * unit, (rows // unit + 1) * unit) if size]
            whom = f"shares of {self.rows}" if self.rows else f"{unit // self.microbatches} readers"
            raise PlanError(
                f"batch of {rows} rows doesn't divide over {whom} x {self.microbatches} micro-batches; "
                f"nearest that works: {' or '.join(str(size) for size in near)} rows"
            )
        fewest = rows // unit * min(self.reader_shares())
        if self.ep_halves and fewest < 2:
            raise PlanError(
                "ep_halves=true halves the rows of a micro-batch, and this one has 1; nearest that works: "
                + (f"microbatches={self.microbatches // 2}" if self.microbatches % 2 == 0 else f"{2 * rows} rows")
            )

    def _with_ranks(self, ranks: int) -> Layout:
        """Returns the layout with the fewest changed degrees that has this many ranks."""
        copies, shards = row_axes(Holds.COPY)[0], row_axes(Holds.SHARD)[0]
        # One degree changes, that of the innermost axis where it can.
        for name in reversed([name for name in mesh_shape({}) if self.degree(name) > 1] or [copies]):
            other_ranks = math.prod(degree for other_axis, degree in self.shape().items() if other_axis != name)
            if ranks % other_ranks == 0:
                return self._with_mesh({**self.degrees, name: ranks // other_ranks})
        return self._with_mesh({shards: ranks} if self.zero else {copies: ranks})

    def _with_mesh(self, degrees: Mapping[str, int]) -> Layout:
        """Returns the layout over other degrees; an axis that carves their ranks gets the largest degree that fits."""
        fitting = dict(degrees)
        for name in degrees:
            if carves := known_axes()[name].carves:
                fitting[name] = math.gcd(degrees[name], math.prod(degrees.get(axis, 1) for axis in carves))
        return self.with_degrees(fitting)

    def with_degrees(self, degrees: Mapping[str, int]) -> Layout:
        """Returns the same choices over other degrees; the ZeRO level drops to 0 when nothing is left to shard over."""
        changes: dict[str, Any] = {"zero": (self.zero or 3) if _shards_rows(degrees) else 0}
        # Shares belong to a number of readers; another number has equal ones.
        changes |= {} if reader(0, degrees)[1] == reader(0, self.degrees)[1] else {"rows": BatchShares()}
        defaults = {item.name: item.default for item in dataclasses.fields(self)}
        changes |= {} if changes["zero"] else {"compress_weights": defaults["compress_weights"]}
        changes["secondary"] = secondary_over(self.secondary, degrees, changes["zero"])
        changes["ep_node"] = expert_node_over(self.ep_node, degrees)
        if changes["zero"] == 3 and degrees.get(axis_with(Mechanics.STAGES, degrees), 1) == 1:
            changes["ep_halves"] = False
        changes["compress"] = self.compress.over(state_copies(degrees, changes["zero"]))
        if self.compress.keeps_errors and error_feedback_refusal(degrees, self.offload):
            changes["compress"] = defaults["compress"]
        for name, mechanics in MECHANICS_OF_CHOICE.items():
            # A choice without its axis would be refused.
            if degrees.get(axis_with(mechanics, degrees), 1) == 1:
                changes[name] = defaults[name]
        return dataclasses.replace(self, degrees=dict(degrees), **changes)

    def to_json(self) -> dict[str, object]:
        """Returns plain values that `from_json` takes back."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        texts = {name: str(values[name]) for name in _GRAMMARS}
        return {"text": str(self)} | values | {"degrees": dict(self.degrees)} | texts

    @classmethod
    def from_json(cls, values: JsonObject) -> Self:
        """Builds the layout from `to_json`'s values."""
        return cls(**{key: value for key, value in values.items() if key != "text"})


def _shards_rows(degrees: Mapping[str, int]) -> bool:
    """Returns whether the degrees use an axis that shards state over ranks with other rows."""
    return any(degrees.get(name, 1) > 1 for name in row_axes(Holds.SHARD))
