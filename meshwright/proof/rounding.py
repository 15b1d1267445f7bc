"""Bounds how far rounding alone may take a run in low precision from the same run in float64.

What is bounded is the relative error of a layout's losses, gradient norms, gradients and trained weights, of the last
two for each rank's shard of n entries. Below, u is the precision's unit roundoff (`UNITS`); e is the same error of one
plain device in that precision, measured; s is the root mean square of the whole gradient, d the sum of the learning
rates; LATER is 1 in the first step; F(n) = FACTOR (1 + 2 / sqrt(n)):

    loss, norm           |x - x64| / |x64|         <= LATER (FACTOR e + u)
    gradient, rms        rms(g - g64) / s          <= LATER (F(n) e + u)
    gradient, largest    max |g - g64| / max |g64| <= LATER (max(LARGEST, F(n)) e_largest + u)
    weight, median       median |w - w64| / d      <= LATER (F(n) e_median + u)
    weight, rms          rms(w - w64) / d          <= LATER (LARGEST e + u) + sqrt(JUMPS / n)

Why e is measured. The worst case of a sum of n products grows as n u, and that of a network as the product over its
layers (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 2002, sections 3.1 and 4.2): a bound from sizes
alone is useless. Rounding errors behave as independent random numbers of mean zero, whose sum grows as sqrt(n) u
(section 2.8 there; Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 41,
2019, theorem 2.4). Their size is a statistic of this model on this text, which a plain device shows. It trains DRAWS
times, since an error may be large and seldom: a token of a mixture that two experts suit almost alike goes to either.
What is drawn again is every rounding, by weights that are moved at random by half a unit roundoff before they are
rounded (Parker, Monte Carlo Arithmetic, UCLA CSD-970002, 1997); e is the root mean square over the draws.

Why FACTOR, u and LATER. A layout rounds other partial sums in another order: one draw more of the same statistic, with
a few roundings more where a sum over ranks or micro-batches is rounded that one device keeps inside of a product, and u
is one rounding more of the result. In later steps the weights themselves have drifted.

Why F(n) and LARGEST. A root mean square of n entries scatters by 1 / sqrt(2 n) of itself, two of them apart by
1 / sqrt(n). The largest of n normal numbers lies near sqrt(2 ln n) root mean squares and scatters (Cramer, Mathematical
Methods of Statistics, 1946, section 28.6).

Why PRIOR. A statistic of few entries may be zero by chance. The mean square e^2 of n entries is drawn towards c^2, that
of the model's tensors in the middle, as if PRIOR entries more had shown c: (n e^2 + PRIOR c^2) / (n + PRIOR) (Smyth,
Stat. Appl. Genet. Mol. Biol. 3, 2004, section 4).

Why weights have a median and JUMPS. The first updates of AdamW have the size of the learning rate whatever the
gradient's (Kingma and Ba, ICLR 2015, section 2.1), so an entry whose gradient has a sign that rounding decides moves
the other way. Which entries do is chance, and in a small tensor whether any does. Few jumps don't move the median, and
every mistake of an optimizer does; the root mean square allows JUMPS entries more that jump than the plain device has.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch

from meshwright.proof.compare import TINY_SHARE, Deviation, largest, part_error, relative, worst_of
from meshwright.proof.reference import Trace
from meshwright.spec.layout_fields import FLOAT8_RECIPES

UNITS = {
    "float32": 2.0**-24,
    **dict.fromkeys(("tf32", "fp16"), 2.0**-11),
    **dict.fromkeys(("bf16", *FLOAT8_RECIPES), 2.0**-8),
}
"""Unit roundoff by precision: half the distance from 1 to the next number. Source: Higham, section 2.1.

In tf32 it is that of the operands of products. With products in float8 weights, activations and results are rounded to
bf16, and that is what u and the draws round; the operands' rounding to 8 bits (unit 2^-4) is in e, since the plain
device computes its products so."""
FACTOR, LARGEST, LATER = 2.5, 5.0, 2.0
"""Factors on the plain device's error: on the whole, in the largest entry, and on both after the first step."""
PRIOR = 32
"""Entries for which the model's median tensor counts beside a tensor's own."""
DRAWS = 4
"""Times that the plain device trains."""
JUMPS = 4
"""Entries of a trained weight that may move the other way than in float64, beside the plain device's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorScale:
    """What a tensor's errors are relative to."""

    rms: float
    """Of its entries."""
    largest: float
    """Absolute entry."""


def rms(tensor: torch.Tensor) -> float:
    """Returns the root mean square of the entries of a tensor of any shape; 0 for none."""
    return math.sqrt(float(tensor.to(torch.float64).square().mean())) if tensor.numel() else 0.0


def tensor_scales(reference: Mapping[str, torch.Tensor]) -> dict[str, TensorScale]:
    """Returns the scale of each tensor (any shape), no less than `TINY_SHARE` of the model's largest."""
    scales = {name: TensorScale(rms=rms(tensor), largest=largest([tensor])) for name, tensor in reference.items()}
    rms_floor, largest_floor = (
        max((getattr(scale, key) for scale in scales.values()), default=0.0) for key in ("rms", "largest")
    )
    rms_floor, largest_floor = max(TINY_SHARE * rms_floor, 1e-300), max(TINY_SHARE * largest_floor, 1e-300)
    return {
        name: TensorScale(rms=max(scale.rms, rms_floor), largest=max(scale.largest, largest_floor))
        for name, scale in scales.items()
    }


def median_abs(errors: torch.Tensor) -> float:
    """Returns the median of the absolute values of a tensor of any shape; 0 for none."""
    return float(errors.abs().median()) if errors.numel() else 0.0


def moderate_error(error: float, entries: int, common: float) -> float:
    """Returns an error of so many entries, drawn towards that of other tensors.

    Args:
        error: root mean square, or median, of the entries' errors.
        entries: how many.
        common: of the others.
    """
    return math.sqrt((entries * error**2 + PRIOR * common**2) / (entries + PRIOR))


def small_sample_factor(entries: int) -> float:
    """Returns `FACTOR` for a statistic of so many entries."""
    return FACTOR * (1 + 2 / math.sqrt(max(1, entries)))


class ErrorStatistics:
    """What the plain device's trainings were off by, over all that are added.

    Args:
        truth: the training in float64.
    """

    def __init__(self, truth: Trace) -> None:
        self._truth, self._draws = truth, 0
        self._squares: dict[Hashable, torch.Tensor] = {}
        self._largest: dict[Hashable, float] = {}

    def add(self, trace: Trace) -> None:
        """Adds a training."""
        self._draws += 1
        self._add("losses", torch.tensor(trace.losses), torch.tensor(self._truth.losses))
        self._add("norms", torch.tensor(trace.norms), torch.tensor(self._truth.norms))
        pairs: list[tuple[Hashable, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]]
        pairs = [("weights", trace.weights, self._truth.weights)]
        pairs += [(step, trace.gradients[step], expected) for step, expected in self._truth.gradients.items()]
        for section, trained, expected in pairs:
            for name, reference in expected.items():
                self._add((section, name), trained[name], reference)

    def _add(self, key: Hashable, measured: torch.Tensor, expected: torch.Tensor) -> None:
        error = measured.to(torch.float64) - expected
        self._largest[key] = max(self._largest.get(key, 0.0), largest([error]))
        self._squares[key] = self._squares[key].add_(error.square_()) if key in self._squares else error.square_()

    @property
    def mean_errors(self) -> dict[Hashable, tuple[torch.Tensor, float]]:
        """Each entry's error, root mean square of all trainings, and the largest of any entry in any training.

        Keys are ``losses`` and ``norms`` (an entry a step), (step, weight) for gradients, (``weights``, weight).
        """
        return {key: ((squares / self._draws).sqrt(), self._largest[key]) for key, squares in self._squares.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainDeviation:
    """What the plain device shows of one whole tensor; relative errors."""

    size: TensorScale
    rms: float
    """Of all entries, moderated."""
    median_abs: float
    """The median, moderated."""
    largest: float
    """Of any entry, but no less than ``rms``; relative to the largest entry."""


def plain_deviations(
    errors: Mapping[str, tuple[torch.Tensor, float]], relative_to: Mapping[str, TensorScale]
) -> dict[str, PlainDeviation]:
    """Returns each tensor's errors on the plain device, relative to its scale and moderated over all tensors.

    Args:
        errors: of each tensor, (n,), with its largest, as in `ErrorStatistics.mean_errors`.
        relative_to: what errors are relative to.
    """
    scale_of = {name: relative_to[name].rms for name in errors}
    by_rms = {name: rms(error) / scale_of[name] for name, (error, _) in errors.items()}
    by_median = {name: median_abs(error) / scale_of[name] for name, (error, _) in errors.items()}
    # c of this module's head: the tensor in the middle stands for the model
    common_rms, common_median = (statistics.median(by_name.values()) for by_name in (by_rms, by_median))
    deviations = {}
    for name, (error, largest_error) in errors.items():
        scale = relative_to[name]
        moderated_rms = moderate_error(by_rms[name], error.numel(), common_rms)
        deviations[name] = PlainDeviation(
            size=scale,
            rms=moderated_rms,
            median_abs=moderate_error(by_median[name], error.numel(), common_median),
            largest=max(largest_error, moderated_rms * scale.rms) / scale.largest,
        )
    return deviations


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounding:
    """The bound of one precision."""

    unit: float
    """Unit roundoff."""

    def allowed(self, plain: float, step: int, factor: float = FACTOR) -> float:
        """Returns the largest relative error that rounding explains.

        Args:
            plain: the plain device's own.
            step: steps before this one.
            factor: by what it may be exceeded.
        """
        return (LATER if step else 1.0) * (factor * plain + self.unit)

    def scalar(self, measured: float, expected: float, plain: float, step: int) -> Deviation:
        """Compares a loss or norm.

        Args:
            measured: under the layout; any shape, which the other two have too.
            expected: in float64.
            plain: the plain device's relative error.
            step: steps before this one.
        """
        return Deviation(error=relative(measured, expected), bound=self.allowed(plain, step))

    def gradient(
        self, measured: torch.Tensor, expected: torch.Tensor, plain: torch.Tensor, deviation: PlainDeviation, step: int
    ) -> Deviation:
        """Compares a rank's part of a gradient; returns the worse of its root mean square and largest errors.

        Args:
            measured: under the layout; any shape, which the other two have too.
            expected: the same part in float64.
            plain: the plain device's errors of that part.
            deviation: of the whole gradient.
            step: steps before this one.
        """
        factor = small_sample_factor(measured.numel())
        # The bound of the whole gradient, or of this shard where the plain device rounds it worse than the rest.
        bound = self.allowed(deviation.rms, step, factor)
        if (error := self._errors(measured, expected, deviation)) is None:
            return Deviation(error=math.inf, bound=bound)
        plain_rms = rms(plain) / deviation.size.rms
        largest_error = part_error(measured, expected, deviation.size.largest)
        return worst_of(
            (
                Deviation(error=rms(error), bound=max(bound, self.allowed(plain_rms, step, factor))),
                Deviation(error=largest_error, bound=self.allowed(deviation.largest, step, max(LARGEST, factor))),
            )
        )

    def weight(
        self, measured: torch.Tensor, expected: torch.Tensor, plain: torch.Tensor, deviation: PlainDeviation, step: int
    ) -> Deviation:
        """Compares a rank's part of a trained weight; returns the worse of its median and root mean square errors.

        Args:
            measured: under the layout; any shape, which the other two have too.
            expected: the same part in float64.
            plain: the plain device's errors of that part.
            deviation: of the whole weight.
            step: of the last step, the steps before it.
        """
        plain_error, factor = plain / deviation.size.rms, small_sample_factor(measured.numel())
        bound = self.allowed(deviation.median_abs, step, factor)
        if median_abs(plain_error) > LARGEST * deviation.median_abs:
            # Rounding alone decides this part, as of a bias the keys', whose gradients are zero in exact arithmetic:
            # the update g / (|g| + eps) of AdamW has the size of the noise, which sums over more ranks make larger.
            bound = self.allowed(median_abs(plain_error), step, factor * LARGEST / FACTOR)
        if (error := self._errors(measured, expected, deviation)) is None:
            return Deviation(error=math.inf, bound=bound)
        # A jump is an update of the other sign: an error of about d, so of 1 in units of d.
        jumps = math.sqrt(JUMPS / max(1, measured.numel()))
        return worst_of(
            (
                Deviation(error=median_abs(error), bound=bound),
                Deviation(
                    error=rms(error), bound=self.allowed(max(deviation.rms, rms(plain_error)), step, LARGEST) + jumps
                ),
            )
        )

    def _errors(self, measured: torch.Tensor, expected: torch.Tensor, deviation: PlainDeviation) -> torch.Tensor | None:
        """Returns relative errors; None where something isn't finite or of another shape."""
        if not math.isfinite(part_error(measured, expected, 1.0)):
            return None
        return (measured.to(torch.float64) - expected) / deviation.size.rms
