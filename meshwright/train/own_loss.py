"""Trains the loss that a model returns: each term weighted so that the sum over micro-batches and ranks is its mean."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from meshwright.models.analysis.objective import Objective, count_targets
from meshwright.models.forward import ModelOutput, author_output, read_loss
from meshwright.models.structure import ModelStructure
from meshwright.parallel.stage_module import Compute, LossView
from meshwright.train.feed import MicroBatch
from meshwright.train.loss import cross_entropy_sums, scaled_gradient

LARGEST_FACTOR = 2.0**14
"""Most by which a loss is multiplied before its gradient is taken: fp16 ends at 65,504."""


def own_loss_compute(structure: ModelStructure, objective: Objective) -> Compute:
    """Returns the computation of one micro-batch of a model whose own loss is trained.

    The loss of a step is sum_m n_m / N CE_m + sum_t sum_m w_tm / W_t t_m over micro-batches m and terms t: CE the mean
    cross-entropy over n_m of all N targets, w_tm what the term is a mean over (`Objective.weights`), W_t its sum.

    Args:
        structure: of the model.
        objective: its loss.
    """
    if objective.counts_targets:
        return _counted_loss_compute(structure, objective)

    def compute(
        module: nn.Module, batch: MicroBatch, scale: float, view: LossView
    ) -> tuple[torch.Tensor, torch.Tensor]:
        has_documents = batch.positions is not None
        output = author_output(
            module,
            structure,
            batch.tokens,
            batch.targets,
            objective.labels,
            batch.positions,
            has_documents,
            batch.bounds,
        )
        assert output.loss is not None
        weights = objective.weights(batch.targets)
        if output.logits is None or not objective.logits:
            return _loss_alone(output.loss, weights[0], scale)
        # Outside of a training step nobody sets global totals: this micro-batch's weights are all.
        totals = weights if view.totals is None else view.totals
        # s_t = w_t / W_t times the loss scale; N = totals[0] cancels the division by all targets in ``scale``.
        shares = scale * totals[0] * weights[1:] / totals[1:].clamp(min=1.0)
        last_share = shares[-1]
        # The model's loss is the sum of all terms: scaled by the last term's share, each other term is corrected by
        # the difference of its share, the cross-entropy by that of ``scale``.
        logits = output.logits.detach() if objective.terms[-1].mean == "targets" else output.logits
        entropy, sums = cross_entropy_sums(
            logits, objective.counted(batch.targets), scale - last_share / weights[0].clamp(min=1.0), spare=False
        )
        values = objective.values(output, sums[0] / sums[1].clamp(min=1.0))
        loss = last_share * output.loss + entropy
        for share, value in zip(shares[:-1], values[:-1]):
            loss = loss + (share - last_share) * value
        term_sums = []
        for value, weight in zip(values, weights[1:]):
            # Padding rows of an evaluation have no targets, and a mean over none is NaN.
            weight_counted = torch.where(weights[0] > 0, weight, 0.0)
            term_sums += [
                torch.where(weight_counted > 0, value.detach().to(torch.float64) * weight_counted, 0.0),
                weight_counted,
            ]
        return loss, torch.cat([sums, torch.stack(term_sums)])

    return compute


def _loss_alone(loss: torch.Tensor, targets: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (scaled loss, sums) of a loss without logits, whose hits are unknown and counted as 0.

    Args:
        loss: () floating, a mean over this micro-batch's targets.
        targets: () floating, their number.
        scale: factor on the loss.
    """
    loss_sum = torch.where(targets > 0, loss.detach().to(torch.float64) * targets, 0.0)
    return loss * (targets * scale), torch.stack([loss_sum, targets, torch.zeros_like(loss_sum)])


class _GradientAtLogits(torch.autograd.Function):
    """Stands for a loss whose gradient by the logits is known."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits: torch.Tensor, gradient: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return scaled_gradient(gradient, upstream[0]), None, None


def _counted_loss_compute(structure: ModelStructure, objective: Objective) -> Compute:
    """Returns the computation of one micro-batch of a model whose loss is a mean over targets that it chooses.

    The loss of a step is sum_m k_m / K L_m over micro-batches m: L_m as the model returns it, a mean over k_m of the K
    targets that all count. The sums give k_m, so that the step divides by K where the data index has other targets.
    """

    def compute(
        module: nn.Module, batch: MicroBatch, scale: float, view: LossView
    ) -> tuple[torch.Tensor, torch.Tensor]:
        arguments = (structure, batch.tokens, batch.targets, objective.labels, batch.positions)

        def call() -> ModelOutput:
            return author_output(module, *arguments, batch.positions is not None, batch.bounds)

        def read(result: object) -> tuple[torch.Tensor, torch.Tensor]:
            output = read_loss(result, batch.tokens, structure.vocab)
            assert output.loss is not None and output.logits is not None
            # The factor of a sum over all targets, as far as fp16 holds it; the rest meets the gradient alone.
            wanted = scale * output.logits.shape[0] * output.logits.shape[1]
            factor = min(wanted, LARGEST_FACTOR)
            counts = count_targets(output.loss, output.logits, factor)
            assert counts is not None, "the trial found the loss to lead to its logits"
            counted, number, gradient = counts
            logits, value = output.logits, output.loss.detach()
            sums = torch.where(number > 0, value.to(torch.float64) * number, 0.0)
            hits = ((logits.detach().argmax(dim=-1) == batch.targets) & counted).sum().to(torch.float64)
            gradient.mul_((number * (scale / factor)).to(gradient.dtype))
            loss = _GradientAtLogits.apply(logits, gradient, (sums * scale).to(value.dtype))
            return loss, torch.stack([sums, number, hits])

        if view.inner_loss is None:
            # An earlier stage of a pipeline: its forward is left by an exception.
            call()
            raise RuntimeError("the forward of an earlier stage came to its end")
        return view.inner_loss.run(call, read)

    return compute
