"""Counts the bytes that a model's own operators move beside products and attention, beside those of the closed form.

The closed form has one number of passes over D and F for all models; a model with more norms moves more. One run of the
modules on fake tensors counts what each operator reads and writes, and what a compiler leaves of it (`models.fused`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from meshwright.planner.cost.framework_profile import FrameworkProfile
from meshwright.planner.cost.groups import Machine
from meshwright.planner.cost.layers import moved_bytes
from meshwright.planner.cost.layout_batch import LayoutBatch, PricedJob
from meshwright.planner.cost.measured_bytes import MovedBytes
from meshwright.planner.cost.priced_model import PricedModel
from meshwright.planner.cost.stages import block_kinds
from meshwright.spec.layout import Layout
from meshwright.spec.model_shape import ModelWork, ModuleWork, Operator

Operators = Callable[[ModuleWork], Sequence[Operator]]


def count_moved_bytes(job: PricedJob, machine: Machine, engine: FrameworkProfile, work: ModelWork) -> MovedBytes | None:
    """Returns what the layers' operators move over the closed form; None on processor cores and for other frameworks.

    Cores hold much of a layer in caches, so that their time doesn't follow bytes; other frameworks fuse by hand.

    Args:
        job: model and batch.
        machine: whose devices compute.
        engine: the profile of the closed form.
        work: operators of one or more rows, on one device.
    """
    # An engine that compiles nothing by choice runs other code than these modules.
    if not (machine.device.units and engine.runtime.fused_width):
        return None
    small_job = dataclasses.replace(job, rows=work.rows, products="", moved=None)

    def ratio(is_compiled: bool, is_backward: bool, operators: Operators) -> float:
        layout = Layout(compile=is_compiled)
        batch = LayoutBatch.from_layouts([layout], len(job.shape.blocks))
        model = PricedModel(small_job, batch, machine, engine.for_layout(layout))
        kinds, first_blocks = block_kinds(job.shape)
        closed = [moved_bytes(model, job.shape.blocks[block], is_backward) for block in first_blocks]
        closed_bytes = sum(number * float(np.max(size)) for number, size in zip(np.bincount(kinds), closed))
        moves = 1.0 if is_compiled else engine.runtime.eager_moves
        operator_bytes = sum(count * _element_bytes(operators(layer)) for count, layer in zip(work.counts, work.layers))
        return moves * operator_bytes / closed_bytes

    return MovedBytes(
        eager=(ratio(False, False, lambda layer: layer.forward), ratio(False, True, lambda layer: layer.backward)),
        compiled=(
            ratio(True, False, lambda layer: layer.fused_forward),
            ratio(True, True, lambda layer: layer.fused_backward),
        ),
    )


def _element_bytes(operators: Sequence[Operator]) -> float:
    return float(sum(operator.bytes for operator in operators if operator.kind == "element"))
