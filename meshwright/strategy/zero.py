"""torch's ZeroRedundancyOptimizer, ZeRO 1, for loops with a copy of the model on every rank and summed gradients."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshwright.errors import ConfigError

with warnings.catch_warnings():
    # Its package compiles optimizers that nobody here uses, by a function that torch itself calls deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZeroOptimizer


class ZeroRedundancyOptimizer(TorchZeroOptimizer):
    """torch's own: each rank keeps the optimizer state of some parameters, updates these, and broadcasts them.

    This is ZeRO 1, over whole parameters. A layout does so over shards of each, with the gradients' sum and the gather
    under backward: ``shard=N,zero=1``; and ``zero=2`` shards gradients, ``zero=3`` parameters too.
    Source: Rajbhandari et al., ZeRO (SC 2020), section 5.

    Args:
        params: parameters or parameter groups, the same on every rank of the group; gradients are summed or averaged
            over it before `step` (DistributedDataParallel does, or the strategy with ``replicate=N``).
        optimizer_class: of torch.optim; it updates the parameters.
        process_group: ranks that share the state; all when None.
        parameters_as_bucket_view: pack parameters so that one message carries several.
        **defaults: of the optimizer class.

    Raises:
        ConfigError: for parameters that are sharded already.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        **defaults: object,
    ) -> None:
        groups = list(params)
        parameters = [item for group in groups for item in (group["params"] if isinstance(group, dict) else [group])]
        if any(isinstance(item, DTensor) for item in parameters):
            raise ConfigError(
                "the parameters are sharded already, and with them the state of any optimizer: use "
                "torch.optim's own, through HybridParallelStrategy.optimizer"
            )
        super().__init__(groups, optimizer_class, process_group, parameters_as_bucket_view, **defaults)
