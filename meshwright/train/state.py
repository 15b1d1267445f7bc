"""The state of training as a flat mapping from names to tensors, for checkpoints of any layout."""

from __future__ import annotations

import torch

from meshwright.checkpoint.manifest import Origin
from meshwright.checkpoint.store import CheckpointStore, Loaded, Saved
from meshwright.runtime.program import Program
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.scaler import LossScaler

WEIGHTS = "weights"
"""Prefix of weights in a checkpoint; moments have their own names as prefix, buffers `BUFFERS`."""
BUFFERS = "buffers"


def state_tensors(program: Program, optimizer: LocalAdamW) -> dict[str, torch.Tensor]:
    """Returns every tensor that a checkpoint holds; they share memory with the run's own.

    Names: ``weights/<weight>``, ``exp_avg/<weight>``, ``exp_avg_sq/<weight>``, ``buffers/<buffer>`` for buffers that
    the module itself saves. Sharded ones are DTensors.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in program.module.named_parameters():
        tensors[f"{WEIGHTS}/{name}"] = parameter.detach()
    tensors.update(optimizer.state())
    for prefix, part in program.module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                tensors[f"{BUFFERS}/{prefix + '.' if prefix else ''}{name}"] = buffer
    return tensors


def save_state(
    store: CheckpointStore,
    step: int,
    program: Program,
    optimizer: LocalAdamW,
    scaler: LossScaler,
    origin: Origin,
    tokens: int,
) -> Saved:
    """Writes a checkpoint after ``step`` steps and ``tokens`` target tokens; the data position is the step itself."""
    meta = {"tokens": tokens, "updates": optimizer.steps, "scaler": scaler.state()}
    return store.save(step, state_tensors(program, optimizer), meta, origin)


def load_state(
    store: CheckpointStore, program: Program, optimizer: LocalAdamW, scaler: LossScaler, origin: Origin
) -> Loaded | None:
    """Fills weights, moments and counters from the newest whole checkpoint; None when there is no checkpoint.

    Raises:
        CheckpointError: when checkpoints exist but none is whole, or they belong to another model or other data.
    """
    expect = {"model": origin.model, "data": origin.data}
    found = store.load(state_tensors(program, optimizer), expect=expect, required=False)
    if found is not None:
        optimizer.restored(int(found.meta["updates"]))
        scaler.restore(dict(found.meta["scaler"]))
    return found
