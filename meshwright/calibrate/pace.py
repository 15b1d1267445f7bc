"""A timed probe of fixed work: the machine's current speed, to tell a slow machine from a wrong prediction."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

TOKENS, WIDTH, OUTER = 256, 384, 1024
"""Sizes of the matrix product and, times four, of the element-wise operation."""
SMALL = 300
"""Number of small operations, which measure the host's speed."""
ROUNDS = 3
"""Rounds, of which the median counts: an interrupt of one is no change of speed."""


@dataclass(slots=True)
class Pace:
    """Fixed work on one rank: a matrix product, an element-wise operation beyond the cache, small operations."""

    device: torch.device
    """Device that it runs on."""
    _operations: list[tuple[Callable[[], object], int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Allocates the tensors."""
        left_matrix, right_matrix = (
            torch.ones(shape, device=self.device) for shape in ((TOKENS, WIDTH), (WIDTH, OUTER))
        )
        product = torch.empty(TOKENS, OUTER, device=self.device)
        long_vector = torch.ones(4 * TOKENS * OUTER, device=self.device)
        result, short_vector = torch.empty_like(long_vector), torch.ones(16, device=self.device)
        # (operation, repeats): compute, memory bandwidth and host overhead in turn.
        self._operations = [
            (lambda: torch.mm(left_matrix, right_matrix, out=product), 4),
            (lambda: torch.mul(long_vector, 2.0, out=result), 4),
            (lambda: torch.add(short_vector, short_vector), SMALL),
        ]

    def seconds(self) -> float:
        """Returns seconds of the work: about 0.01 on a processor core."""
        return sorted(self._run_once() for _ in range(ROUNDS))[ROUNDS // 2]

    def _run_once(self) -> float:
        """Runs all operations once and returns the seconds."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        start_s = time.perf_counter()
        for operation, repeats in self._operations:
            for _ in range(repeats):
                operation()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start_s
