"""Trains the loss that a model returns: each term weighted so that the sum over micro-batches and ranks is its mean."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.models.forward import author_output
from meshwright.models.objective import Objective
from meshwright.models.structure import ModelStructure
from meshwright.parallel.stage_module import Compute, LossView
from meshwright.train.feed import MicroBatch
from meshwright.train.loss import cross_entropy_sums


def own_loss_compute(structure: ModelStructure, objective: Objective) -> Compute:
    """Returns the computation of one micro-batch of a model whose own loss is trained.

    The loss of a step is sum_m n_m / N CE_m + sum_t sum_m w_tm / W_t t_m over micro-batches m and terms t: CE the mean
    cross-entropy over n_m of all N targets, w_tm what the term is a mean over (`Objective.weights`), W_t its sum.

    Args:
        structure: of the model.
        objective: its loss.
    """

    def compute(
        module: nn.Module, batch: MicroBatch, scale: float, view: LossView
    ) -> tuple[torch.Tensor, torch.Tensor]:
        masked = batch.positions is not None
        output = author_output(
            module, structure, batch.tokens, batch.targets, objective.labels, batch.positions, masked
        )
        assert output.loss is not None
        weights = objective.weights(batch.targets)
        if output.logits is None or not objective.logits:
            return _loss_alone(output.loss, weights[0], scale)
        totals = weights if view.totals is None else view.totals
        # s_t = w_t / W_t, times what every loss is scaled by; N cancels the division by all targets in ``scale``.
        shares = scale * totals[0] * weights[1:] / totals[1:].clamp(min=1.0)
        last = shares[-1]
        # The model's loss has all terms in it: with the last one's share, the others are mended by the difference.
        logits = output.logits.detach() if objective.terms[-1].mean == "targets" else output.logits
        entropy, sums = cross_entropy_sums(
            logits, objective.counted(batch.targets), scale - last / weights[0].clamp(min=1.0), spare=False
        )
        values = objective.values(output, sums[0] / sums[1].clamp(min=1.0))
        loss = last * output.loss + entropy
        for share, value in zip(shares[:-1], values[:-1]):
            loss = loss + (share - last) * value
        told = []
        for value, weight in zip(values, weights[1:]):
            # Rows that fill up an evaluation have no targets, and a mean over none is no number.
            counted = torch.where(weights[0] > 0, weight, 0.0)
            told += [torch.where(counted > 0, value.detach().to(torch.float64) * counted, 0.0), counted]
        return loss, torch.cat([sums, torch.stack(told)])

    return compute


def _loss_alone(loss: torch.Tensor, targets: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A mean over targets, of which no hits are known."""
    loss_sum = torch.where(targets > 0, loss.detach().to(torch.float64) * targets, 0.0)
    return loss * (targets * scale), torch.stack([loss_sum, targets, torch.zeros_like(loss_sum)])
