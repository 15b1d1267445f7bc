"""The ends of the model: embedding on the first stage, norm, head and loss on the last."""

from __future__ import annotations

import numpy as np

from meshwright.cluster import traffic
from meshwright.planner.cost.kernels import move_s
from meshwright.planner.cost.layers import LayerCost, PassTime, PricedModel
from meshwright.planner.cost.meshwright_profile import drop_bytes
from meshwright.spec.model_shape import Product

UNALIGNED = 3.2
"""Time of the head over an aligned one's where a rank has an odd number of words: tensor cores read several at once.
Source: NVIDIA, Matrix Multiplication Background (2023); the factor calibrated on 50,257 words on A100."""


def embedding(model: PricedModel, timed: bool = True) -> LayerCost:
    """Returns what the embedding costs on one micro-batch.

    Args:
        model: the job and its layouts.
        timed: time and traffic too; else they stand at 0.
    """
    shape, element = model.job.shape, model.element
    masks = 1.0 if shape.blocks[0].dropout else 0.0
    cost = LayerCost(
        saved=model.tokens * (8.0 + masks * shape.width / model.divided),
        parameters=shape.vocab * shape.width / model.degrees.tp + shape.positions * shape.width,
    )
    if not timed:
        return cost
    size = model.tokens * shape.width * element
    reduce = model.groups.seconds(traffic.all_reduce_s, size, model.groups.tp)
    scatter = model.groups.seconds(traffic.reduce_scatter_s, size, model.groups.tp)
    wire = scatter * (model.degrees.sequence > 0) + reduce * (model.degrees.sequence == 0)
    look = move_s(2 * size, model.machine.device)
    back = move_s(model.tokens * shape.width * (element + 4.0), model.machine.device)
    if model.engine.runtime.draw_bytes and masks:
        drawn = model.tokens * shape.width / model.divided
        look = look + move_s(drawn * (drop_bytes(element) + model.engine.runtime.draw_bytes), model.machine.device)
        back = back + move_s(drawn * drop_bytes(element), model.machine.device)
    cost.forward = PassTime(elementwise=look, tp=wire)
    cost.backward = PassTime(elementwise=back, tp=scatter * (model.degrees.sequence > 0))
    model.awaited(cost.forward, cost.backward)
    return cost


def head(model: PricedModel, timed: bool = True) -> LayerCost:
    """Returns what the last norm, the head and the loss cost on one micro-batch.

    Args:
        model: the job and its layouts.
        timed: time and traffic too; else they stand at 0.
    """
    shape, element, tp = model.job.shape, model.element, model.degrees.tp
    logits = model.tokens * shape.vocab / tp
    size = model.tokens * shape.width * element
    saved = model.engine.saved
    held = 0.0 if saved.chunked_logits else saved.logits * _width(model)
    cost = LayerCost(
        saved=2 * size / model.divided,
        working=held * logits,
        parameters=shape.vocab * shape.width / tp + shape.other_parameters,
    )
    if not timed:
        return cost
    product = Product(name="head", inner=shape.width, outer=shape.vocab, split="columns")
    gather = model.groups.seconds(traffic.all_gather_s, size, model.groups.tp) * (model.degrees.sequence > 0)
    reduce = model.groups.seconds(traffic.all_reduce_s, size, model.groups.tp) * (model.degrees.sequence == 0)
    parts = 1 if model.job.adapters else 2
    slower = np.where(np.mod(shape.vocab / tp, 2.0) == 1.0, UNALIGNED, 1.0)
    cost.forward = PassTime(matmul=slower * model.product_s(product), elementwise=_loss_s(model, logits, 0), tp=gather)
    back = slower * model.product_s(product, None, parts)
    cost.backward = PassTime(matmul=back, elementwise=_loss_s(model, logits, 1), tp=gather + reduce)
    model.awaited(cost.forward, cost.backward)
    return cost


def _loss_s(model: PricedModel, logits: object, back: int) -> object:
    return move_s(logits * model.engine.runtime.loss_passes[back] * _width(model), model.machine.device)  # type: ignore[operator]


def _width(model: PricedModel) -> float:
    """Bytes of the loss's numbers over those of float32, in which it is computed otherwise."""
    return 2.0 if model.job.precision == "float64" else 1.0
