"""Bytes of model state of each rank of a pipeline, and of what ZeRO-3 gathers."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.planner.cost.framework_profile import StateBytesPerParameter
from meshwright.planner.cost.layout_batch import Array, LayoutBatch


def state_bytes(
    states: StateBytesPerParameter,
    degrees: LayoutBatch,
    own: Array,
    experts: Array,
    part: Array,
    units: Array,
    wide: float,
) -> dict[str, Array]:
    """Returns bytes by part, (N, P), and under ``update`` what the update adds while no activations are held.

    Args:
        states: of the engine.
        degrees: the layouts.
        own: parameters of each rank before the data axes shard them, experts left out; (N, P).
        experts: those of experts, which fewer ranks share; (N, P).
        part: of both, what the data axes leave a rank; (N, P).
        units: parameters that ZeRO-3 has gathered at once; (N, P).
        wide: bytes of an element where compute is in float32 or float64, which has no masters apart; else 0.
    """
    d = degrees
    zero, total = d.zero[:, None], own + experts
    parameter = wide or states.parameter
    optimizer: Any = np.where(zero > 0, 3.0 * wide, 2.0 * wide) if wide else states.optimizer
    many = (d.microbatches > 1)[:, None] & states.whole_when_accumulating
    piped = (d.pp > 1)[:, None] & states.whole_in_pipeline
    whole = (zero < 2) & (many | (zero < 1) | (not states.whole_when_accumulating)) | piped
    gathered = np.where(piped, total, np.minimum(units, total))
    rest = states.parameter * part if states.rest else 0.0
    gradient = wide or states.gradient
    update = np.where(zero > 0, states.update[0] * total + states.update[1] * part, 0.0)
    return {
        "parameters": np.where(zero < 3, parameter * total, parameter * gathered + rest),
        "gradients": np.where(whole, gradient * total, gradient * part)
        + states.working_gradient * np.where(zero < 2, total, part),
        "optimizer": np.where(zero > 0, optimizer * part, optimizer * total),
        "buffers": states.bucket_bytes * (d.readers > 1)[:, None] * np.ones_like(total),
        "update": update,
    }


def divided(states: StateBytesPerParameter, degrees: LayoutBatch, own: Any, experts: Any, count: int) -> Any:
    """Returns what the data axes leave a rank of its parameters, whose update it computes, (N, P).

    Args:
        states: of the engine.
        degrees: the layouts.
        own: parameters of each rank before the data axes shard them, experts left out; (N, P).
        experts: those of experts; (N, P).
        count: X, experts of a layer.
    """
    parts = degrees.expert_parts(count) if states.whole_experts and count else degrees.expert_shards
    return own / degrees.state_shards[:, None] + experts / parts[:, None]
