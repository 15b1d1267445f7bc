"""Custom loops as users of DistributedDataParallel, FSDP2 and single devices write them, one habit each.

Each takes a strategy and returns losses, means over this rank's rows. On one device that is `OneDevice`, plain torch.
"""

from __future__ import annotations

# A module's loops list themselves in LOOPS when it is imported.
from tests.contract.careless_loops import accumulation, forwards, gradients, optimizers, weights
from tests.contract.careless_loops.habit import LOOPS, Careless
from tests.contract.careless_loops.weights import UNCOMPARED

__all__ = ["LOOPS", "UNCOMPARED", "Careless", "accumulation", "forwards", "gradients", "optimizers", "weights"]
