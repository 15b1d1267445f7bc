"""The contract of a mesh axis: it states facts, and every group that training needs follows from them.

An axis file (`axes/<name>.py`) exports one `AXIS` and, when it changes modules, a `wrap(module, ...)`. What its
ranks read, what they hold, and where it stands in the mesh is all that `axes.groups` needs to derive who loads which
rows, over whom a gradient is summed, over whom a norm is summed and who writes a checkpoint.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from enum import Enum
from functools import cache


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """Facts of one mesh axis.

    ``order`` is the axis's place on the wire, outermost first: the nearest ranks are neighbours along the last axis.
    ``carves`` names the axes whose ranks this one factorises a second time (expert over shard, context and tensor); an
    axis that carves multiplies nothing into the world size.
    """

    name: str
    reads: Reads
    holds: Holds
    order: int
    purpose: str
    carves: tuple[str, ...] = ()


@cache
def known_axes() -> dict[str, Axis]:
    """Returns every axis that has a file in this folder, outermost first.

    A new axis joins by adding ``axes/<name>.py`` with an ``AXIS``; nothing else lists axes. These files import torch
    inside functions only, so that a layout can be read without it.
    """
    import meshwright.axes as folder

    found = []
    for entry in (entry for entry in pkgutil.iter_modules(folder.__path__) if not entry.ispkg):
        module = importlib.import_module(f"{folder.__name__}.{entry.name}")
        axis = getattr(module, "AXIS", None)
        if isinstance(axis, Axis):
            found.append(axis)
    found.sort(key=lambda axis: axis.order)
    return {axis.name: axis for axis in found}
