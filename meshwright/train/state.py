"""The state of training as a flat mapping from names to tensors, for checkpoints of any layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.checkpoint.manifest import Origin
from meshwright.checkpoint.outcome import LoadedCheckpoint, SavedCheckpoint
from meshwright.checkpoint.store import CheckpointStore
from meshwright.parallel.program import Program
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.scaler import LossScaler

WEIGHTS = "weights"
"""Prefix of weights in a checkpoint; moments have their own names as prefix, buffers `BUFFERS`."""
BUFFERS = "buffers"


def state_tensors(program: Program, optimizer: LocalAdamW) -> dict[str, Any]:
    """Returns every tensor that a checkpoint holds; they share memory with the run's own.

    Names: ``weights/<weight>``, ``exp_avg/<weight>``, ``exp_avg_sq/<weight>``, ``buffers/<buffer>`` for buffers that
    the module itself saves. Sharded ones are DTensors or boxes.
    """
    tensors: dict[str, Any] = {}
    for weight in (*program.weights, *program.frozen):
        tensors[f"{WEIGHTS}/{weight.name}"] = weight.saved(weight.local)
    tensors.update(optimizer.state())
    tensors.update((f"{BUFFERS}/{name}", buffer) for name, buffer in program.buffers())
    return tensors


def state_places(program: Program, optimizer: LocalAdamW) -> list[int]:
    """Returns the addresses of what `state_tensors` returns, in a fraction of the time.

    Equal lists mean the same memory, as long as somebody holds the tensors of the first.
    """
    places = [weight.address for weight in (*program.weights, *program.frozen)]
    return [*places, *optimizer.places(), *(buffer.data_ptr() for _, buffer in program.buffers())]


def save_state(
    store: CheckpointStore,
    step: int,
    program: Program,
    optimizer: LocalAdamW,
    scaler: LossScaler,
    origin: Origin,
    tokens: int,
    **more: Any,
) -> SavedCheckpoint:
    """Writes a checkpoint after ``step`` steps and ``tokens`` target tokens, with ``more`` plain values beside.

    The step alone says where in the data the run is, which learning rate comes next and what dropout draws.
    """
    values = plain_values(optimizer, scaler, tokens) | more
    return store.save(step, state_tensors(program, optimizer), values, origin)


def plain_values(optimizer: LocalAdamW, scaler: LossScaler, tokens: int) -> dict[str, Any]:
    """Returns what a state holds beside its tensors and its step; `adopt_values` takes it back."""
    return {"tokens": tokens, "updates": optimizer.steps, "scaler": scaler.state()}


def adopt_values(values: Mapping[str, Any], optimizer: LocalAdamW, scaler: LossScaler) -> None:
    """Takes over the plain values of a state whose tensors have been filled in."""
    optimizer.restored(int(values["updates"]))
    scaler.restore(dict(values["scaler"]))


def load_state(
    store: CheckpointStore, program: Program, optimizer: LocalAdamW, scaler: LossScaler, origin: Origin
) -> LoadedCheckpoint | None:
    """Fills weights, moments and counters from the newest whole checkpoint; None when there is no checkpoint.

    Raises:
        CheckpointError: when checkpoints exist but none is whole, or they belong to another model or other data.
    """
    expect = {"model": origin.model, "data": origin.data}
    found = store.load(state_tensors(program, optimizer), expect=expect, required=False)
    if found is not None:
        adopt_values(found.meta, optimizer, scaler)
    return found
