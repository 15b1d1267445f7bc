"""The report of an out-of-memory error: planned and measured bytes of each kind of memory side by side."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from meshwright.spec.plan import Plan
from meshwright.units import format_bytes

OUT_OF_MEMORY = "out of memory"
"""Beginning of the report, after the rank's name."""
_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "CUDNN_STATUS_ALLOC_FAILED")


def is_shortage(error: BaseException) -> bool:
    """Returns whether an exception means that memory ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _WORDS)


def report(plan: Plan, measured: Mapping[str, int], position: str, error: BaseException) -> str:
    """Returns the error message with a table of planned and measured bytes.

    Args:
        plan: of the run.
        measured: bytes of this rank by kind, as far as they are known; ``peak`` is the most it used.
        position: phase and step.
        error: what the allocator raised.
    """
    planned = plan.prediction.memory
    rows = [f"{OUT_OF_MEMORY} in {position}: {str(error).splitlines()[0][:300] or type(error).__name__}"]
    rows.append(f"  {'part of a rank':<18}{'planned':>12}{'measured':>12}")
    for kind in dict.fromkeys((*planned, *(name for name in measured if name != "peak"))):
        cells = (
            format_bytes(bytes_by_kind[kind]) if kind in bytes_by_kind else "-" for bytes_by_kind in (planned, measured)
        )
        rows.append(f"  {kind:<18}" + "".join(f"{text:>12}" for text in cells))
    peak = format_bytes(measured["peak"]) if measured.get("peak") else "-"
    rows.append(f"  {'together, peak':<18}{format_bytes(plan.prediction.together):>12}{peak:>12}")
    return "\n".join(rows)
