"""Bytes of model state on each pipeline rank of N layouts, gathered parameters included."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.planner.cost.framework_profile import StateBytesPerParameter
from meshwright.planner.cost.layout_batch import Array, LayoutBatch


def state_bytes(
    states: StateBytesPerParameter,
    layouts: LayoutBatch,
    dense: Array,
    experts: Array,
    owned: Array,
    gathered_at_once: Array,
    unmixed_bytes: float,
) -> dict[str, Array]:
    """Returns bytes by part, (N, P) each; ``update`` is the update's temporaries, while no activations are alive.

    Args:
        states: of the engine.
        layouts: N layouts.
        dense: dense parameters of each rank before the data axes shard them, (N, P).
        experts: expert parameters of each rank, which fewer ranks shard, (N, P).
        owned: of both, what the data axes leave a rank; (N, P).
        gathered_at_once: parameters that ZeRO-3 has gathered at once; (N, P).
        unmixed_bytes: bytes of an element where compute is in float32 or float64, which has no masters apart; else 0.
    """
    zero, total = layouts.zero[:, None], dense + experts
    parameter = unmixed_bytes or states.parameter
    optimizer: Any = np.where(zero > 0, 3.0 * unmixed_bytes, 2.0 * unmixed_bytes) if unmixed_bytes else states.optimizer
    accumulates = (layouts.microbatches > 1)[:, None] & states.whole_when_accumulating
    is_pipelined = (layouts.pp > 1)[:, None] & states.whole_in_pipeline
    full_gradients = (zero < 2) & (accumulates | (zero < 1) | (not states.whole_when_accumulating)) | is_pipelined
    gathered = np.where(is_pipelined, total, np.minimum(gathered_at_once, total))
    gradient = unmixed_bytes or states.gradient
    update = np.where(zero > 0, states.update[0] * total + states.update[1] * owned, 0.0)
    return {
        "parameters": np.where(zero < 3, parameter * total, parameter * gathered),
        "gradients": np.where(full_gradients, gradient * total, gradient * owned)
        + states.working_gradient * np.where(zero < 2, total, owned),
        "optimizer": np.where(zero > 0, optimizer * owned, optimizer * total),
        "buffers": np.zeros_like(total),
        "update": update,
    }


def owned_parameters(
    states: StateBytesPerParameter, layouts: LayoutBatch, dense: Any, experts: Any, experts_of_layer: int
) -> Any:
    """Returns the parameters that a rank owns, and updates, after the data axes shard them, (N, P).

    Args:
        states: of the engine.
        layouts: N layouts.
        dense: dense parameters of each rank before the data axes shard them, (N, P).
        experts: expert parameters of each rank, (N, P).
        experts_of_layer: X, experts of a layer.
    """
    expert_shards = (
        layouts.expert_parts(experts_of_layer) if states.whole_experts and experts_of_layer else layouts.expert_shards
    )
    return dense / layouts.state_shards[:, None] + experts / expert_shards[:, None]
