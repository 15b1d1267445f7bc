"""How far a run under a layout is from the reference, and the verdict."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from meshwright.proof.scope import Scope

EXACT = 1e-9
"""Largest relative error that passes in float64."""
KINDS = ("loss", "gradient", "norm", "weight")
"""What is compared, in the order of a verdict's errors."""
TINY_SHARE = 1e-3
"""A weight's error is relative to its own largest entry, but to no less than this share of the model's largest.

Some gradients are zero in exact arithmetic (a key's bias under softmax), and their rounding noise has no relative size.
"""

_RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit): .")
"""A line of a traceback that names an error and says something of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deviation:
    """A relative error and its bound."""

    error: float
    bound: float

    @property
    def share(self) -> float:
        """The error in units of its bound, infinite for one that isn't finite; at most 1 passes."""
        return self.error / self.bound if math.isfinite(self.error) else math.inf

    @property
    def within(self) -> bool:
        """Whether the error passes."""
        return self.error <= self.bound


@dataclass(frozen=True, kw_only=True, slots=True)
class Worst:
    """The weight that is furthest off, in units of its bound."""

    name: str
    error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The result for one layout; errors are relative."""

    layout: str
    passed: bool
    loss_error: float
    grad_error: float
    grad_norm_error: float
    weight_error: float
    worst: Worst
    buffer_error: float | None = None
    """Of the buffers that forward changes, after the last step, in float64; None where none was compared."""
    bounds: Mapping[str, float] = field(default_factory=dict)
    """What ``loss``, ``gradient``, ``norm`` and ``weight`` were held against, each that of the error beside it; empty
    in float64, where all are `EXACT`."""
    refused: str = ""
    """Why there is no pass: the layout couldn't run, or left whole what it was asked to split."""
    crashed: str = ""
    """What ended the layout's ranks, if something did."""
    wrong: str = ""
    """What differs from one device, in which layer, and what that points at; "" where nothing does."""
    method_error: float = 0.0
    """Of a layout that sends rounded numbers: how far these were from the same method in plain numpy."""
    rounding_distance: float = 0.0
    """Of the same: how far rounding takes what is sent from exact values, relative. No part of the verdict, since the
    other errors are of runs that go on with exact values."""
    scope: Scope | None = None
    """What was proven; None where nothing ran."""

    @classmethod
    def unproven(cls, layout: str, refused: str = "", crashed: str = "", scope: Scope | None = None) -> Verdict:
        """Returns the verdict on a layout under which nothing was compared."""
        return cls(
            layout=layout,
            passed=False,
            loss_error=math.inf,
            grad_error=math.inf,
            grad_norm_error=math.inf,
            weight_error=math.inf,
            worst=Worst(name="", error=math.inf),
            refused=refused,
            crashed=crashed,
            scope=scope,
        )

    @property
    def outcome(self) -> str:
        """``passed``, ``refused``, ``crashed`` or ``wrong``."""
        if self.passed:
            return "passed"
        return "refused" if self.refused else "crashed" if self.crashed else "wrong"

    def to_json(self) -> dict[str, object]:
        """Returns plain values; infinite errors become strings that JSON can hold."""
        plain = asdict(self) | {"scope": self.scope.to_json() if self.scope else None}
        optional = ("bounds", "refused", "crashed", "wrong", "method_error", "rounding_distance", "scope")
        plain = {key: value for key, value in plain.items() if value or key not in optional}
        if self.buffer_error is None:
            del plain["buffer_error"]
        return {key: _finite(value) for key, value in plain.items()}


def one_line(error: BaseException) -> str:
    """Returns an error in one line, never empty: its type and the line where a traceback's error begins."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("then [", "all "))] or lines
    # An error's message may have many lines, whose last says nothing; its first has the error's name in front.
    lines = [line for line in lines if _RAISED.match(line)] or lines
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def relative(measured: float, expected: float) -> float:
    """Returns |measured - expected| / |expected|; infinite when either isn't finite."""
    if not (math.isfinite(measured) and math.isfinite(expected)):
        return math.inf
    return abs(measured - expected) / max(abs(expected), 1e-300)


def largest(tensors: Iterable[torch.Tensor]) -> float:
    """Returns the largest absolute entry of tensors of any shape; 0 for none."""
    return max((float(tensor.abs().max()) for tensor in tensors if tensor.numel()), default=0.0)


def part_error(measured: torch.Tensor, expected: torch.Tensor, scale: float) -> float:
    """Returns the largest |measured - expected| of a shard over ``scale``; infinite when something isn't finite.

    Args:
        measured: this rank's shard, of any shape.
        expected: the same shard of the reference.
        scale: what errors are relative to.
    """
    if measured.shape != expected.shape:
        return math.inf
    if not measured.numel():
        return 0.0
    error = float((measured.to(torch.float64) - expected.to(torch.float64)).abs().max())
    return error / max(scale, 1e-300) if math.isfinite(error) else math.inf


def scales(reference: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Returns for each weight (any shape) the scale of its relative errors; see `TINY_SHARE`."""
    floor = TINY_SHARE * largest(reference.values())
    return {name: max(largest([tensor]), floor) for name, tensor in reference.items()}


def merge_ranks(
    layout: str, ranks: list[dict[str, Any]], scope: Scope | None = None, allow_whole: bool = False
) -> Verdict:
    """Merges the ranks' deviations into the layout's verdict: the worst of each kind.

    Args:
        layout: text form.
        ranks: per rank ``loss``, ``norm`` (each a `Deviation`) and ``gradients``, ``weights``, ``buffers`` (name to
            `Deviation`; buffers may be left out); of one that sends rounded numbers ``rounding``: their ``method`` (a
            `Deviation`) and ``distance``, and whether the layout asks for any (``expected``).
        scope: what was proven.
        allow_whole: whether a layout passes that left whole what it was asked to split.
    """
    gradients = _by_name(rank["gradients"] for rank in ranks)
    weights = _by_name(rank["weights"] for rank in ranks)
    loss, norm = (worst_of(rank[key] for rank in ranks) for key in ("loss", "norm"))
    buffers = _by_name(rank.get("buffers", {}) for rank in ranks)
    deviations = [*gradients.items(), *weights.items(), *buffers.items()]
    name, error = max(deviations, key=lambda item: item[1].share, default=("", Deviation(error=0.0, bound=EXACT)))
    grad, weight, buffer = (
        worst_of(deviations_by_name.values()) for deviations_by_name in (gradients, weights, buffers)
    )
    gaps = (loss, grad, norm, weight)
    rounding = [rank["rounding"] for rank in ranks if "rounding" in rank]
    method = worst_of(item["method"] for item in rounding)
    distance = max((item["distance"] for item in rounding), default=0.0)
    # A program that sends exact values equals one device, and isn't what the layout says.
    unrounded = any(item["expected"] for item in rounding) and distance == 0.0
    equal = all(gap.within for gap in (*gaps, buffer))
    differs = _Difference(layout=layout, loss=loss, norm=norm, gradients=gradients, weights=weights, buffers=buffers)
    refused = unsplit_refusal(scope) if equal and scope and scope.unsplit and not allow_whole else ""
    return Verdict(
        layout=layout,
        passed=equal and method.within and not unrounded and not refused,
        loss_error=loss.error,
        grad_error=grad.error,
        grad_norm_error=norm.error,
        weight_error=weight.error,
        worst=Worst(name=name, error=error.error),
        buffer_error=buffer.error if buffers else None,
        bounds={} if differs.exact else {kind: gap.bound for kind, gap in zip(KINDS, gaps)},
        refused=refused,
        wrong=_wrong_sentence(differs, equal, method, unrounded),
        method_error=method.error,
        rounding_distance=distance,
        scope=scope,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Difference:
    """How a layout's run differs from one device's; errors are relative."""

    layout: str
    loss: Deviation
    norm: Deviation
    gradients: Mapping[str, Deviation]
    """The worst of any compared step and rank, by weight."""
    weights: Mapping[str, Deviation]
    """The same after the last step."""
    buffers: Mapping[str, Deviation]
    """Of the buffers that forward changes, after the last step."""

    @property
    def exact(self) -> bool:
        """Whether all was held against `EXACT`."""
        every = (self.loss, self.norm, *self.gradients.values(), *self.weights.values())
        return all(gap.bound == EXACT for gap in every)

    @property
    def sentence(self) -> str:
        """Names the worst tensor, its layer and the layout, and the likely cause by the pattern of errors."""
        kind, errors = (
            ("gradient", self.gradients) if self._names_off(self.gradients) else ("trained value", self.weights)
        )
        off_names = self._names_off(errors)
        if not off_names and self.loss.within and self.norm.within:
            return self._buffer_sentence()
        if not off_names:
            loss_text, norm_text = self._deviation_text(self.loss), self._deviation_text(self.norm)
            scalars = f"the loss is off by {loss_text} and the gradients' norm by {norm_text}"
            return f"under {self.layout} {scalars}, but every gradient and weight agrees: {self._likely_cause(False)}"
        worst = max(off_names, key=lambda name: errors[name].share)
        layer = worst.rpartition(".")[0]
        first_off_text = f", the first of them in '{off_names[0]}'" if len(off_names) > 1 else ""
        return (
            f"under {self.layout} the {kind} of '{worst}' (in {layer or 'the model itself'}) is off by "
            f"{self._deviation_text(errors[worst])}, and {len(off_names)} of {len(errors)} weights are off by more "
            f"than {f'{EXACT:g}' if self.exact else 'rounding explains'}{first_off_text}; the loss is off by "
            f"{self._deviation_text(self.loss)}: {self._likely_cause(kind == 'gradient')}"
        )

    def _buffer_sentence(self) -> str:
        off_names = self._names_off(self.buffers)
        worst = max(off_names, key=lambda name: self.buffers[name].share)
        return (
            f"under {self.layout} the buffer '{worst}', which forward changes, is off by "
            f"{self._deviation_text(self.buffers[worst])} after the last step, and {len(off_names)} of "
            f"{len(self.buffers)} such buffers are, though losses, gradients and weights agree so far: forward changes "
            "it more often than once a step, or by rows or tokens that the layout gives to other ranks"
        )

    def _deviation_text(self, gap: Deviation) -> str:
        return f"{gap.error:.1e}" if self.exact else f"{gap.error:.1e} (allowed {gap.bound:.1e})"

    def _names_off(self, errors: Mapping[str, Deviation]) -> list[str]:
        return [name for name, gap in errors.items() if not gap.within]

    def _likely_cause(self, gradient: bool) -> str:
        if not self.loss.within:
            return (
                "its forward computes something else, so some code looks at tokens, heads, rows or random numbers that "
                "the layout gives to other ranks"
            )
        if not gradient:
            return "forward and backward agree, so the sum of the loss, the clipping or the optimizer's step differs"
        if len(off := self._names_off(self.gradients)) <= len(self.gradients) // 2:
            names = ", ".join(off[:3])
            return f"forward agrees, so what differs is how the gradient of these is summed over ranks: {names}"
        return "forward agrees, so its backward does something else, or gradients are summed over the wrong ranks"


def _wrong_sentence(differs: _Difference, equal: bool, method: Deviation, unrounded: bool) -> str:
    if equal and unrounded:
        return f"under {differs.layout} nothing that was sent is rounded, though the layout asks for it"
    if equal and not method.within:
        return (
            f"under {differs.layout} rounded numbers are off by {method.error:.1e} from the same method in numpy: "
            "a rank rounds by another key, or decodes other bytes than it was sent"
        )
    return "" if equal else differs.sentence


def unsplit_refusal(scope: Scope) -> str:
    """Returns the refusal of a layout that computes the right thing, but didn't split what it was asked to."""
    # Layers of one kind have one reason, which is said once.
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in scope.unsplit.items():
        names_by_reason.setdefault(reason, []).append(name)
    named = "; ".join(f"{', '.join(names[:3])}: {reason}" for reason, names in list(names_by_reason.items())[:3])
    unnamed_count = len(scope.unsplit) - sum(len(names[:3]) for names in list(names_by_reason.values())[:3])
    return (
        f"it equals one device, but tp splits {scope.layer_share:.0%} of the layers and leaves whole what it was asked "
        f"to split: {named}{f'; {unnamed_count} more' if unnamed_count > 0 else ''}; --allow-whole accepts it"
    )


def worst_of(gaps: Iterable[Deviation]) -> Deviation:
    """Returns the gap that takes most of its bound; none at all is no error."""
    return max(gaps, key=lambda gap: gap.share, default=Deviation(error=0.0, bound=EXACT))


def _by_name(rows: Iterable[Mapping[str, Deviation]]) -> dict[str, Deviation]:
    worst_by_name: dict[str, Deviation] = {}
    for row in rows:
        for name, gap in row.items():
            worst_by_name[name] = worst_of([worst_by_name[name], gap]) if name in worst_by_name else gap
    return worst_by_name
