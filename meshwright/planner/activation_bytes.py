"""Counts the bytes that a model's own modules take for backward, beside those of the closed form.

One run of the modules on fake tensors counts the bytes of a row without recompute, with selective and with full
recompute; the closed form prices the same for a standard transformer.
"""

from __future__ import annotations

import dataclasses
from functools import reduce as fold

import numpy as np

from meshwright.planner.cost.embedding_and_head import price_embedding, price_head
from meshwright.planner.cost.framework_profile import FrameworkProfile
from meshwright.planner.cost.groups import Machine
from meshwright.planner.cost.layer_bytes import price_bytes
from meshwright.planner.cost.layout_batch import (
    RECOMPUTES,
    Array,
    LayoutBatch,
    PricedJob,
)
from meshwright.planner.cost.measured_bytes import ActivationBytes, MeasuredBytes
from meshwright.planner.cost.priced_model import PricedModel
from meshwright.planner.cost.stages import block_kinds
from meshwright.spec.layout import Layout
from meshwright.spec.layout_choices import Recompute
from meshwright.spec.model_shape import ModelWork


def count_activation_bytes(
    job: PricedJob, machine: Machine, engine: FrameworkProfile, work: ModelWork
) -> ActivationBytes:
    """Returns the bytes that the modules take, and the closed form's.

    Args:
        job: model and batch.
        machine: any; the sizes don't depend on it.
        engine: the profile of the closed form.
        work: operators of one or more rows, on one device.
    """
    small_job = dataclasses.replace(job, rows=work.rows)
    layouts = [Layout(recompute=Recompute(mode), precision=job.precision) for mode in RECOMPUTES[:3]]
    batch = LayoutBatch.from_layouts(layouts, len(job.shape.blocks))
    closed, closed_working = _closed_bytes(PricedModel(small_job, batch, machine, engine))
    # The modules ran on processor cores, which have a fused kernel where a device may have none and keep scores.
    cores = dataclasses.replace(machine, device=dataclasses.replace(machine.device, units=0))
    cores_saved, cores_working = _closed_bytes(PricedModel(small_job, batch, cores, engine))
    saved, working = np.full(len(layouts), float(work.rest.kept.saved[0])), np.zeros(len(layouts))
    for count, layer in zip(work.counts, work.layers):
        saved = saved + count * np.array(layer.kept.saved, float)
        working = np.maximum(working, np.array(layer.kept.working, float))
    return ActivationBytes(
        saved=_measured(saved + closed - cores_saved, closed),
        working=_measured(working + closed_working - cores_working, closed_working),
    )


def _closed_bytes(model: PricedModel) -> tuple[Array, Array]:
    """Returns what is saved by all layers and ends, and beside it while a layer's backward runs, (N,) each."""
    blocks, count = model.job.shape.blocks, model.layouts.count
    kinds, first_blocks = block_kinds(model.job.shape)
    costs = [price_bytes(model, blocks[block]) for block in first_blocks]
    layers = sum(number * (cost.saved - cost.spared) for number, cost in zip(np.bincount(kinds), costs))
    ends = price_embedding(model, False).saved + price_head(model, False).saved
    working = fold(np.maximum, [np.asarray(cost.working) for cost in costs])
    return np.broadcast_to(layers + ends, count), np.broadcast_to(working, count)


def _measured(real: Array, closed: Array) -> MeasuredBytes:
    """Returns the bytes by mode, (3,) each."""
    (none, selective, full), (closed_none, closed_selective, closed_full) = real.tolist(), closed.tolist()
    return MeasuredBytes(real=(none, selective, full), closed=(closed_none, closed_selective, closed_full))
