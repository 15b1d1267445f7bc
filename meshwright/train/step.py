"""One optimizer step: micro-batches, one small all-reduce for everything global, clipping, update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.parallel.program import Program
from meshwright.parallel.stage_module import Stamp
from meshwright.parallel.weights import cut
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.scaler import LossScaler

FIELDS = ("loss_sum", "targets", "hits", "norm_squared", "stop")
"""What the step's all-reduce carries, each a sum over all ranks; two numbers for each term of a model's own loss
follow (`parallel.program.Compute`), then a mixture's counts by expert."""


@dataclass(slots=True)
class StepOutcome:
    """What a step gave, global over all ranks; `read` waits for the device."""

    sums: torch.Tensor
    norm: torch.Tensor
    lr: float
    names: tuple[str, ...] = ()
    """Terms of the model's own loss."""

    @property
    def experts(self) -> tuple[float, ...]:
        """Share of the choices that went to each expert, over all layers; none for a model without experts."""
        counts = self.sums[len(FIELDS) + 2 * len(self.names) :]
        return tuple((counts / counts.sum().clamp(min=1.0)).tolist())

    @property
    def terms(self) -> dict[str, float]:
        """The mean of the cross-entropy and of each other term of the model's own loss; none where that is all."""
        return mean_terms(torch.cat([self.sums[:3], self.sums[len(FIELDS) :]]), self.names)

    def read(self) -> dict[str, float]:
        """Returns loss, targets, accuracy, grad_norm, stop (number of ranks that were asked to) and finite."""
        loss_sum, targets, hits, _, stop = self.sums[: len(FIELDS)].tolist()
        norm = float(self.norm)
        return {
            "loss": sum(self.terms.values()) if self.names else loss_sum / max(1.0, targets),
            "targets": targets,
            "accuracy": hits / max(1.0, targets),
            "grad_norm": norm,
            "stop": stop,
            "finite": float(norm - norm == 0.0),
        }


def mean_terms(sums: torch.Tensor, names: Sequence[str]) -> dict[str, float]:
    """Returns the mean of each term of a model's own loss, whose sum is the loss.

    Args:
        sums: (3 + 2 terms, ...) float64, summed over all ranks, as `parallel.program.Compute` gives them.
        names: of the terms; none where the cross-entropy is the loss.
    """
    if not names:
        return {}
    loss_sum, targets, _, *rest = sums[: 3 + 2 * len(names)].tolist()
    means = {name: rest[2 * place] / max(1.0, rest[2 * place + 1]) for place, name in enumerate(names)}
    return {"cross_entropy": loss_sum / max(1.0, targets)} | means


def local_norm_squared(program: Program) -> torch.Tensor:
    """Returns this rank's share of the squared gradient norm, a float64 scalar; the shares of all ranks sum to it.

    A part that several ranks hold counts once: each of them contributes its share of one over their number.
    """
    by_copies: dict[int, list[torch.Tensor]] = {}
    for weight in program.weights:
        grad = weight.gradient
        if grad is None or not grad.numel():
            continue
        pieces = weight.pieces
        if len({piece.copies for piece in pieces}) == 1:
            by_copies.setdefault(pieces[0].copies, []).append(grad)
            continue
        for piece in pieces:
            by_copies.setdefault(piece.copies, []).append(cut(grad, piece.local).contiguous())
    device = program.weights[0].local.device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for copies, grads in by_copies.items():
        norms = torch.stack(torch._foreach_norm(grads, 2))
        total += norms.to(torch.float64).square().sum() / copies
    return total


def fill_missing(program: Program) -> None:
    """Gives weights that no rank's forward reached a zero gradient, so that every rank updates the same weights."""
    for weight in program.weights:
        if weight.parameter.grad is None:
            weight.parameter.grad = weight.like(torch.zeros_like(weight.local))  # type: ignore[assignment]


class Stepper:
    """Runs optimizer steps on a program.

    Args:
        program: the built layout.
        optimizer: over the program's weights.
        scaler: loss scale.
        clip: largest gradient norm; 0 for none.
        seed: of the random numbers in forward.
    """

    def __init__(
        self,
        program: Program,
        optimizer: LocalAdamW,
        scaler: LossScaler,
        clip: float,
        seed: int,
    ) -> None:
        self.program, self.optimizer, self.scaler = program, optimizer, scaler
        self._clip, self._seed = clip, seed
        self._targets = 1
        self.probe: Callable[[torch.Tensor], None] | None = None
        """Shown the factor from held to true gradients while these are whole: before clipping and update."""
        self._copies = program.reporters

    def run(
        self,
        step: int,
        batches: Sequence[Any],
        targets: int,
        lr: float,
        stop: float,
        stamp: Stamp | None = None,
        limits: tuple[float, float] | None = None,
    ) -> StepOutcome:
        """Runs one step.

        Args:
            step: steps done before this one.
            batches: this rank's micro-batches.
            targets: target tokens of the whole global batch, as the index has it: the loss is divided by them before
                backward, so that gradients have the same values under every layout, to the rounding of each operation.
            lr: learning rate.
            stop: whether this rank was asked to stop (1, or less for a lesser request); all ranks learn the sum.
            stamp: where to report progress.
            limits: the largest (loss, norm) that may change the weights; None for any that are finite.

        Returns:
            Global sums; loss and norm are those of the whole global batch, normalised by its true target count.
        """
        program = self.program
        self._targets = max(1, targets)
        scale = self.scaler.scale / self._targets
        if program.weigh is not None:
            own = torch.stack([program.weigh(batch) for batch in batches]).sum(dim=0)
            program.view.totals = self.world_sum(own / program.readers_alike)
        sums = program.forward_backward(batches, scale, (self._seed, step), stamp)
        fill_missing(program)
        if stamp:
            stamp.phase("reduce", 0)
        norm, vector, factor = self.globals(sums, stop)
        if self.probe is not None:
            self.probe(factor)
        program.clock.lap("norm")
        if stamp:
            stamp.phase("optimizer", 0)
        sane = torch.isfinite(norm)  # clipping would make 0 of what is infinite, and that would count as an update
        if limits is not None:
            sane = sane & (self._mean_loss(vector) <= limits[0]) & (norm <= limits[1])
        factor = torch.where(sane, factor, torch.nan)
        if self._clip:
            factor = factor * torch.clamp(self._clip / (norm + 1e-6), max=1.0)
        self.optimizer.step(lr, factor)
        program.clear_gradients()
        program.clock.lap("optimizer")
        return StepOutcome(vector, norm, lr, program.terms)

    def _mean_loss(self, vector: torch.Tensor) -> torch.Tensor:
        """Returns the loss of a step from its summed vector, float64 on the device."""
        loss = vector[0] / vector[1].clamp(min=1.0)
        for place in range(len(FIELDS), len(FIELDS) + 2 * len(self.program.terms), 2):
            loss = loss + vector[place] / vector[place + 1].clamp(min=1.0)
        return loss

    def globals(self, sums: torch.Tensor, stop: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns (true norm, summed vector of `FIELDS`, factor from held to true gradients), all on the device."""
        program = self.program
        squared = local_norm_squared(program)
        sums = sums.to(squared.device)
        sums = sums / self._copies
        vector = torch.cat([sums[:3], torch.stack([squared, squared.new_tensor(stop)]), sums[3:]])
        if program.experts is not None:
            vector = torch.cat([vector, program.experts.drain(vector.device)])
        self.world_sum(vector)
        factor = self._targets / (vector[1].clamp(min=1.0) * self.scaler.scale)
        return vector[3].sqrt() * factor, vector, factor

    def total(self, sums: torch.Tensor) -> torch.Tensor:
        """Returns this rank's sums of `parallel.program.Compute`, summed over all ranks that read other data."""
        return self.world_sum(sums.to(torch.float64) / self._copies)

    def world_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Returns ``values`` summed over all ranks, in place where there are several."""
        if self.program.mesh is not None and self.program.mesh.world.size > 1:
            self.program.mesh.world.all_reduce(values).wait()
        return values
