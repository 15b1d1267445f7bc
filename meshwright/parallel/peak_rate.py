"""Measures this rank's matrix-product rate while all ranks compute: the reference of utilisation."""

from __future__ import annotations

import time

import torch

SIZE = {"cpu": 512, "cuda": 8192}
"""Edge of the square matrices: large enough for the device's best rate, small enough for a start-up."""
SPAN_S = 0.05
"""How long to multiply."""


def measure_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Returns FLOP/s of this rank's device for products of ``dtype`` matrices, the best of a few."""
    edge = SIZE.get(device.type, 2048)
    a, b = (torch.randn(edge, edge, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    out = torch.mm(a, b)
    best, deadline_s = float("inf"), time.perf_counter() + SPAN_S
    while best == float("inf") or time.perf_counter() < deadline_s:
        _settle(device)
        began = time.perf_counter()
        torch.mm(a, b, out=out)
        _settle(device)
        best = min(best, time.perf_counter() - began)
    return 2.0 * edge**3 / best


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
