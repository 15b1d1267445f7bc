"""Activations as a model's own modules keep them, in the place of the closed form's.

One run of the modules on fake tensors says what a micro-batch's row keeps without recompute, with selective and with
full recompute; the closed form says the same of a standard transformer. Their ratio holds for every layout: rows,
tokens and degrees divide both alike.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.planner.cost.embedding_and_head import embedding, head
from meshwright.planner.cost.framework_profile import FrameworkProfile
from meshwright.planner.cost.groups import Machine
from meshwright.planner.cost.layers import PricedModel
from meshwright.planner.cost.layout_batch import RECOMPUTES, LayoutBatch, PricedJob
from meshwright.planner.cost.prices import Price, Prices
from meshwright.spec.layout import Layout
from meshwright.spec.layout_choices import Recompute
from meshwright.spec.model_shape import ModelWork

MODES = ("none", "selective", "full")
"""Recomputes that are told apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationBytes:
    """Bytes that one row keeps in the whole model, by recompute: of every layer."""

    real: tuple[float, float, float]
    """Read off the modules."""
    closed: tuple[float, float, float]
    """By the closed form."""

    def ratio(self, recompute: Any, share: Any) -> Any:
        """Returns real over closed; scalars or arrays.

        Args:
            recompute: index into `RECOMPUTES`.
            share: of the layers that recompute.
        """
        mode = np.minimum(np.asarray(recompute, dtype=int), len(MODES) - 1)
        part = np.where(mode > 0, share, 0.0)
        both = []
        for kept in (self.real, self.closed):
            values = np.asarray(kept)
            both.append((1 - part) * values[0] + part * values[mode])
        return both[0] / both[1]


def read_kept(job: PricedJob, machine: Machine, engine: FrameworkProfile, work: ModelWork) -> ActivationBytes:
    """Compares what the modules keep with what the closed form says.

    Args:
        job: model and batch.
        machine: any; the sizes don't depend on it.
        engine: whose closed form.
        work: of one or more rows, on one device.
    """
    small = dataclasses.replace(job, rows=work.rows)
    layouts = [Layout(recompute=Recompute(mode), precision=job.precision) for mode in MODES]
    model = PricedModel(small, LayoutBatch.from_layouts(layouts, len(job.shape.blocks)), machine, engine)
    known: dict[int, Any] = {}
    closed = np.zeros(len(MODES))
    for block in job.shape.blocks:
        if id(block) not in known:
            known[id(block)] = np.broadcast_to(model.layer(block).saved, len(MODES))
        closed = closed + known[id(block)]
    closed = closed + embedding(model).saved + head(model).saved
    rest = work.rest.saved_bytes
    real = [work.saved_bytes, rest, rest]
    for count, item in zip(work.counts, work.layers):
        real[1] += count * item.selective_bytes
        real[2] += count * item.input_bytes
    none, selective, full = (float(value) for value in closed)
    return ActivationBytes(real=(real[0], real[1], real[2]), closed=(none, selective, full))


def extra_bytes(activations: Any, degrees: LayoutBatch, kept: ActivationBytes | None, engine: FrameworkProfile) -> Any:
    """Returns what layouts take more, allocator included, because the modules keep other activations."""
    if kept is None:
        return 0.0
    return (kept.ratio(degrees.recompute, degrees.recompute_share) - 1.0) * activations * engine.allocator


def adjusted(prices: Prices, degrees: LayoutBatch, kept: ActivationBytes | None, engine: FrameworkProfile) -> Prices:
    """Returns prices of many layouts with the activations that the modules keep."""
    if kept is None:
        return prices
    more = (kept.ratio(degrees.recompute, degrees.recompute_share) - 1.0) * prices.memory["activations"]
    memory = {**prices.memory, "activations": prices.memory["activations"] + more}
    memory["reserve"] = prices.memory["reserve"] + more * (engine.allocator - 1.0)
    return dataclasses.replace(prices, memory=memory, peak=prices.peak + more * engine.allocator)


def adjusted_one(
    price: Price, layout: Layout, kept: ActivationBytes | None, engine: FrameworkProfile, layers: int
) -> Price:
    """Returns one layout's price with the activations that the modules keep, on every stage."""
    if kept is None:
        return price
    recompute = layout.recompute
    ratio = float(kept.ratio(RECOMPUTES.index(recompute.mode), recompute.share(layers)))
    stages = []
    for stage in price.stages:
        more = (ratio - 1.0) * stage.memory["activations"]
        memory = {**stage.memory, "activations": stage.memory["activations"] + more}
        memory["reserve"] = stage.memory["reserve"] + more * (engine.allocator - 1.0)
        stages.append(dataclasses.replace(stage, memory=memory, peak=stage.peak + more * engine.allocator))
    fullest = max(range(len(stages)), key=lambda at: stages[at].peak)
    return dataclasses.replace(
        price, stages=tuple(stages), fullest=fullest, memory=stages[fullest].memory, peak=stages[fullest].peak
    )
