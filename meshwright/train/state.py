"""The state of training as a flat mapping from names to tensors, for checkpoints of any layout."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import partial

from meshwright.checkpoint.manifest import Origin
from meshwright.checkpoint.outcome import LoadedCheckpoint, SavedCheckpoint
from meshwright.checkpoint.store import CheckpointStore
from meshwright.json_types import JsonObject
from meshwright.parallel.dcp_shards import StateTensor
from meshwright.parallel.error_feedback import is_error_feedback
from meshwright.parallel.program import Program
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.scaler import LossScaler

WEIGHTS = "weights"
"""Prefix of weights in a checkpoint; moments have their own names as prefix, buffers `BUFFERS`."""
BUFFERS = "buffers"
OUTER_MOMENTUM = "outer_momentum"
"""Prefix of the outer optimizer's momentum; under islands the weights of `WEIGHTS` are the outer ones."""
OUTER_TRANSFER = "outer_transfer"
"""Prefix of the islands' mean movements that have arrived before the step in which they are taken."""
TRANSFER_SUMMARIES = "outer_transfer_summaries"
"""Their summaries, a row for each fragment of the weights."""
COUNTERS = "counters"
"""Name of an island's plain values, behind its prefix."""
_ISLAND = "island"


def island_prefix(island: int) -> str:
    """Returns the prefix of an island's own state: its weights and moments differ from those of other islands."""
    return f"{_ISLAND}{island}/"


def island_of_name(name: str) -> int | None:
    """Returns the island that a tensor of a checkpoint belongs to; None for one that all share."""
    head, slash, _ = name.partition("/")
    number = head.removeprefix(_ISLAND)
    return int(number) if slash and head.startswith(_ISLAND) and number.isdigit() else None


def saved_islands(names: Iterable[str]) -> int:
    """Returns the number of islands whose state a checkpoint's tensors hold; 0 for a run without islands."""
    return len({island_of_name(name) for name in names} - {None})


def state_tensors(program: Program, optimizer: LocalAdamW) -> dict[str, StateTensor]:
    """Returns every tensor of a checkpoint by name; they share memory with the program and the optimizer.

    Names: ``weights/<weight>``, ``exp_avg/<weight>``, ``exp_avg_sq/<weight>``, ``buffers/<buffer>`` for buffers that
    the module itself saves. Sharded ones are DTensors or boxes. Under islands the weights and moments of island 2 have
    ``island2/`` in front, since those of other islands differ, and ``weights/<weight>`` are the outer weights.
    Under sums with error feedback copy 2 has ``copy2/errors/<weight>``, and all may have ``bases/...``
    (`parallel.error_feedback`).
    """
    outer = optimizer.outer
    prefix = island_prefix(outer.island) if outer is not None else ""
    tensors: dict[str, StateTensor] = {}
    for weight in program.weights:
        tensors[f"{prefix}{WEIGHTS}/{weight.name}"] = weight.checkpoint_boxes(weight.local)
    for weight in program.frozen:
        # Frozen weights are saved too: a checkpoint is complete without the pretrained model.
        tensors[f"{WEIGHTS}/{weight.name}"] = weight.checkpoint_boxes(weight.local)
    tensors.update((prefix + name, moment) for name, moment in optimizer.state())
    tensors.update((f"{BUFFERS}/{name}", buffer) for name, buffer in program.buffers())
    if outer is not None:
        tensors.update(outer.state())
    if program.error_feedback is not None:
        tensors.update(program.error_feedback.state())
    return tensors


def restore_targets(program: Program, optimizer: LocalAdamW, names: Collection[str]) -> dict[str, StateTensor]:
    """Returns the tensors that a saved state fills, by its name there.

    A state of as many islands fills everything. Of any other number each island takes the outer weights and island 0's
    moments; the outer momentum is kept where both runs have one.

    Args:
        program: of this rank.
        optimizer: over its weights.
        names: of the saved tensors.
    """
    outer, saved, feedback = optimizer.outer, saved_islands(names), program.error_feedback
    if saved == (outer.islands if outer is not None else 0):
        tensors = state_tensors(program, optimizer)
        if feedback is not None:
            tensors = {name: item for name, item in tensors.items() if not is_error_feedback(name)}
            tensors |= feedback.restore_targets(names)
        return tensors
    tensors = {}
    for weight in (*program.weights, *program.frozen):
        tensors[f"{WEIGHTS}/{weight.name}"] = weight.checkpoint_boxes(weight.local)
    prefix = island_prefix(0) if saved else ""
    tensors.update((prefix + name, moment) for name, moment in optimizer.state())
    tensors.update((f"{BUFFERS}/{name}", buffer) for name, buffer in program.buffers())
    if outer is not None and saved:
        # A site's state has no momentum, which is its server's.
        momentum = (pair for pair in outer.state() if pair[0].startswith(f"{OUTER_MOMENTUM}/"))
        tensors.update(pair for pair in momentum if pair[0] in names)
    return tensors


def state_addresses(program: Program, optimizer: LocalAdamW) -> list[int]:
    """Returns the memory addresses of `state_tensors`' tensors, in a fraction of its time.

    Equal lists mean the same tensors, as long as those of the first list are kept alive.
    """
    addresses = [weight.address for weight in (*program.weights, *program.frozen)]
    addresses += optimizer.outer.addresses() if optimizer.outer is not None else []
    addresses += program.error_feedback.addresses() if program.error_feedback is not None else []
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

    The step alone determines the position in the data, dropout's random numbers, and the next learning rate unless that
    follows the noise of gradients, which is among the plain values.
    """
    plain = plain_values(optimizer, scaler, tokens) | values
    return store.save(step, state_tensors(program, optimizer), plain, origin)


def plain_values(optimizer: LocalAdamW, scaler: LossScaler, tokens: int) -> dict[str, StateTensor]:
    """Returns a state's plain values beside its tensors and its step (`adopt_values` restores them)."""
    return {"tokens": tokens, "updates": optimizer.steps, "scaler": scaler.state()}


def adopt_values(
    values: JsonObject, program: Program, optimizer: LocalAdamW, scaler: LossScaler, names: Collection[str] = ()
) -> JsonObject:
    """Restores the plain values of a state whose tensors have been filled from `restore_targets`.

    Args:
        values: of the state.
        program: of this rank.
        optimizer: whose moments were filled.
        scaler: of the loss.
        names: of the saved tensors.

    Returns:
        The values, with those that this rank's island saved for itself in place of the first island's.
    """
    outer = optimizer.outer
    if outer is not None and saved_islands(names) == outer.islands:
        values = {**values, **outer.read_counters()}
    elif outer is not None:
        outer.restart()
    if program.error_feedback is not None:
        program.error_feedback.restored()
    optimizer.restored(int(values["updates"]))
    program.weights_changed()
    scaler.restore(dict(values["scaler"]))
    return values


def load_state(
    store: CheckpointStore, program: Program, optimizer: LocalAdamW, scaler: LossScaler, origin: Origin
) -> LoadedCheckpoint | None:
    """Fills weights, moments and counters from the newest complete checkpoint; returns None without a checkpoint.

    Raises:
        CheckpointError: when checkpoints exist but none is complete, or they belong to another model or other data.
    """
    # Layout and configuration may differ: a checkpoint is resharded on load.
    expect = {"model": origin.model, "data": origin.data}
    checkpoint = store.load(
        partial(restore_targets, program, optimizer),
        expect=expect,
        required=False,
        # Another number of islands reads the outer weights and leaves what single islands saved; a layout without error
        # feedback leaves what copies owed.
        may_remain=lambda name: (
            island_of_name(name) is not None
            or name.startswith((f"{OUTER_MOMENTUM}/", OUTER_TRANSFER))
            or is_error_feedback(name)
        ),
    )
    if checkpoint is None:
        return None
    values = adopt_values(checkpoint.meta, program, optimizer, scaler, checkpoint.manifest.tensors)
    return replace(checkpoint, manifest=replace(checkpoint.manifest, meta=values))
