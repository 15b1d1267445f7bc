"""How fast the machine is at this moment: a fixed bit of work, timed, so that drift can be told from a wrong price."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

TOKENS, WIDTH, OUTER = 256, 384, 1024
"""Of the product and of what is done to its result."""
SMALL = 300
"""Small operations: the host's own speed."""
ROUNDS = 3
"""Of which the middle one counts: what interrupts one of them is no change of speed."""


@dataclass(slots=True)
class Pace:
    """Fixed work on one rank: a product, element-wise operations on more than a core's cache, small operations."""

    device: torch.device
    """Where it runs."""
    _works: list[tuple[Callable[[], object], int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Gets the tensors."""
        left, right = (torch.ones(shape, device=self.device) for shape in ((TOKENS, WIDTH), (WIDTH, OUTER)))
        product = torch.empty(TOKENS, OUTER, device=self.device)
        wide = torch.ones(4 * TOKENS * OUTER, device=self.device)
        result, small = torch.empty_like(wide), torch.ones(16, device=self.device)
        self._works = [
            (lambda: torch.mm(left, right, out=product), 4),
            (lambda: torch.mul(wide, 2.0, out=result), 4),
            (lambda: torch.add(small, small), SMALL),
        ]

    def seconds(self) -> float:
        """Returns seconds of the work: about a hundredth on a processor core."""
        return sorted(self._once() for _ in range(ROUNDS))[ROUNDS // 2]

    def _once(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        begun = time.perf_counter()
        for work, times in self._works:
            for _ in range(times):
                work()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - begun
