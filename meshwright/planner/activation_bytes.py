"""Corrects the closed form's activation memory by the bytes that a model's own modules save for backward.

One run of the modules on fake tensors counts the bytes that a row saves without recompute, with selective and with
full recompute; the closed form prices the same for a standard transformer. Their ratio holds for every layout, because
rows, tokens and degrees divide both alike.
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
"""Recompute modes with a ratio of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationBytes:
    """Bytes that one row saves for backward in the full model, by recompute mode of every layer."""

    real: tuple[float, float, float]
    """Counted on the modules."""
    closed: tuple[float, float, float]
    """By the closed form."""

    def ratio(self, recompute: Any, share: Any) -> Any:
        """Returns `real` over `closed`; scalars or arrays (N,).

        Args:
            recompute: index into `RECOMPUTES`, scalar or (N,).
            share: of the layers that recompute, scalar or (N,).
        """
        mode = np.minimum(np.asarray(recompute, dtype=int), len(MODES) - 1)
        recomputed_share = np.where(mode > 0, share, 0.0)
        row_bytes = []
        for bytes_by_mode in (self.real, self.closed):
            values = np.asarray(bytes_by_mode)
            row_bytes.append((1 - recomputed_share) * values[0] + recomputed_share * values[mode])
        return row_bytes[0] / row_bytes[1]


def read_kept(job: PricedJob, machine: Machine, engine: FrameworkProfile, work: ModelWork) -> ActivationBytes:
    """Compares the bytes that the modules save with the closed form's.

    Args:
        job: model and batch.
        machine: any; the sizes don't depend on it.
        engine: the profile of the closed form.
        work: operators of one or more rows, on one device.
    """
    small_job = dataclasses.replace(job, rows=work.rows)
    layouts = [Layout(recompute=Recompute(mode), precision=job.precision) for mode in MODES]
    model = PricedModel(small_job, LayoutBatch.from_layouts(layouts, len(job.shape.blocks)), machine, engine)
    saved_by_block: dict[int, Any] = {}
    closed = np.zeros(len(MODES))
    for block in job.shape.blocks:
        if id(block) not in saved_by_block:
            saved_by_block[id(block)] = np.broadcast_to(model.layer(block).saved, len(MODES))
        closed = closed + saved_by_block[id(block)]
    closed = closed + embedding(model).saved + head(model).saved
    outside_layers = work.rest.saved_bytes
    real = [work.saved_bytes, outside_layers, outside_layers]
    for count, layer in zip(work.counts, work.layers):
        real[1] += count * layer.selective_bytes
        real[2] += count * layer.input_bytes
    none, selective, full = (float(value) for value in closed)
    return ActivationBytes(real=(real[0], real[1], real[2]), closed=(none, selective, full))


def extra_bytes(
    closed_bytes: Any, batch: LayoutBatch, measured: ActivationBytes | None, engine: FrameworkProfile
) -> Any:
    """Returns the correction of N layouts' peak bytes, (N,), allocator overhead included; 0.0 without ``measured``."""
    if measured is None:
        return 0.0
    return (measured.ratio(batch.recompute, batch.recompute_share) - 1.0) * closed_bytes * engine.allocator


def adjusted(prices: Prices, batch: LayoutBatch, measured: ActivationBytes | None, engine: FrameworkProfile) -> Prices:
    """Returns prices of N layouts with corrected activations."""
    if measured is None:
        return prices
    added_bytes = (measured.ratio(batch.recompute, batch.recompute_share) - 1.0) * prices.memory["activations"]
    memory = {**prices.memory, "activations": prices.memory["activations"] + added_bytes}
    memory["reserve"] = prices.memory["reserve"] + added_bytes * (engine.allocator - 1.0)
    return dataclasses.replace(prices, memory=memory, peak=prices.peak + added_bytes * engine.allocator)


def adjusted_one(
    price: Price, layout: Layout, measured: ActivationBytes | None, engine: FrameworkProfile, layers: int
) -> Price:
    """Returns one layout's price with corrected activations on every stage."""
    if measured is None:
        return price
    recompute = layout.recompute
    ratio = float(measured.ratio(RECOMPUTES.index(recompute.mode), recompute.share(layers)))
    stages = []
    for stage in price.stages:
        added_bytes = (ratio - 1.0) * stage.memory["activations"]
        memory = {**stage.memory, "activations": stage.memory["activations"] + added_bytes}
        memory["reserve"] = stage.memory["reserve"] + added_bytes * (engine.allocator - 1.0)
        stages.append(dataclasses.replace(stage, memory=memory, peak=stage.peak + added_bytes * engine.allocator))
    fullest = max(range(len(stages)), key=lambda stage_index: stages[stage_index].peak)
    return dataclasses.replace(
        price, stages=tuple(stages), fullest=fullest, memory=stages[fullest].memory, peak=stages[fullest].peak
    )
