"""Seconds of a model's own operators on a calibrated machine, from its tables of measured rates by size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.cluster.calibration import Calibration
from meshwright.planner.cost.element_bytes import ELEMENT_BYTES
from meshwright.planner.cost.meshwright_profile import CORE_DRAW_EXPS, DRAW_BYTES
from meshwright.spec.model_shape import ModelWork, Operator

KINDS = {"product": "matmul", "attention": "attention", "element": "elementwise"}
"""The part of a step of each kind of operator."""
MEASURED = {
    "exp": ("exp", 2), "cos": ("exp", 2), "sin": ("exp", 2), "log": ("exp", 2),
    "tanh": ("tanh", 2), "sigmoid": ("exp", 2), "tanh_backward": ("mul", 3), "sigmoid_backward": ("mul", 3),
    "silu": ("silu", 2), "silu_backward": ("silu_backward", 3),
    "gelu": ("gelu", 2), "gelu_backward": ("gelu_backward", 3),
    "pow": ("pow", 2), "sum": ("sum", 1), "mean": ("sum", 1),
    "native_layer_norm": ("layer_norm", 2), "native_layer_norm_backward": ("layer_norm_backward", 3),
    "_softmax": ("softmax", 2), "_softmax_backward_data": ("softmax_backward", 3),
    "clone": ("copy", 2), "cat": ("copy", 2), "copy_": ("copy", 2), "_to_copy": ("copy", 2),
    "slice_backward": ("copy", 2), "zeros_like": ("fill", 1), "zeros": ("fill", 1), "new_zeros": ("fill", 1),
    "fill_": ("fill", 1),
}  # fmt: skip
"""The measured operation that stands for each torch operator, and how many tensors it reads and writes; any other
operator counts as `DEFAULT_OPERATION`, an element-wise product of two tensors, with the same bytes."""
DEFAULT_OPERATION = ("mul", 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkSeconds:
    """Seconds of a micro-batch by part of a step; ``host``: Python and autograd for each operator."""

    forward: dict[str, float]
    backward: dict[str, float]
    operators: float = 0.0
    """Number of operators of a forward."""
    last_s: float = 0.0
    """Seconds of the last product of a forward."""
    narrow_s: float = 0.0
    """Seconds of the products of a forward that selective recompute computes again."""

    def plus(self, other: WorkSeconds, times: float = 1.0) -> WorkSeconds:
        """Returns this plus ``times`` times another."""
        forward, backward = (
            {name: base[name] + times * added[name] for name in base}
            for base, added in ((self.forward, other.forward), (self.backward, other.backward))
        )
        return WorkSeconds(
            forward=forward,
            backward=backward,
            operators=self.operators + times * other.operators,
            last_s=self.last_s + times * other.last_s,
            narrow_s=self.narrow_s + times * other.narrow_s,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSeconds:
    """Seconds of a micro-batch by position in a pipeline: first end, a layer, last end."""

    first_end: WorkSeconds
    """The embedding."""
    layer: WorkSeconds
    """A layer, the mean of all."""
    last_end: WorkSeconds
    """All other operators: tensors made once for all layers, final norm, head, loss."""


def price_operators(
    work: ModelWork, calibration: Calibration, dtype: str, busy: bool, logits: float = 0.0
) -> PipelineSeconds:
    """Prices a model's operators on one micro-batch.

    Args:
        work: the operators.
        calibration: of the machine.
        dtype: of compute.
        busy: whether other ranks of the machine compute at the same time.
        logits: number of logits of the loss, which isn't among the model's operators.
    """
    seconds_by_operator: dict[tuple[Operator, bool], float] = {}

    def price(forward: Sequence[Operator], backward: Sequence[Operator]) -> WorkSeconds:
        products = [operator for operator in forward if operator.kind == "product"]
        return WorkSeconds(
            forward=_pass_seconds(forward, calibration, dtype, busy, False, seconds_by_operator),
            backward=_pass_seconds(backward, calibration, dtype, busy, True, seconds_by_operator),
            operators=len(forward),
            last_s=sum(seconds_by_operator[operator, False] for operator in products[-1:]),
            # Recompute stops ahead of the last one.
            narrow_s=sum(seconds_by_operator[operator, False] for operator in products[:-1] if not operator.kept_bytes),
        )

    layer = price((), ())
    for count, kind in zip(work.counts, work.layers):
        layer = layer.plus(price(kind.forward, kind.backward), count / sum(work.counts))
    end_seconds = [
        price(
            [operator for operator in work.rest.forward if operator.name.startswith("embedding") is is_embedding],
            [operator for operator in work.rest.backward if operator.name.startswith("embedding") is is_embedding],
        )
        for is_embedding in (True, False)
    ]
    for name in ("loss", "cross_entropy"):
        if logits and calibration.has_operation(name, "float32"):
            end_seconds[1].forward["elementwise"] += float(calibration.operation_s(name, logits, "float32", busy))
            break
    return PipelineSeconds(first_end=end_seconds[0], layer=layer, last_end=end_seconds[1])


def _pass_seconds(
    operators: Sequence[Operator],
    calibration: Calibration,
    dtype: str,
    busy: bool,
    is_backward: bool,
    seconds_by_operator: dict[tuple[Operator, bool], float],
) -> dict[str, float]:
    seconds = dict.fromkeys((*KINDS.values(), "host"), 0.0)
    for operator in operators:
        if (operator, is_backward) not in seconds_by_operator:
            seconds_by_operator[operator, is_backward] = operator_s(operator, calibration, dtype, busy, is_backward)
        seconds[KINDS[operator.kind]] += seconds_by_operator[operator, is_backward]
    seconds["host"] = len(operators) * calibration.host_s("operator_backward" if is_backward else "operator_forward")
    return seconds


def operator_s(operator: Operator, calibration: Calibration, dtype: str, busy: bool, is_backward: bool) -> float:
    """Returns the seconds of one operator.

    Args:
        operator: with its sizes.
        calibration: of the machine.
        dtype: of compute.
        busy: whether other ranks compute at the same time.
        is_backward: whether it runs in backward, whose two products contract over weight rows and over tokens.
    """
    if operator.kind == "product":
        batch, m, n, k = operator.sizes
        # Y = X W' in forward; backward contracts over tokens (dW = X' dY, tn) or over weight rows (dX = dY W, nn).
        form = "nt" if not is_backward else ("tn" if operator.summed else "nn")
        return batch * float(calibration.matmul_s(m, n, k, dtype, form, busy))
    if operator.kind == "attention" and calibration.has_attention(dtype):
        rows, heads, queries, _, size = operator.sizes
        return float(calibration.attention_s(rows * heads, queries, size, dtype, is_backward, busy))
    return _elementwise_s(operator, calibration, dtype, busy)


def _elementwise_s(operator: Operator, calibration: Calibration, dtype: str, busy: bool) -> float:
    """Returns the seconds of a memory-bound operator: of the measured operation that moves as many bytes."""
    name, tensors = MEASURED.get(operator.name, DEFAULT_OPERATION)
    if not calibration.has_operation(name, dtype):
        name, tensors = "copy", 2
    # As many elements as give the measured operation the operator's bytes.
    elements = max(1.0, operator.bytes / (tensors * ELEMENT_BYTES[dtype]))
    is_core_draw = operator.name == "draw" and calibration.machine.get("kind") == "cpu"
    if is_core_draw and calibration.has_operation("exp", dtype):
        name, elements = "exp", max(1.0, operator.bytes / DRAW_BYTES * CORE_DRAW_EXPS)
    return float(calibration.operation_s(name, elements, dtype, busy))
