"""Out of memory: what was planned beside what was held, part by part, instead of an allocator's last words."""

from __future__ import annotations

import resource
from collections.abc import Mapping

import torch

from meshwright.spec.plan import Plan
from meshwright.units import format_bytes

OUT_OF_MEMORY = "out of memory"
"""How the report begins, behind the rank's name."""
_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "CUDNN_STATUS_ALLOC_FAILED")


def is_shortage(error: BaseException) -> bool:
    """Returns whether an exception means that memory ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


def peak_bytes() -> int:
    """Returns the most memory this rank has used: allocated on its GPU, or resident on the host."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def report(plan: Plan, measured: Mapping[str, int], place: str, error: BaseException) -> str:
    """Returns the message.

    Args:
        plan: of the run.
        measured: bytes of this rank by part, as far as they are known; ``peak`` is the most it used.
        place: phase and step.
        error: what the allocator raised.
    """
    planned = plan.prediction.memory
    rows = [f"{OUT_OF_MEMORY} in {place}: {str(error).splitlines()[0][:300] or type(error).__name__}"]
    rows.append(f"  {'part of a rank':<18}{'planned':>12}{'measured':>12}")
    for part in dict.fromkeys((*planned, *(name for name in measured if name != "peak"))):
        told = (format_bytes(held[part]) if part in held else "-" for held in (planned, measured))
        rows.append(f"  {part:<18}" + "".join(f"{text:>12}" for text in told))
    peak = format_bytes(measured["peak"]) if measured.get("peak") else "-"
    rows.append(f"  {'together, peak':<18}{format_bytes(sum(planned.values())):>12}{peak:>12}")
    return "\n".join(rows)
