"""The state of training as a flat mapping from names to tensors, for checkpoints of any layout."""

from __future__ import annotations

from meshwright.checkpoint.manifest import Origin
from meshwright.checkpoint.outcome import LoadedCheckpoint, SavedCheckpoint
from meshwright.checkpoint.store import CheckpointStore
from meshwright.json_types import JsonObject
from meshwright.parallel.dcp_shards import StateTensor
from meshwright.parallel.program import Program
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.scaler import LossScaler

WEIGHTS = "weights"
"""Prefix of weights in a checkpoint; moments have their own names as prefix, buffers `BUFFERS`."""
BUFFERS = "buffers"


def state_tensors(program: Program, optimizer: LocalAdamW) -> dict[str, StateTensor]:
    """Returns every tensor of a checkpoint by name; they share memory with the program and the optimizer.

    Names: ``weights/<weight>``, ``exp_avg/<weight>``, ``exp_avg_sq/<weight>``, ``buffers/<buffer>`` for buffers that
    the module itself saves. Sharded ones are DTensors or boxes.
    """
    tensors: dict[str, StateTensor] = {}
    for weight in (*program.weights, *program.frozen):
        # Frozen weights are saved too: a checkpoint is complete without the pretrained model.
        tensors[f"{WEIGHTS}/{weight.name}"] = weight.checkpoint_boxes(weight.local)
    tensors.update(optimizer.state())
    tensors.update((f"{BUFFERS}/{name}", buffer) for name, buffer in program.buffers())
    return tensors


def state_addresses(program: Program, optimizer: LocalAdamW) -> list[int]:
    """Returns the memory addresses of `state_tensors`' tensors, in a fraction of its time.

    Equal lists mean the same tensors, as long as those of the first list are kept alive.
    """
    addresses = [weight.address for weight in (*program.weights, *program.frozen)]
    return [*addresses, *optimizer.moment_addresses(), *(buffer.data_ptr() for _, buffer in program.buffers())]


def save_state(
    store: CheckpointStore,
    step: int,
    program: Program,
    optimizer: LocalAdamW,
    scaler: LossScaler,
    origin: Origin,
    tokens: int,
    **values: object,
) -> SavedCheckpoint:
    """Writes a checkpoint after ``step`` steps and ``tokens`` target tokens, with further plain values.

    The step alone determines the position in the data, the next learning rate and dropout's random numbers.
    """
    plain = plain_values(optimizer, scaler, tokens) | values
    return store.save(step, state_tensors(program, optimizer), plain, origin)


def plain_values(optimizer: LocalAdamW, scaler: LossScaler, tokens: int) -> dict[str, StateTensor]:
    """Returns a state's plain values beside its tensors and its step (`adopt_values` restores them)."""
    return {"tokens": tokens, "updates": optimizer.steps, "scaler": scaler.state()}


def adopt_values(values: JsonObject, optimizer: LocalAdamW, scaler: LossScaler) -> None:
    """Restores the plain values of a state whose tensors have been filled."""
    optimizer.restored(int(values["updates"]))
    scaler.restore(dict(values["scaler"]))


def load_state(
    store: CheckpointStore, program: Program, optimizer: LocalAdamW, scaler: LossScaler, origin: Origin
) -> LoadedCheckpoint | None:
    """Fills weights, moments and counters from the newest complete checkpoint; returns None without a checkpoint.

    Raises:
        CheckpointError: when checkpoints exist but none is complete, or they belong to another model or other data.
    """
    # Layout and configuration may differ: a checkpoint is resharded on load.
    expect = {"model": origin.model, "data": origin.data}
    checkpoint = store.load(state_tensors(program, optimizer), expect=expect, required=False)
    if checkpoint is not None:
        adopt_values(checkpoint.meta, optimizer, scaler)
    return checkpoint
