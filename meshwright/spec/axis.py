"""The contract of a mesh axis: it states facts, and every group that training needs follows from them.

A file of `spec/axes/` exports one `AXIS`; where the axis changes modules, a file of `parallel/` has the mechanics. What
its ranks read, what they hold, and its order in the mesh is all that `spec.groups` needs to derive which rank loads
which rows, which ranks sum a gradient or a norm, and which rank writes a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Reads(Enum):
    """What the ranks along an axis read, compared with each other."""

    SAME = "same"
    """The same rows and tokens (tensor, pipeline)."""
    ROWS = "rows"
    """Other rows of the global batch (replicate, shard)."""
    TOKENS = "tokens"
    """Other tokens of the same rows (context)."""


class Holds(Enum):
    """What the ranks along an axis hold of a weight that the axis applies to, between steps."""

    COPY = "copy"
    """A full copy."""
    SHARD = "shard"
    """A part of each weight."""
    STAGE = "stage"
    """Some of the layers."""


class Joins(Enum):
    """When the copies of a weight along an axis become equal again."""

    STEP = "step"
    """In every step: gradients are summed, so copies are equal between steps."""
    ROUND = "round"
    """Once in a round of many steps (`train.outer`): copies differ in between, and each has optimizer state of its own.

    Loss, gradients, norm and the decision to skip a step stay inside an island: the ranks at one index of such axes.
    """


class Mechanics(Enum):
    """How an axis changes what the ranks compute: which formulas of the planner price it and list its traffic.

    The value is the symbol that the planner's arrays and price parts have for it. An axis with mechanics that no member
    describes adds one; until the planner has formulas for it, it refuses layouts with the axis.
    """

    NONE = "none"
    """Not at all: who sums which gradients and who shares which state follow from the facts, and so does the price."""
    STAGES = "pp"
    """Micro-batches pass through stages in the order of a schedule."""
    TOKENS = "cp"
    """Attention exchanges heads or gathers keys and values."""
    MATRICES = "tp"
    """Products are split by columns and rows, attention by heads, the vocabulary by rows."""
    EXPERTS = "ep"
    """Tokens travel to the ranks that hold their experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """Facts of one mesh axis.

    ``order`` is the axis's position in the mesh, outermost first: the nearest ranks are neighbours along the last axis.
    ``carves`` names the axes whose ranks this one factorises a second time (expert over shard, context and tensor); an
    axis that carves multiplies nothing into the world size. Two axes of the same mechanics, such as a copy of one
    under another name, can't be used in one layout.
    """

    name: str
    reads: Reads
    holds: Holds
    order: int
    purpose: str
    carves: tuple[str, ...] = ()
    joins: Joins = Joins.STEP
    """When its ranks' copies become equal again."""
    mechanics: Mechanics = Mechanics.NONE
    """Of an axis that changes modules: how."""
    aliases: tuple[str, ...] = ()
    """Other names of it, as meshes of user code have them."""
