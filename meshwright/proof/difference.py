"""What a rank under a layout compares with one device: losses, norms, buffers, its parts of gradients and weights."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch

from meshwright.parallel.weights import Weight
from meshwright.proof.compare import EXACT, Deviation, largest, part_error, relative, scales, worst_of
from meshwright.proof.rounding import UNITS, PlainDeviation, Rounding, TensorScale, plain_deviations, tensor_scales


class Difference:
    """One rank's errors, each beside its bound: `EXACT` in float64, in any other precision that of `proof.rounding`.

    Args:
        expected: of one device in float64, as `proof.one_device` writes it; with ``plain``, the errors that it makes in
            the layout's precision, unless that is float64.
        precision: of the layout.
        floor: what AdamW's steps may have moved a weight by: the sum of their learning rates.
    """

    def __init__(self, expected: Mapping[str, Any], precision: str, floor: float) -> None:
        self._expected, self._floor = expected, floor
        self._plain: Mapping[Hashable, tuple[torch.Tensor, float]] = expected.get("plain", {})
        self._rounding = None if precision == "float64" else Rounding(unit=UNITS[precision])
        self.loss = self.norm = Deviation(error=0.0, bound=EXACT)
        self.gradients: dict[str, Deviation] = {}
        self.weights: dict[str, Deviation] = {}
        self.buffers: dict[str, Deviation] = {}

    def outcome(self, step: int, loss: float, norm: float) -> None:
        """Compares a step's loss and gradient norm."""
        self.loss = worst_of((self.loss, self._compare_scalar("losses", step, loss)))
        self.norm = worst_of((self.norm, self._compare_scalar("norms", step, norm)))

    def gradient(self, step: int, weights: Sequence[Weight], factor: torch.Tensor) -> None:
        """Compares what the weights hold with a step's gradients.

        Args:
            step: steps before this one.
            weights: of this rank.
            factor: () scalar, from held to true gradients.
        """
        gradients = self._expected["gradients"][step]
        largest_by_name, plain_by_name = scales(gradients), dict[str, PlainDeviation]()
        if self._rounding is not None:
            plain_by_name = plain_deviations(
                {name: self._plain[step, name] for name in gradients}, tensor_scales(gradients)
            )
        for weight in weights:
            assert weight.gradient is not None
            measured = weight.gradient.cpu().to(torch.float64) * factor.cpu()
            expected_shard = weight.extract_shard(gradients[weight.name])
            if self._rounding is None:
                deviation = Deviation(
                    error=part_error(measured, expected_shard, largest_by_name[weight.name]), bound=EXACT
                )
            else:
                plain = weight.extract_shard(self._plain[step, weight.name][0])
                deviation = self._rounding.gradient(measured, expected_shard, plain, plain_by_name[weight.name], step)
            # several steps, and a weight that this rank holds twice, keep their worst
            self.gradients[weight.name] = worst_of((self.gradients.get(weight.name, deviation), deviation))

    def trained(self, weights: Sequence[Weight], steps: int) -> None:
        """Compares weights after the last of some steps; in low precision relative to what these moved them by."""
        expected, plain_by_name = self._expected["weights"], dict[str, PlainDeviation]()
        if self._rounding is not None:
            update_scale = TensorScale(rms=self._floor, largest=self._floor)
            plain_by_name = plain_deviations(
                {name: self._plain["weights", name] for name in expected}, dict.fromkeys(expected, update_scale)
            )
        for weight in weights:
            full_weight, measured = expected[weight.name], weight.local.cpu()
            expected_shard = weight.extract_shard(full_weight)
            if self._rounding is None:
                deviation = Deviation(
                    error=part_error(measured, expected_shard, max(largest([full_weight]), self._floor)), bound=EXACT
                )
            else:
                plain = weight.extract_shard(self._plain["weights", weight.name][0])
                deviation = self._rounding.weight(
                    measured, expected_shard, plain, plain_by_name[weight.name], steps - 1
                )
            self.weights[weight.name] = deviation

    def changed(self, buffers: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Compares, in float64, the buffers that forward changes after the last step.

        In low precision their own bound isn't known: a wrong one shows in the steps that read it.

        Args:
            buffers: (name, buffer) pairs of this rank, of any shape.
        """
        expected = self._expected["buffers"] if self._rounding is None else {}
        for name, buffer in buffers:
            if name in expected:
                values = expected[name].to(torch.float64)
                error = part_error(buffer.detach().cpu(), values, largest([values]))
                deviation = Deviation(error=error, bound=EXACT)
                self.buffers[name] = worst_of((self.buffers.get(name, deviation), deviation))

    @property
    def deviations(self) -> dict[str, Any]:
        """What `compare.merge_ranks` takes of a rank."""
        by_name = {"gradients": self.gradients, "weights": self.weights, "buffers": self.buffers}
        return {"loss": self.loss, "norm": self.norm, **by_name}

    def _compare_scalar(self, kind: str, step: int, measured: float) -> Deviation:
        expected = self._expected[kind]
        if self._rounding is None:
            return Deviation(error=relative(measured, expected[step]), bound=EXACT)
        plain = max(float(error) / max(abs(value), 1e-300) for error, value in zip(self._plain[kind][0], expected))
        return self._rounding.scalar(measured, expected[step], plain, step)
