"""Counts the bytes that a model's own modules save for backward, beside those of the closed form.

One run of the modules on fake tensors counts the bytes that a row saves without recompute, with selective and with
full recompute; the closed form prices the same for a standard transformer.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from meshwright.planner.cost.embedding_and_head import price_embedding, price_head
from meshwright.planner.cost.framework_profile import FrameworkProfile
from meshwright.planner.cost.groups import Machine
from meshwright.planner.cost.layers import PricedModel
from meshwright.planner.cost.layout_batch import RECOMPUTES, ActivationBytes, Array, LayoutBatch, PricedJob
from meshwright.spec.layout import Layout
from meshwright.spec.layout_choices import Recompute
from meshwright.spec.model_shape import ModelWork


def count_activation_bytes(
    job: PricedJob, machine: Machine, engine: FrameworkProfile, work: ModelWork
) -> ActivationBytes:
    """Returns the bytes that the modules save, and the closed form's.

    Args:
        job: model and batch.
        machine: any; the sizes don't depend on it.
        engine: the profile of the closed form.
        work: operators of one or more rows, on one device.
    """
    small_job = dataclasses.replace(job, rows=work.rows)
    layouts = [Layout(recompute=Recompute(mode), precision=job.precision) for mode in RECOMPUTES[:3]]
    model = PricedModel(small_job, LayoutBatch.from_layouts(layouts, len(job.shape.blocks)), machine, engine)
    saved_by_block: dict[int, Array] = {}
    closed = np.zeros(len(layouts))
    for block in job.shape.blocks:
        if id(block) not in saved_by_block:
            saved_by_block[id(block)] = np.broadcast_to(model.price_bytes(block).saved, len(layouts))
        closed = closed + saved_by_block[id(block)]
    none, selective, full = (closed + price_embedding(model, False).saved + price_head(model, False).saved).tolist()
    outside_layers = work.rest.saved_bytes
    layer_counts = list(zip(work.counts, work.layers))
    return ActivationBytes(
        real=(
            work.saved_bytes,
            outside_layers + sum(count * layer.selective_bytes for count, layer in layer_counts),
            outside_layers + sum(count * layer.input_bytes for count, layer in layer_counts),
        ),
        closed=(none, selective, full),
    )
