"""One optimizer step: micro-batches, one small all-reduce for everything global, clipping, update."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.runtime.program import Program, Stamp
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.scaler import LossScaler

FIELDS = ("loss_sum", "targets", "hits", "norm_squared", "stop")
"""What the step's all-reduce carries, each a sum over all ranks."""


@dataclass(slots=True)
class Outcome:
    """What a step gave, global over all ranks; `read` waits for the device."""

    sums: torch.Tensor
    norm: torch.Tensor
    lr: float

    def read(self) -> dict[str, float]:
        """Returns loss, targets, accuracy, grad_norm, stop (number of ranks that were asked to) and finite."""
        loss_sum, targets, hits, _, stop = self.sums.tolist()
        norm = float(self.norm)
        return {
            "loss": loss_sum / max(1.0, targets),
            "targets": targets,
            "accuracy": hits / max(1.0, targets),
            "grad_norm": norm,
            "stop": stop,
            "finite": float(norm - norm == 0.0),
        }


def local_norm_squared(program: Program) -> torch.Tensor:
    """Returns this rank's share of the squared gradient norm, a float64 scalar; the shares of all ranks sum to it.

    A part that several ranks hold counts once: each of them contributes its share of one over their number.
    """
    by_copies: dict[int, list[torch.Tensor]] = {}
    for weight in program.weights:
        grad = weight.gradient
        if grad is not None and grad.numel():
            by_copies.setdefault(weight.copies, []).append(grad)
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


def seed_of(*keys: int) -> int:
    """Returns a 63-bit seed that is a fixed function of the keys (seed, step, micro-batch, reader)."""
    digest = hashlib.blake2b(",".join(map(str, keys)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Stepper:
    """Runs optimizer steps on a program.

    Args:
        program: the built layout.
        optimizer: over the program's weights.
        scaler: loss scale.
        clip: largest gradient norm; 0 for none.
        seed: base of the micro-batches' random states.
        reader: this rank's index among the readers.
    """

    def __init__(
        self,
        program: Program,
        optimizer: LocalAdamW,
        scaler: LossScaler,
        clip: float,
        seed: int,
        reader: int,
    ) -> None:
        self.program, self.optimizer, self.scaler = program, optimizer, scaler
        self._clip, self._seed, self._reader = clip, seed, reader
        self._targets = 1
        self.probe: Callable[[torch.Tensor], None] | None = None
        """Shown the factor from held to true gradients while these are whole: before clipping and update."""
        self._copies = 1
        if program.mesh is not None:
            shape, summed = program.mesh.layout.shape(), program.mesh.loss_axes
            self._copies = math.prod(size for name, size in shape.items() if name not in summed)

    def run(
        self, step: int, batches: Sequence[Any], targets: int, lr: float, stop: bool, stamp: Stamp | None = None
    ) -> Outcome:
        """Runs one step.

        Args:
            step: steps done before this one.
            batches: this rank's micro-batches.
            targets: target tokens of the whole global batch, as the index has it: the loss is divided by them before
                backward, so that gradients have the same values under every layout, to the rounding of each operation.
            lr: learning rate.
            stop: whether this rank was asked to stop; all ranks learn of it.
            stamp: where to report progress.

        Returns:
            Global sums; loss and norm are those of the whole global batch, normalised by its true target count.
        """
        program = self.program
        self._targets = max(1, targets)
        scale = self.scaler.scale / self._targets
        sums = program.forward_backward(
            batches, scale, lambda number: seed_of(self._seed, step, number, self._reader), stamp
        )
        fill_missing(program)
        norm, vector, factor = self.globals(sums, stop)
        if self.probe is not None:
            self.probe(factor)
        program.clock.lap("norm")
        if stamp:
            stamp.phase("optimizer", 0)
        if self._clip:
            factor = factor * torch.clamp(self._clip / (norm + 1e-6), max=1.0)
        self.optimizer.step(lr, factor)
        program.clear_gradients()
        program.clock.lap("optimizer")
        return Outcome(vector, norm, lr)

    def globals(self, sums: torch.Tensor, stop: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns (true norm, summed vector of `FIELDS`, factor from held to true gradients), all on the device."""
        program = self.program
        squared = local_norm_squared(program)
        parts = [*sums.to(squared.device).unbind(), squared, squared.new_tensor(float(stop))]
        vector = torch.stack(parts)
        vector[:3] /= self._copies
        self.world_sum(vector)
        factor = self._targets / (vector[1].clamp(min=1.0) * self.scaler.scale)
        return vector[3].sqrt() * factor, vector, factor

    def total(self, sums: torch.Tensor) -> torch.Tensor:
        """Returns this rank's (loss sum, targets, hits), float64, summed over all ranks that read other data."""
        return self.world_sum(sums.to(torch.float64) / self._copies)

    def world_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Returns ``values`` summed over all ranks, in place where there are several."""
        if self.program.mesh is not None and self.program.mesh.world.size > 1:
            self.program.mesh.world.all_reduce(values).wait()
        return values
