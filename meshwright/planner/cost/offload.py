"""Prices state in host memory: bytes off the device, bytes on the host, seconds of the copies and of the update.

``optimizer``: the moments lie in host memory with a copy of the masters. The masters stay on the device too, because
FSDP2 gathers from them (`train.optimizer.LocalAdamW`). After the last backward gradients are copied to the host, the
processor updates, new masters are copied back: in sequence, with no overlap.
``parameters``: FSDP2's CPUOffloadPolicy. Shards, their gradients and moments lie in host memory, and the processor
updates them there. Each gather begins with the copy of a float32 shard on a separate stream. Each reduce-scatter ends
with the copy of its shard to the host, under backward; with gradient accumulation the host waits for the copy. A single
rank gathers nothing, and copies on the compute stream.
Source: torch 2.13, torch/distributed/fsdp/_fully_shard, _fsdp_param.py (all_gather_inputs), _fsdp_param_group.py
(wait_for_unshard), _fsdp_collectives.py (foreach_reduce).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.array_types import Values
from meshwright.cluster.host import HostShare
from meshwright.planner.cost.framework_profile import StateBytesPerParameter
from meshwright.planner.cost.layout_batch import Array, LayoutBatch
from meshwright.spec.layout import OFFLOADS

OPTIMIZER, PARAMETERS = OFFLOADS.index("optimizer"), OFFLOADS.index("parameters")
PINNED = 1.44
"""Memory of a pinned block over its bytes: torch rounds each up to a power of two, and of sizes that are spread evenly
over logarithms that is 1 / ln 2. Source: torch 2.13, ATen/core/CachingHostAllocator.h."""
HOST_USABLE = 0.85
"""Share of host memory that state may fill; the rest is for the system, the ranks' processes and the data."""
ADAM_PASSES = 7.0
"""Passes over the state of an AdamW update: masters, gradients, two moments read; all but the gradients written."""
NORM_PASSES = 1.0
"""Passes for the gradient norm: gradients are read once."""
ADD_PASSES = 3.0
"""Passes to accumulate a gradient: both terms read, the sum written."""
ONE_WEIGHT = 0.25
"""Share of the largest weight in two layers and the ends: what a single rank copies at a time."""


def move_state_to_host(
    memory: dict[str, Array],
    states: StateBytesPerParameter,
    layouts: LayoutBatch,
    trained: Array,
    total: Array,
    units: Array,
    size: float,
) -> None:
    """Takes off a rank's state what lies in host memory, and adds ``host``, the bytes that it takes there.

    Args:
        memory: bytes by part as if all stayed on the device; it is changed.
        states: of the engine.
        layouts: N layouts.
        trained: parameters that each rank updates, (N, P).
        total: parameters of each rank before the data axes shard them, (N, P).
        units: parameters that ZeRO-3 has gathered at once, (N, P).
        size: bytes of a master weight.
    """
    mode, gathered = layouts.offload[:, None], np.minimum(units, total)
    # What a rank's device still holds under `parameters`: gathered units, shards that arrive, gradients that leave.
    is_optimizer, is_parameters = mode == OPTIMIZER, mode == PARAMETERS
    is_pipelined, accumulates = (layouts.pp > 1)[:, None], (layouts.microbatches > 1)[:, None]
    full_gradients = states.keeps_full_gradients(layouts.zero[:, None], accumulates, is_pipelined)
    shards = layouts.state_shards[:, None]
    arriving = size * gathered * np.where(shards > 1, 1.0 / shards, ONE_WEIGHT)
    # A reduce-scatter's input lives until the next one's is ready, so gradients of two FSDP units are in flight.
    leaving = np.where(full_gradients, size * total, size * gathered)
    memory["parameters"] = memory["parameters"] + np.where(is_parameters, arriving, 0.0)
    memory["gradients"] = np.where(is_parameters, leaving, memory["gradients"])
    optimizer = memory["optimizer"] - np.where(is_optimizer, 2.0 * size * trained, 0.0)
    memory["optimizer"] = np.where(is_parameters, 0.0, optimizer)
    memory["host"] = np.where(mode > 0, (2.0 * PINNED + 2.0) * size * trained, 0.0)


def host_update_bound_s(parameters: float, sharing: Values, host: HostShare, size: float) -> Values:
    """Returns a lower bound on the seconds that offload adds to a step: the update of a rank's mean share.

    Args:
        parameters: of the model.
        sharing: most ranks that share the parameters, scalar or (N,).
        host: a rank's share of its host.
        size: bytes of a master weight.
    """
    return ADAM_PASSES * size * parameters / sharing / host.kernel_bytes_per_s


def price_offload(ranks: Any, trained: Array, host: HostShare, size: float) -> tuple[Array, Array]:
    """Returns seconds of the update in host memory and of exposed copies, (N, P) each; 0 without offload.

    Args:
        ranks: `ranks.RankTimes`, whose compute hides copies.
        trained: parameters that each rank updates, (N, P).
        host: a rank's share of its host.
        size: bytes of a master weight.
    """
    layouts, runtime = ranks.layouts, ranks.engine.runtime
    mode, zero, microbatches = layouts.offload[:, None], layouts.zero[:, None], layouts.microbatches[:, None]
    pass_s, copy_s = size * trained / host.kernel_bytes_per_s, size * trained / host.copy_bytes_per_s
    is_pipelined = layouts.pp[:, None] > 1
    accumulates = accumulates_on_host(layouts)[:, None]
    update = (ADAM_PASSES + np.where(mode == PARAMETERS, NORM_PASSES, 0.0)) * pass_s
    # To the host: backward hides the copy of a gradient shard, unless it is accumulated there.
    hidden_s = np.where(is_pipelined, 0.0, runtime.dp_overlap) * ranks.backward_busy
    accumulate_s = np.where(accumulates, (microbatches - 1.0) * (copy_s + ADD_PASSES * pass_s), 0.0)
    down = np.maximum(copy_s - hidden_s, 0.0) + accumulate_s
    # To the device: each gather copies a shard first, at ZeRO-3 in every micro-batch, the layers' for backward again.
    again_s = size * np.minimum(ranks.owned_parameters(*ranks.regathered), trained) / host.copy_bytes_per_s
    overlap = np.where(is_pipelined | (layouts.shard[:, None] == 1), 0.0, runtime.gather_overlap)
    forward_s = np.maximum(copy_s - overlap * ranks.forward_busy, (1.0 - overlap) * copy_s)
    backward_s = np.maximum(again_s - overlap * ranks.backward_busy, (1.0 - overlap) * again_s)
    up = np.where((zero == 3) & ~is_pipelined, microbatches * (forward_s + backward_s), forward_s)
    # `optimizer` copies gradients down and masters up once a step, with nothing left to hide them.
    copies = np.where(mode == PARAMETERS, down + up, 2.0 * copy_s)
    offloads = mode > 0
    return np.where(offloads, update, 0.0), np.where(offloads, copies, 0.0)


def accumulates_on_host(layouts: LayoutBatch) -> Array:
    """Returns the layouts that accumulate gradients in host memory, for which the host waits, (N,) bool."""
    accumulates = (layouts.zero >= 2) & (layouts.microbatches > 1) & (layouts.pp == 1)
    return np.asarray((layouts.offload == PARAMETERS) & accumulates)
