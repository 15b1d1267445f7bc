"""Defines a price: time and memory by part, as arrays over N layouts and as numbers of one layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.planner.cost.layout_batch import Array
from meshwright.spec.axis import Mechanics

LAYER_TRAFFIC = tuple(mechanics.value for mechanics in (Mechanics.MATRICES, Mechanics.TOKENS, Mechanics.EXPERTS))
"""Parts of traffic inside layers: tp, cp and ep."""
PARTS = (
    "matmul", "attention", "elementwise", "recompute", *LAYER_TRAFFIC, "host", "engine", "send", "bubble",
    "gather", "reduce", "offload", "optimizer", "step", "stragglers",
)  # fmt: skip
"""Parts of a step's time; they sum to it. ``host``: the device waits for launches; ``engine``: the pipeline engine's
own; ``send``: between stages; ``gather``: ZeRO-3's parameters; ``reduce``: gradients; ``offload``: copies to and from
host memory; ``step``: once a step; ``stragglers``: waiting for the slowest node."""
TRAFFIC_WORK = "traffic_work"
"""Part of a step that prices by measured rates have besides: what a rank itself works for gathers and sums, rounding,
copying and a core's own for bytes over a network, so that ``gather`` and ``reduce`` are waiting alone."""
MEMORY = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "reserve")
"""Parts of a rank's memory."""


def straggler_share_of(parts: Mapping[str, float]) -> float:
    """Returns what a step waits for the slowest of its nodes, over its other parts."""
    other_s = sum(seconds for name, seconds in parts.items() if name != "stragglers")
    return parts["stragglers"] / other_s if other_s else 0.0


def with_straggler_share(parts: Mapping[str, float], share: float) -> dict[str, float]:
    """Returns the parts with what the step waits for its slowest node, a share of all others."""
    other_s = sum(seconds for name, seconds in parts.items() if name != "stragglers")
    return {**parts, "stragglers": share * other_s}


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """Time and memory of N layouts; arrays are (N,) float64."""

    step_s: Array
    """Seconds of a step, (N,)."""
    parts: Mapping[str, Array]
    """Seconds by part, which sum to ``step_s``."""
    memory: Mapping[str, Array]
    """Bytes of the fullest rank by part."""
    allocated: Array
    """Bytes of live tensors on the fullest rank."""
    reserved: Array
    """Bytes that its caching allocator has reserved."""
    peak: Array
    """Bytes of its device that are in use, context and communicators included: must fit."""
    host: Array
    """Bytes in host memory of the rank with the most."""
    unoffloaded_peak: Array
    """`peak` without offload; 0 if no layout of the batch offloads."""
    first_allocated: Array
    """`allocated` of the first stage's ranks."""
    first_reserved: Array
    """`reserved` of them."""
    fullest: Array
    """Index along pp of the fullest rank."""

    def take(self, index: Array) -> Prices:
        """Returns the prices of some of the layouts, by mask or index."""
        fields: dict[str, Any] = {}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            selected = (
                {key: values[index] for key, values in value.items()} if isinstance(value, Mapping) else value[index]
            )
            fields[item.name] = selected
        return Prices(**fields)

    def parts_of(self, layout_index: int) -> dict[str, float]:
        """Returns parts of a layout's time as plain numbers."""
        return {name: float(values[layout_index]) for name, values in self.parts.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePrice:
    """Price of one rank of the pipeline."""

    layers: tuple[tuple[int, int], ...]
    """(start, stop) of the layers of each of its stages."""
    forward_s: float
    """Seconds of a micro-batch's forward, exposed traffic included."""
    backward_s: float
    """Seconds of a micro-batch's backward, exposed traffic included."""
    held: float
    """Most in-flight micro-batches, whose activations it holds; a key of `plan --json`."""
    memory: Mapping[str, float]
    """Bytes by part of `MEMORY` at its fullest moment."""
    most: Mapping[str, float]
    """Bytes by part but the reserve, each when it is most; some of them never exist at once."""
    peak: float
    """Sum of `memory`."""
    allocated: float
    """Bytes of live tensors, and of workspaces of libraries, at its fullest moment."""
    host: float = 0.0
    """Bytes in host memory."""


def layer_span(first: StagePrice, last: StagePrice) -> str:
    """Returns the layers from one rank's to another's as ``0-3`` or ``0-3, 16-19``, stage by stage.

    It is "none" where they have but the embedding or the head.

    Args:
        first: rank along pp.
        last: the same rank, or a later one.
    """
    spans = []
    for stages in zip(first.layers, last.layers, strict=True):
        # Of a schedule that turns back, later ranks have the earlier layers.
        start, stop = min(start for start, _ in stages), max(stop for _, stop in stages)
        spans += [f"{start}-{stop - 1}"] if stop > start else []
    return ", ".join(spans) or "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """Time, memory and traffic of one layout."""

    step_s: float
    """Seconds of a step."""
    parts: Mapping[str, float]
    """Seconds by part; they sum to it."""
    stages: tuple[StagePrice, ...]
    """Each rank of the pipeline."""
    fullest: int
    """Index of the rank with the most memory."""
    memory: Mapping[str, float]
    """Bytes of the fullest rank by part, at its fullest moment."""
    most: Mapping[str, float]
    """The same of each part when it is most."""
    peak: float
    """Bytes in use on the fullest rank's device."""
    allocated: float
    """Of these, those of live tensors and of workspaces of libraries."""
    host: float = 0.0
    """Bytes in host memory of the rank with the most."""
