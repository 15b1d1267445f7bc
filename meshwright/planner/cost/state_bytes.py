"""Bytes of model state on a rank, from the elements that it has: of N layouts' sizes, or of one layout's tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.planner.cost.framework_profile import StateBytesPerParameter
from meshwright.planner.cost.layout_batch import Array, LayoutBatch

MASTER_BYTES = 4.0
"""Bytes of a master weight beside weights that compute in 2 bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateElements:
    """Elements of a rank's weights, (N, P) float64 each, or numbers."""

    total: Array | float
    """Before the data axes shard them."""
    owned: Array | float
    """That the data axes leave the rank, which updates them."""
    gathered: Array | float
    """Most that compute has gathered at once, padding included."""
    twins: Array | float = 0.0
    """Of `owned` (of `total` without sharding), those of tied weights that count twice but have one master."""


def state_bytes(
    states: StateBytesPerParameter,
    elements: StateElements,
    keeps_full_gradients: Array | bool,
    has_masters: Array | bool,
    unmixed_bytes: float,
    is_lone: Array | bool = False,
) -> dict[str, Array]:
    """Returns bytes of parameters, gradients and optimizer, each of the shape of ``elements``.

    Args:
        states: of the engine.
        elements: of the rank's weights.
        keeps_full_gradients: whether gradients stay unsharded from one backward to the update.
        has_masters: whether sharded master weights exist beside the weights that compute.
        unmixed_bytes: bytes of an element where compute is in float32 or float64; else 0.
        is_lone: whether a rank shares no weight and a step has one micro-batch.

    Source: Rajbhandari et al., ZeRO (SC 2020), section 3.1: masters and two moments, K = 12 bytes in mixed precision.
    """
    gradient = unmixed_bytes or np.where(is_lone, states.lone_gradient, states.gradient)
    master = unmixed_bytes or MASTER_BYTES
    optimizer = 3.0 * unmixed_bytes or states.optimizer
    # Of a tied weight on two stages each has a master, but only one has moments.
    owned_optimizer = optimizer * elements.owned - (optimizer - master) * elements.twins
    full_optimizer = (optimizer - master) * (elements.total - elements.twins)
    return {
        "parameters": np.asarray((unmixed_bytes or states.parameter) * elements.gathered),
        "gradients": gradient * np.where(keeps_full_gradients, elements.total, elements.owned),
        "optimizer": np.where(has_masters, owned_optimizer, full_optimizer),
    }


def owned_parameters(
    states: StateBytesPerParameter, layouts: LayoutBatch, dense: Array, experts: Array, experts_of_layer: int
) -> Array:
    """Returns the parameters that a rank owns, and updates, after the data axes shard them, (N, P).

    Args:
        states: of the engine.
        layouts: N layouts.
        dense: dense parameters of each rank before the data axes shard them, (N, P).
        experts: expert parameters of each rank, (N, P).
        experts_of_layer: X, experts of a layer.
    """
    expert_shards = states.expert_shards(layouts, experts_of_layer)
    return np.asarray(dense / layouts.state_shards[:, None] + experts / expert_shards[:, None])
