"""Prices state in host memory: bytes off the device, bytes on the host, seconds of the copies and of the update.

``optimizer``: the moments lie in host memory with a copy of the masters. The masters stay on the device too, because
FSDP2 gathers from them (`train.optimizer.LocalAdamW`). After the last backward the processor updates chunk by chunk;
meanwhile gradients of the next are copied to the host, and new masters of those before back. What isn't under the
update are the first copy, the last one, and what copies take longer than it.
``parameters``: shards, their gradients and moments lie in host memory, and the processor updates them there. A single
rank keeps weights that compute on the device (`Layout.has_host_masters`), as FSDP2 does from its forward to its
backward: a gradient leaves under the last backward, new weights come up chunk by chunk under the update. Several ranks
use FSDP2's CPUOffloadPolicy: each gather begins with the copy of a float32 shard on a separate stream. Each
reduce-scatter ends with the copy of its shard to the host, under backward; with gradient accumulation the host waits
for the copy. Where a group of shards is one rank it gathers nothing, and copies on the compute stream.
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
from meshwright.spec.layout import HOST_CHUNK
from meshwright.spec.layout_fields import OFFLOADS

OPTIMIZER, PARAMETERS = OFFLOADS.index("optimizer"), OFFLOADS.index("parameters")
PINNED = 1.44
"""Memory of a pinned block over its bytes: torch rounds each up to a power of two, and of sizes that are spread evenly
over logarithms that is 1 / ln 2. Source: torch 2.13, ATen/core/CachingHostAllocator.h."""
HOST_USABLE = 0.85
"""Share of host memory that state may fill; the rest is for the system, the ranks' processes and the data."""
ADAM_PASSES = 7.0
"""Passes over the state of an AdamW update: masters, gradients, two moments read; all but the gradients written."""
SCALE_PASSES = 1.0
"""Further passes where the update scales gradients that lie in host memory: it writes them back, scaled. Source: torch
2.13, aten/src/ATen/native/cpu/FusedAdamKernel.cpp, adam_fused_step_impl (grad_scale_ptr)."""
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
    """Returns seconds of norm and update in host memory and of exposed copies, (N, P) each; 0 without offload.

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
    norm_s = NORM_PASSES * size * trained / host.norm_bytes_per_s
    update_s = (ADAM_PASSES + np.where(mode == PARAMETERS, SCALE_PASSES, 0.0)) * pass_s
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
    # Beside the update, either way at once: what is longer than it, the first copy down and the last one up.
    end_s = size * np.minimum(trained, HOST_CHUNK) / host.copy_bytes_per_s
    beside_s = np.maximum(copy_s - update_s, 0.0) + end_s
    is_single = (layouts.world == 1)[:, None] & ranks.engine.states.compute_copies
    copies = np.where(is_single, down + beside_s, down + up)
    copies = np.where(mode == PARAMETERS, copies, beside_s + end_s)
    update_s = update_s + np.where(mode == PARAMETERS, norm_s, 0.0)
    offloads = mode > 0
    return np.where(offloads, update_s, 0.0), np.where(offloads, copies, 0.0)


def accumulates_on_host(layouts: LayoutBatch) -> Array:
    """Returns the layouts that accumulate gradients in host memory, for which the host waits, (N,) bool."""
    accumulates = (layouts.zero >= 2) & (layouts.microbatches > 1) & (layouts.pp == 1)
    return np.asarray((layouts.offload == PARAMETERS) & accumulates)
