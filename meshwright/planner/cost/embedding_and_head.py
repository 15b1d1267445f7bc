"""Prices the ends of the model: embedding on the first stage; last norm, head and loss on the last."""

from __future__ import annotations

import numpy as np

from meshwright.cluster import traffic
from meshwright.planner.cost.chunked_loss import ChunkedLoss
from meshwright.planner.cost.kernels import move_s
from meshwright.planner.cost.layer_cost import LayerCost, PassTime
from meshwright.planner.cost.layout_batch import Array
from meshwright.planner.cost.meshwright_profile import drops_bytes
from meshwright.planner.cost.priced_model import PricedModel
from meshwright.spec.model_shape import Product

UNALIGNED = 3.2
"""Time of a head with an odd number of columns on a rank, over an aligned one's: tensor cores read several at once.
Source: NVIDIA, Matrix Multiplication Background (2023); the factor calibrated on 50,257 words on A100."""


def price_embedding(model: PricedModel, timed: bool = True) -> LayerCost:
    """Returns the cost of the embedding on one micro-batch; figures are (N,).

    Args:
        model: the job and its N layouts.
        timed: price time and traffic too; else they are 0.
    """
    shape, element = model.job.shape, model.element
    runtime, masks = model.engine.runtime, 1.0 if shape.blocks[0].dropout else 0.0
    cost = LayerCost(
        saved=model.tokens * (8.0 + masks * runtime.mask_bytes * shape.width / model.token_shards),
        parameters=shape.vocab * shape.width / model.layouts.tp + shape.positions * shape.width,
    )
    if not timed:
        return cost
    size = model.tokens * shape.width * element
    all_reduce_s = model.groups.seconds(traffic.all_reduce_s, size, model.groups.tp)
    # Each rank of tp looks up its rows of the vocabulary; the sum over ranks is the embedding.
    reduce_scatter_s = model.groups.seconds(traffic.reduce_scatter_s, size, model.groups.tp)
    tp_s = reduce_scatter_s * (model.layouts.sequence > 0) + all_reduce_s * (model.layouts.sequence == 0)
    forward_s = move_s(2 * size, model.machine.device)
    backward_s = move_s(model.tokens * shape.width * (element + 4.0), model.machine.device)
    if runtime.draw_bytes and masks:
        dropped_elements = model.tokens * shape.width / model.token_shards
        forward_s = forward_s + move_s(dropped_elements * drops_bytes(runtime, element, False), model.machine.device)
        backward_s = backward_s + move_s(dropped_elements * drops_bytes(runtime, element, True), model.machine.device)
    copies_s = model.token_copies_s(1.0)
    cost.forward = PassTime(elementwise=forward_s + copies_s, tp=tp_s)
    cost.backward = PassTime(elementwise=backward_s + copies_s, tp=reduce_scatter_s * (model.layouts.sequence > 0))
    for pass_time in (cost.forward, cost.backward):
        wire = model.groups.booked(np.asarray(pass_time.tp), model.groups.tp)
        pass_time.inside, pass_time.outside = wire.inside, wire.outside
        pass_time.host = model.engine.runtime.end_host_s(pass_time.host, pass_time.busy)
    return cost


def price_head(model: PricedModel, timed: bool = True) -> LayerCost:
    """Returns the cost of the last norm, the head and the loss on one micro-batch; figures are (N,).

    Args:
        model: the job and its N layouts.
        timed: price time and traffic too; else they are 0.
    """
    shape, element, tp = model.job.shape, model.element, model.layouts.tp
    logits = model.tokens * shape.vocab / tp
    size = model.tokens * shape.width * element
    whole_bytes = model.engine.saved.logits * _loss_element_scale(model) * logits
    chunked = ChunkedLoss(model)
    cost = LayerCost(
        saved=2 * size / model.token_shards,
        working=np.where(chunked.on, chunked.working_bytes, whole_bytes + chunked.gradient_bytes),
        parameters=shape.vocab * shape.width / tp + shape.other_parameters,
    )
    if not timed:
        return cost
    product = Product(name="head", inner=shape.width, outer=shape.vocab, split="columns")
    all_gather_s = model.groups.seconds(traffic.all_gather_s, size, model.groups.tp) * (model.layouts.sequence > 0)
    all_reduce_s = model.groups.seconds(traffic.all_reduce_s, size, model.groups.tp) * (model.layouts.sequence == 0)
    misaligned_factor = np.where(np.mod(shape.vocab / tp, 2.0) == 1.0, UNALIGNED, 1.0)
    forward_s = misaligned_factor * model.product_s(product)
    backward_s = misaligned_factor * model.product_s(product, None, 1 if model.job.adapters else 2)
    # Of a chunk, forward computes all products and the loss's whole work: backward returns what they gave.
    copies_s = model.token_copies_s(1.0)
    cost.forward = PassTime(
        matmul=forward_s + np.where(chunked.on, backward_s, 0.0),
        elementwise=np.where(chunked.on, chunked.elementwise_s, _loss_s(model, logits, 0)) + copies_s,
        tp=all_gather_s + np.where(chunked.on, chunked.all_reduce_s, 0.0),
    )
    cost.backward = PassTime(
        matmul=np.where(chunked.on, 0.0, backward_s),
        elementwise=np.where(chunked.on, 0.0, _loss_s(model, logits, 1)) + copies_s,
        tp=all_gather_s + all_reduce_s,
    )
    for pass_time in (cost.forward, cost.backward):
        wire = model.groups.booked(np.asarray(pass_time.tp), model.groups.tp)
        pass_time.inside, pass_time.outside = wire.inside, wire.outside
        pass_time.host = model.engine.runtime.end_host_s(pass_time.host, pass_time.busy)
    return cost


def _loss_s(model: PricedModel, logits: Array, pass_index: int) -> Array:
    """Returns seconds of the loss's element-wise work on logits, (N,), in forward (0) or backward (1)."""
    moved_bytes = logits * model.engine.runtime.loss_passes[pass_index] * _loss_element_scale(model)
    return move_s(moved_bytes, model.machine.device)


def _loss_element_scale(model: PricedModel) -> float:
    """Returns the loss's bytes an element over those that the engine's options count.

    They count float32's, half of float64's; our own on GPUs count the logits' own bytes, in 16 bits, but in float64, in
    which no kernel writes the gradient over them.
    """
    if model.engine.saved.chunk_logits:
        return 12.0 if model.job.precision == "float64" else model.element / 2.0
    return 2.0 if model.job.precision == "float64" else 1.0
