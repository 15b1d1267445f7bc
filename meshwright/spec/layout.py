# long: a layout's degrees, choices and text form are one class
"""A layout: the degree of every axis and the choices that go with them, which planner and runtime agree on.

Its text form is what a user types and what every log line carries:
``replicate=2,shard=2,zero=3,microbatches=4,recompute=full``. Keys that stand at their default are left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from meshwright.errors import PlanError, nearest
from meshwright.json_types import JsonObject
from meshwright.schedules.action import Schedule
from meshwright.schedules.file import build_schedule, find_choice
from meshwright.spec.axes import known_axes
from meshwright.spec.axis import Holds, Mechanics
from meshwright.spec.compression import TOKEN_FORMATS, WEIGHT_FORMATS, Compression
from meshwright.spec.error_feedback import check_error_feedback, error_feedback_refusal
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
    state_axes,
    state_shards,
    world_size,
)
from meshwright.spec.layout_choices import BatchShares, LossChunk, Recompute, StageSplit, parse_choice, parse_int

FLOAT8_RECIPES = {"fp8": "tensorwise", "fp8_rowwise": "rowwise"}
"""Precisions whose products of matrices are in float8 and the rest in bf16, each with torchao's name of its scales."""
PRECISIONS = ("float32", "float64", "tf32", "bf16", "fp16", *FLOAT8_RECIPES)
OFFLOADS = ("none", "optimizer", "parameters")
HOST_CHUNK = 1 << 23
"""Weights that are updated in host memory between two copies to the device. 32 MiB of float32: on an H100's host of 16
cores a copy of 0.6 ms and an update of 1.5 ms, beside the 0.1 ms that the host takes to begin them."""
ATTENTIONS = ("heads", "gather", "ring")
"""Ways in which ``cp`` computes attention."""
BALANCED_ATTENTIONS = ("gather", "ring")
"""Those under which a rank has an early and a late run of each row, for balance (`spec.key_ring`)."""
DEFAULT_SCHEDULE = "1f1b"
"""Where there is a pipeline and the layout names no schedule."""
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
_CHOICES_OF: Mapping[str, Mechanics] = {
    "schedule": Mechanics.STAGES,
    "stages": Mechanics.STAGES,
    "split": Mechanics.STAGES,
    "sequence": Mechanics.MATRICES,
    "tp_overlap": Mechanics.MATRICES,
    "attention": Mechanics.TOKENS,
    "ep_node": Mechanics.EXPERTS,
    "ep_overlap": Mechanics.EXPERTS,
    "ep_halves": Mechanics.EXPERTS,
    "ep_keep": Mechanics.EXPERTS,
    "compress_tokens": Mechanics.EXPERTS,
}
"""Choices that say something about an axis of some mechanics, and have no effect without one."""
LOSSY_CHOICES = ("compress", "compress_weights", "compress_tokens")
"""Choices by which ranks send each other less than exact values; ``none`` sends these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The degrees of every axis and the choices that go with them; all that the runtime needs to build a program."""

    degrees: Mapping[str, int] = field(default_factory=dict)
    """Axis name to degree; axes of degree 1 are left out."""
    zero: int = 0
    """ZeRO level over ``shard``: 0 copies everything, 1 shards optimizer state, 2 gradients too, 3 parameters too."""
    microbatches: int = 1
    """Micro-batches that every rank runs before one optimizer step."""
    recompute: Recompute = Recompute()  # noqa: RUF009 - frozen
    """``none``; ``full``: keep a layer's input alone; ``selective``: keep products of matrices, recompute the rest.
    ``full:3`` and ``selective:3`` do so in 3 of the layers, evenly spaced; with ``full:3+selective`` all others keep
    products of matrices."""
    precision: str = "float32"
    """``float32``, ``float64``; ``tf32``: float32 with products of matrices that GPUs round to TF32; ``bf16`` or
    ``fp16``: compute in it over float32 master weights and reductions; ``fp8`` or ``fp8_rowwise``: as ``bf16``, with
    the layers' products of matrices in float8, scaled by tensor or by row."""
    offload: str = "none"
    """``optimizer``: optimizer state and update in host memory; ``parameters``: parameters and gradients as well."""
    compile: bool = False
    """Run each layer through torch.compile."""
    schedule: str = ""
    """Order of work along ``pp``: a name of ``python -m meshwright.schedules``, or ``file:PATH``; empty is ``1f1b``."""
    stages: int = 0
    """Stages that each rank of ``pp`` runs; 0 is what the schedule asks for."""
    split: StageSplit = StageSplit()  # noqa: RUF009 - frozen
    """Layers of each stage in order, as ``5-7-6-6``; empty balances by cost."""
    sequence: bool = False
    """Between the parts that ``tp`` shards, split the tokens over its ranks (sequence parallel)."""
    tp_overlap: int = 0
    """Chunks of tokens in which linear layers next to ``tp``'s collectives compute, so that one chunk travels while the
    next is computed; with 1 backward's sums alone hide, under the products of weight gradients; 0 waits for each."""
    attention: str = ""
    """How ``cp`` computes attention: ``heads`` exchanges tokens for heads, ``gather`` collects keys and values; empty
    takes heads where they divide, else gather."""
    ep_node: int = 0
    """Neighbouring ranks of ``ep``, those of a node, to which a token travels once, however many of its experts they
    hold; inside it goes once to each rank that has some. With 1 it goes once to each rank; 0 sends it once for each of
    its experts."""
    ep_overlap: int = 0
    """Chunks of tokens, of which one travels to its experts and back while the experts compute another; 0 computes the
    tokens of a micro-batch as one."""
    ep_halves: bool = False
    """Run a micro-batch's rows as two halves that go through the layers in turns: what one has sent to its experts, or
    back, travels while the other computes."""
    ep_keep: bool = False
    """Under ``recompute`` keep what came from the ranks of ``ep``, and compute again without another exchange."""
    rows: BatchShares = BatchShares()  # noqa: RUF009 - frozen
    """Share of each reader in every micro-batch's rows, as ``5-3`` for two readers of unequal speed; empty shares them
    evenly. Losses and gradients are weighted by tokens, so the training is the same."""
    compress: Compression = Compression()  # noqa: RUF009 - frozen
    """Numbers or matrices in which gradients are summed over copies (`Compression`); ``none`` sums exactly."""
    compress_weights: str = "none"
    """Numbers in which ZeRO gathers weights: ``none`` for those of compute, ``int8``, ``fp8``."""
    compress_tokens: str = "none"
    """Numbers in which tokens go to the ranks of their experts, and in backward the gradients of what these return:
    ``none`` for those of compute, ``fp8``. What comes back is exact."""
    secondary: int = 0
    """Neighbouring ranks that share each layer's gathered weights from forward to backward under ZeRO-3, so that
    backward gathers among them alone; 0 for all ranks that share the state."""
    loss_chunk: LossChunk = LossChunk()  # noqa: RUF009 - frozen
    """Tokens whose logits exist at once, where the model's are a linear function of its last hidden state: ``auto``
    lets the device decide, ``off`` makes the logits of the whole micro-batch, ``1024`` those of 1024 tokens."""

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
        self._check_choices()

    def _check_choices(self) -> None:
        if self.zero not in (0, 1, 2, 3):
            raise PlanError(f"zero={self.zero}: the ZeRO level is 0, 1, 2 or 3")
        copies, shards = row_axes(Holds.COPY), row_axes(Holds.SHARD)
        name = next((name for name in shards if self.degree(name) > 1), shards[0])
        shard = self.degree(name)
        if self.zero and shard == 1:
            ranks = math.prod(self.degree(copy_axis) for copy_axis in copies)
            cure = f"{name}={ranks},zero={self.zero}" if ranks > 1 else "zero=0"
            raise PlanError(f"zero={self.zero} shards over the axis '{name}', whose degree is 1; write {cure}")
        if shard > 1 and not self.zero:
            cure = f"{copies[0]}={shard}, or zero=1, 2 or 3"
            raise PlanError(f"{name}={shard} with zero=0 shards nothing; write {cure}")
        self.compress.check(self.copies, (copies[0], shards[0], shard))
        if self.compress.keeps_errors:
            check_error_feedback(str(self.compress), self.degrees, self.offload)
        if self.compress_weights != "none" and not self.zero:
            raise PlanError(
                f"compress_weights rounds what ZeRO gathers, and zero=0 gathers none; write {name}=2,zero=3"
            )
        self._check_secondary()
        self._check_overlap()
        self._check_expert_node()
        if self.microbatches < 1:
            raise PlanError(f"microbatches={self.microbatches}: it is a whole number of at least 1")
        for name, value, known_values in (
            ("precision", self.precision, PRECISIONS),
            ("offload", self.offload, OFFLOADS),
            ("compress_weights", self.compress_weights, WEIGHT_FORMATS),
            ("compress_tokens", self.compress_tokens, TOKEN_FORMATS),
        ):
            if value not in known_values:
                raise PlanError(f"{name}={value} is unknown{nearest(value, known_values)}")
        self._check_axes()

    def _check_secondary(self) -> None:
        """Refuses a secondary copy of the weights that no backward would read, and runs that don't divide the ranks."""
        size, shards = self.secondary, self.state_shards
        if not size:
            return
        if self.zero != 3:
            raise PlanError(
                f"secondary={size} says how ZeRO-3 keeps weights between forward and backward, and zero={self.zero} "
                "frees none in between; write zero=3, or drop it"
            )
        if self.degree(Mechanics.STAGES) > 1:
            raise PlanError(
                f"secondary={size} has no effect with {self.format_degree(Mechanics.STAGES)}: a pipeline keeps the "
                "weights of its stages gathered between forward and backward; drop it"
            )
        if not _fits_secondary(size, shards):
            fitting = [count for count in range(2, shards) if _fits_secondary(count, shards)]
            nearest_size = min(fitting, key=lambda count: abs(count - size), default=0)
            raise PlanError(
                f"secondary={size}: runs of 2 ranks or more must divide the {shards} ranks that share the state, and "
                f"be fewer; nearest that works: " + (f"secondary={nearest_size}" if nearest_size else "drop it")
            )

    def _check_overlap(self) -> None:
        """Refuses chunks of no number, and products that can't be divided into chunks."""
        if self.tp_overlap < 0:
            raise PlanError(f"tp_overlap={self.tp_overlap}: it is a number of chunks, 1 or more, or 0 for none")
        if self.tp_overlap and self.precision in FLOAT8_RECIPES:
            raise PlanError(
                f"tp_overlap={self.tp_overlap} computes products in chunks of tokens, and precision={self.precision} "
                "computes them whole, by torchao's kernels; nearest that works: precision=bf16, or drop tp_overlap"
            )

    def _check_expert_node(self) -> None:
        """Refuses nodes that aren't runs of the ranks of ``ep``, and chunks of no number."""
        if self.ep_overlap < 0 or self.ep_overlap == 1:
            raise PlanError(
                f"ep_overlap={self.ep_overlap}: it is a number of chunks, 2 or more, or 0 for none; nearest that "
                "works: ep_overlap=2"
            )
        if self.ep_halves and self.degree(Mechanics.EXPERTS) > 1 and not self.can_halve:
            raise PlanError(
                "ep_halves=true: while one half is in a layer the other leaves it, which at zero=3 frees the layer's "
                "weights, but in a pipeline; nearest that works: zero=2"
            )
        if self.ep_keep and not self.recompute:
            raise PlanError(
                "ep_keep=true keeps what recompute would exchange again, and recompute=none keeps it anyway; drop it, "
                "or write recompute=full"
            )
        degree = self.degree(Mechanics.EXPERTS)
        if not self.ep_node or degree == 1 or fits_expert_node(self.ep_node, degree):
            return
        fitting = [count for count in range(1, degree) if fits_expert_node(count, degree)]
        nearest_size = min(fitting, key=lambda count: abs(count - self.ep_node))
        raise PlanError(
            f"ep_node={self.ep_node}: runs of ranks of {self.format_degree(Mechanics.EXPERTS)} must divide them, and "
            f"be fewer; nearest that works: ep_node={nearest_size}"
        )

    def _check_axes(self) -> None:
        """Refuses choices of an axis that isn't used, and expert degrees that the other axes can't carry."""
        for name, mechanics in _CHOICES_OF.items():
            choice = getattr(self, name)
            if choice and choice != "none" and self.degree(mechanics) == 1:
                value, axis = str(choice).lower(), self.axis(mechanics)
                raise PlanError(f"{name}={value} has no effect without {axis}; write {axis}=2 or more, or drop it")
        if self.attention not in ("", *ATTENTIONS):
            raise PlanError(f"attention={self.attention} is unknown{nearest(self.attention, ATTENTIONS)}")
        if self.rows:
            self._check_shares()
        if self.stages < 0:
            raise PlanError(f"stages={self.stages}: each rank runs 1 stage or more")
        axes = known_axes()
        for name in self.degrees:
            axis_facts = axes[name]
            if axis_facts.mechanics is not Mechanics.NONE and name != (other_axis := self.axis(axis_facts.mechanics)):
                raise PlanError(
                    f"{other_axis}={self.degree(other_axis)} and {name}={self.degree(name)} both split the same work "
                    f"({axis_facts.mechanics.name.lower()}), which one axis does; write {other_axis}="
                    f"{self.degree(other_axis) * self.degree(name)}"
                )
            # An axis that carves (ep) factorises other axes' ranks a second time.
            carved_ranks = math.prod(self.degree(other_axis) for other_axis in axis_facts.carves)
            if axis_facts.carves and carved_ranks % self.degree(name):
                carved_names = " x ".join(axis_facts.carves)
                raise PlanError(
                    f"{name}={self.degree(name)} divides the ranks of {carved_names} a second time, and those are "
                    f"{carved_ranks}; nearest that works: {name}={math.gcd(carved_ranks, self.degree(name))}"
                )

    def _check_shares(self) -> None:
        readers = reader(0, self.degrees)[1]
        shares = self.rows.shares
        if len(shares) != readers:
            even = "-".join(["1"] * readers)
            raise PlanError(f"rows={self.rows} has {len(shares)} shares, but {readers} readers; for one, rows={even}")
        if len(set(shares)) == 1:
            raise PlanError(f"rows={self.rows} shares the rows evenly, which has no effect; drop it")

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

    def degree(self, axis: str | Mechanics) -> int:
        """Returns the size of an axis, or of the one that has some mechanics; 1 when it isn't used."""
        return self.degrees.get(axis if isinstance(axis, str) else self.axis(axis), 1)

    def axis(self, mechanics: Mechanics) -> str:
        """Returns the axis of some mechanics that is used, or the first that is known where none is."""
        return axis_with(mechanics, self.degrees)

    def format_degree(self, mechanics: Mechanics) -> str:
        """Returns the axis of some mechanics with its degree, as ``cp=2``."""
        return f"{self.axis(mechanics)}={self.degree(mechanics)}"

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
    def state_axes(self) -> tuple[str, ...]:
        """Axes over whose product the state of a weight is sharded; none at ``zero=0``."""
        return state_axes(self.zero)

    @property
    def state_shards(self) -> int:
        """Number of ranks that share the state of a weight."""
        return int(state_shards(self.degrees, self.zero))

    @property
    def copies(self) -> int:
        """Number of ranks that hold the same part of a weight's state, over which its gradient is summed."""
        return _count_copies(self.degrees, self.zero)

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
    def can_halve(self) -> bool:
        """Whether `ep_halves` is possible: the weights of a layer stay gathered until both halves have left it."""
        return self.degree(Mechanics.EXPERTS) > 1 and (self.zero < 3 or self.degree(Mechanics.STAGES) > 1)

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
        changes["compress"] = self.compress.over(_count_copies(degrees, changes["zero"]))
        if self.compress.keeps_errors and error_feedback_refusal(degrees, self.offload):
            changes["compress"] = defaults["compress"]
        for name, mechanics in _CHOICES_OF.items():
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


def secondary_over(size: int, degrees: Mapping[str, int], zero: int) -> int:
    """Returns the ranks that can share gathered weights between passes over other degrees: ``size``, or 0."""
    is_pipelined = degrees.get(axis_with(Mechanics.STAGES, degrees), 1) > 1
    fits = zero == 3 and not is_pipelined and _fits_secondary(size, int(state_shards(degrees, zero)))
    return size if fits else 0


def expert_node_over(size: int, degrees: Mapping[str, int]) -> int:
    """Returns the neighbours of ``ep`` that a token can travel to once over other degrees: ``size``, or 0."""
    degree = degrees.get(axis_with(Mechanics.EXPERTS, degrees), 1)
    return size if fits_expert_node(size, degree) else 0


def fits_expert_node(size: int, degree: int) -> bool:
    """Returns whether runs of ``size`` ranks are parts of ``degree`` ranks of ``ep``, as `Layout.ep_node` asks."""
    return 1 <= size < degree and degree % size == 0


def _fits_secondary(size: int, shards: int) -> bool:
    return 2 <= size < shards and shards % size == 0


def _shards_rows(degrees: Mapping[str, int]) -> bool:
    """Returns whether the degrees use an axis that shards state over ranks with other rows."""
    return any(degrees.get(name, 1) > 1 for name in row_axes(Holds.SHARD))


def _count_copies(degrees: Mapping[str, int], zero: int) -> int:
    return math.prod(degrees.get(name, 1) for name in gradient_axes(state_axes(zero)))
