"""Holds every transfer of rounded numbers against a plain one, then lets the program go on with exact values.

So a proof has two halves that share nothing: what rounds is held against `proof.plain_rounding`, and everything else
against one device, which rounds nothing.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from meshwright.parallel.compression import LossyTransfer
from meshwright.proof.compare import EXACT, Deviation, worst_of
from meshwright.proof.plain_rounding import compressed_sum, round_weight, sum_in_order


class CompressedSums:
    """The observer of a program's compressors; every rank has one."""

    def __init__(self) -> None:
        self.method = Deviation(error=0.0, bound=EXACT)
        """How far any transfer was from the plain one, relative to its largest value."""
        self._squared_error = self._squared_exact = 0.0

    @property
    def distance(self) -> float:
        """How far rounding takes all values that were sent from the exact ones; 2-norms, relative."""
        return math.sqrt(self._squared_error / self._squared_exact) if self._squared_exact else 0.0

    def check(self, transfer: LossyTransfer) -> None:
        """Compares a transfer with the plain one, and puts exact values in its place."""
        values_by_rank = _gather_values(transfer)
        names, sizes = transfer.weights.names, transfer.weights.sizes
        offset = 0
        for position, (name, size) in enumerate(zip(names, sizes, strict=True)):
            terms = [values[offset : offset + size] for values in values_by_rank]
            offset += size
            if transfer.draw:
                draw = f"{transfer.draw},{transfer.copies_name}"
                self._compare(
                    transfer.after[position],
                    compressed_sum(terms, transfer.name, transfer.run, draw, name),
                    sum_in_order(terms),
                )
                continue
            for rank, term in enumerate(terms):
                plain = round_weight(_widened(term), transfer.name, "", name)
                self._compare(transfer.after[rank * len(names) + position], plain, term)

    def _compare(self, measured: torch.Tensor, plain: np.ndarray[Any, Any], exact: np.ndarray[Any, Any]) -> None:
        exact_tensor = torch.from_numpy(exact).to(measured.device).view(measured.shape)
        expected = torch.from_numpy(plain).to(measured.dtype).view(measured.shape)
        sent = measured.cpu()
        # A block that isn't finite is NaN on both sides.
        off = torch.nan_to_num(sent.double() - expected.double(), nan=0.0)
        off[torch.isnan(sent) != torch.isnan(expected)] = math.inf
        scale = float(torch.nan_to_num(expected).abs().max()) if expected.numel() else 0.0
        error = float(off.abs().max()) / max(scale, 1e-300) if off.numel() else 0.0
        self.method = worst_of((self.method, Deviation(error=error, bound=EXACT)))
        self._squared_error += float(np.square(np.nan_to_num(sent.double().view(-1).numpy() - exact)).sum())
        self._squared_exact += float(np.square(exact, dtype=np.float64).sum())
        measured.copy_(exact_tensor)


def _widened(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns weights, (n,), in the type in which blocks are rounded."""
    return values if values.dtype == np.float64 else values.astype(np.float32)


def _gather_values(transfer: LossyTransfer) -> list[np.ndarray[Any, Any]]:
    """Returns the exact values of every rank, (n,) each, in order."""
    flat = torch.cat([values.reshape(-1) for values in transfer.before])
    # numpy has no bfloat16, of which float32 holds every number.
    flat = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
    gathered = [torch.empty_like(flat) for _ in range(transfer.axis_group.size)]
    dist.all_gather(gathered, flat, group=transfer.axis_group.group)
    return [values.cpu().numpy() for values in gathered]
