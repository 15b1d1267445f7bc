"""Seconds of a model's own operators on a machine that was measured: table by table, size by size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.cluster.calibration import Calibration
from meshwright.shape import ModelWork, Operator

KINDS = {"product": "matmul", "attention": "attention", "element": "elementwise"}
"""Kinds of operators, and the parts of a step that they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkSeconds:
    """Seconds of a micro-batch by part of a step."""

    forward: dict[str, float]
    backward: dict[str, float]


def work_seconds(work: ModelWork, calibration: Calibration, dtype: str, busy: bool, logits: float = 0.0) -> WorkSeconds:
    """Prices what a model computes on one micro-batch.

    Args:
        work: its operators.
        calibration: what was measured.
        dtype: of compute.
        busy: whether other ranks of the machine compute meanwhile.
        logits: number of logits, of which the loss and its gradient are made; that is no part of the model.
    """
    found = WorkSeconds(
        forward=_seconds(work.operators(), calibration, dtype, busy, False),
        backward=_seconds(work.operators(True), calibration, dtype, busy, True),
    )
    if logits and calibration.has_operation("cross_entropy", "float32"):
        found.forward["elementwise"] += float(calibration.operation_s("cross_entropy", logits, "float32", busy))
    return found


def _seconds(
    operators: Iterable[tuple[int, Operator]], calibration: Calibration, dtype: str, busy: bool, back: bool
) -> dict[str, float]:
    found = dict.fromkeys(KINDS.values(), 0.0)
    known: dict[Operator, float] = {}
    for count, item in operators:
        if item not in known:
            known[item] = operator_s(item, calibration, dtype, busy, back)
        found[KINDS[item.kind]] += count * known[item]
    return found


def operator_s(item: Operator, calibration: Calibration, dtype: str, busy: bool, back: bool) -> float:
    """Returns the seconds of one operator, at least those of a small one.

    Args:
        item: which.
        calibration: what was measured.
        dtype: of compute.
        busy: whether other ranks compute meanwhile.
        back: whether it runs in backward: of its products one sums over the weights' rows, the other over the tokens.
    """
    if item.kind == "product":
        batch, m, n, k = item.sizes
        form = "nt" if not back else ("tn" if item.summed else "nn")
        return batch * float(calibration.matmul_s(m, n, k, dtype, form, busy))
    if item.kind == "attention" and calibration.has_attention(dtype):
        rows, heads, queries, _, size = item.sizes
        return float(calibration.attention_s(rows * heads, queries, size, dtype, back, busy))
    size = max(1, item.bytes // 2)
    return item.bytes / float(calibration.bandwidth_bytes_per_s(size, dtype, busy)) + calibration.launch_s
