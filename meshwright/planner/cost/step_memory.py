"""Bytes of a rank at each moment of a step that may be its fullest, and the fullest of them.

Gradients of a step's only micro-batch come as its activations go, and gathered weights go with them: what is there at
once depends on how far backward is. The moments, in order: the end of the loss; the head's gradient reduced; backward
of the last layer, of the one before it and of the first, each beside what the reduction before it still reads; the
reduction of a layer and of the embedding; the update. Between two layers all bytes change in proportion, so that one
of the two ends is the fullest.
Source: torch 2.11, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (foreach_reduce); the allocator's events of
42 layouts' steps on one H100, 2026-11-26.

No allocator has checked the rules of several ranks: gradients that copies or ZeRO reduce, what ZeRO-3 gathers by layer,
pp, tp, cp, ep, and mixtures of experts. The GPU's rows (`benchmarks/h100.jsonl`) are of one rank, among them float32,
GPT-2's tied head and state in host memory: 42 of a runtime in which FSDP2 held a lone rank's weights too, and 13 of
today's copies in the type of compute. `tests/contract/test_step_memory.py` walks through a step of copies, ZeRO 1 and 2
in bf16 by these same rules, and neither through ZeRO-3 nor the other axes, tied heads or float32. A simulated GPU's
memory is held to a coarse bound (`tests/ghost/test_peak.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce as fold

import numpy as np

from meshwright.array_types import Index
from meshwright.planner.cost.layout_batch import Array


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitElements:
    """Parameters of a rank's units of gathering before the data axes shard them, (N, P) each."""

    layers: Array
    """Of all its layers."""
    layer: Array
    """Of its largest layer."""
    first: Array
    """Of the product in it whose gradient backward computes first."""
    embedding: Array
    """Of the embedding, or of a tied embedding and head, which are one unit."""
    head: Array
    """Of a head that is a unit of its own."""
    is_tied: bool
    """Whether the embedding's gradient is there from the head's backward on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationParts:
    """Bytes of a rank's activations, (N, P) each."""

    saved: Array
    """Of all its micro-batches in flight, of layers and ends."""
    layer: Array
    """Of these, those of one micro-batch of its largest layer."""
    working: Array
    """Beside them while a layer's backward runs, without gradients of weights."""
    ends: Array
    """Of `saved`, those of the ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRules:
    """How gradients of a rank's weights come, and gathered weights go; each (N, 1)."""

    computed: Array
    """Bytes an element of a gradient as backward computes it."""
    reduced: Array
    """Bytes an element of a gradient as it is reduced, unit by unit in the last backward; 0 where none is."""
    reduced_later: Array
    """The same behind the last backward."""
    own: Array
    """Bytes an element of a unit, before the data axes shard it, of the rank's own part of its reduced gradient."""
    copies: Array
    """Further copies of that while a unit is reduced, or of a weight's while it is widened."""
    stays: Array
    """Of `own`, what waits for the update on the device."""
    comes_late: Array
    """Whether no gradient is there before the last backward, bool."""
    comes_whole: Array
    """Whether gradients are added up unsharded before they are reduced in the last backward, bool."""
    freed: Array
    """Bytes an element of a gathered weight that is freed behind its last backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMoments:
    """Bytes of a rank at M moments of a step, but for the activations: the same however many layers recompute."""

    live: tuple[str, ...]
    """Which activations are live at each moment, a key of `_live_activations` each."""
    parameters: Array
    """Of weights that compute, (M, N, P)."""
    gradients: Array
    """Of gradients, (M, N, P)."""
    logits: Array
    """Of logits and of what the loss computes of them, at the first moment alone, (N, P)."""
    has_others: Array
    """Whether the rank has layers beside its largest one, (N, P) bool."""

    def take(self, index: Index) -> StepMoments:
        """Returns the moments of some of the layouts."""
        return StepMoments(
            live=self.live,
            parameters=self.parameters[:, index],
            gradients=self.gradients[:, index],
            logits=self.logits[index],
            has_others=self.has_others[index],
        )

    def fullest(self, activations: ActivationParts) -> dict[str, Array]:
        """Returns bytes by part at the fullest moment, (N, P) each.

        Args:
            activations: of the rank.
        """
        live_bytes = _live_activations(activations, self.has_others)
        first = self.parameters[0], self.gradients[0], live_bytes[self.live[0]]
        peak = [part.copy() for part in first]
        most_bytes = fold(np.add, peak) + self.logits
        at_first = np.ones(most_bytes.shape, dtype=bool)
        for parameters, gradients, name in zip(self.parameters[1:], self.gradients[1:], self.live[1:]):
            total = parameters + gradients + live_bytes[name]
            is_fuller = total > most_bytes
            if not is_fuller.any():
                continue
            np.maximum(most_bytes, total, out=most_bytes)
            at_first &= ~is_fuller
            for fullest_bytes, moment_bytes in zip(peak, (parameters, gradients, live_bytes[name])):
                np.copyto(fullest_bytes, moment_bytes, where=is_fuller)
        return dict(zip(("parameters", "gradients", "activations"), peak)) | {"logits": self.logits * at_first}


def single_moment(parameters: Array, gradients: Array, logits: Array) -> StepMoments:
    """Returns the one moment of an engine whose gradients, activations and logits are all counted together."""
    return StepMoments(
        live=("all and work",),
        parameters=parameters[None],
        gradients=gradients[None],
        logits=logits,
        has_others=np.zeros(parameters.shape, dtype=bool),
    )


def step_moments(
    parameters: Array, gradients: Array, logits: Array, units: UnitElements, rules: StateRules
) -> StepMoments:
    """Returns the moments of a step.

    Args:
        parameters: bytes of weights that compute, at their most, (N, P).
        gradients: bytes of gradients that wait for the update, at their most, (N, P).
        logits: bytes of logits and of what the loss computes of them, (N, P).
        units: of the rank.
        rules: of the rank.
    """
    others = np.maximum(units.layers - units.layer, 0.0)
    loss = parameters, np.where(rules.comes_late, 0.0, gradients), "all"
    all_and_work, *later = _backward_moments(parameters, gradients, others, units, rules)
    # No moment has more activations than this one, so that those without more state are never the fullest.
    most_state = all_and_work[0] + all_and_work[1]
    moments = [loss, all_and_work, *(moment for moment in later if (moment[0] + moment[1] > most_state).any())]
    shape = np.shape(parameters)
    return StepMoments(
        live=tuple(name for _, _, name in moments),
        parameters=np.stack([np.broadcast_to(weights, shape) for weights, _, _ in moments]),
        gradients=np.stack([np.broadcast_to(waiting, shape) for _, waiting, _ in moments]),
        logits=logits,
        has_others=others > 0,
    )


def _live_activations(activations: ActivationParts, has_others: Array) -> dict[str, Array]:
    """Returns the bytes of activations that are live at once, (N, P) each, by what they are of.

    Args:
        activations: of the rank.
        has_others: whether the rank has layers beside its largest one, (N, P) bool.
    """
    saved, working, ends = activations.saved, activations.working, activations.ends
    without_last = np.maximum(saved - activations.layer, ends)
    return {
        "all": saved,
        "all and work": saved + working,
        "without the last layer": without_last,
        "without the last layer, and work": np.where(has_others, without_last, saved) + working,
        "the first layer, and work": np.minimum(ends + activations.layer, saved) + working,
        "ends": ends,
        "nothing": np.zeros_like(saved),
    }


Moment = tuple[Array, Array, str]
"""Bytes of parameters and gradients, and what there is of the activations."""


def _backward_moments(
    parameters: Array, gradients: Array, others: Array, units: UnitElements, rules: StateRules
) -> list[Moment]:
    """Returns the bytes at each moment behind the loss, in order; ``others`` are the layers but the largest, (N, P)."""
    none = np.zeros_like(parameters)
    before = np.where(rules.comes_late, 0.0, gradients)
    # A gradient that was added up whole gives way to the rank's own part of it.
    added_up = np.where(rules.comes_whole, rules.reduced, 0.0)
    gained = np.where(rules.comes_late, rules.stays, np.where(rules.comes_whole, rules.stays - added_up, 0.0))

    def backward(done: Array, read: Array, kept: str, further: Array) -> Moment:
        """Once ``done`` elements are reduced, while what was copied of the last ``read`` of them is still in use."""
        waiting = before + gained * done
        left = np.maximum(parameters - rules.freed * done, 0.0)
        return left, waiting + rules.reduced * read + further, kept

    def reduction(done: Array, unit: Array, weight: Array, kept: str) -> Moment:
        """While a unit is reduced, whose weights are free: its gradients are copied, then the copy is reduced.

        Without units each ``weight`` of as many elements is on its own.
        """
        piece = np.where(in_units, unit, weight)
        copying = np.where(rules.comes_whole, 0.0, rules.computed) * piece
        reducing = (rules.own - added_up) * unit + rules.own * rules.copies * piece
        _, waiting, _ = backward(done, unit, kept, np.maximum(copying, reducing))
        return np.maximum(parameters - rules.freed * (done + unit), 0.0), waiting, kept

    in_units = (rules.reduced > 0) | (rules.reduced_later > 0)
    head, layer, embedding = units.head, units.layer, units.embedding
    tied = rules.computed * embedding if units.is_tied else none
    widened = np.where(in_units | ~rules.comes_late, 0.0, rules.stays)
    layer_gradient = np.maximum(rules.computed, widened) * units.first + tied
    # The unit before, where there is another layer.
    earlier = np.where(others > 0, layer, head)
    second = np.minimum(layer, others)
    everything = head + units.layers + embedding
    later = np.maximum(rules.own * (1.0 + rules.copies), rules.reduced_later)
    later_unit = np.where(rules.reduced_later > 0, np.maximum(np.maximum(head, layer), embedding), 0.0)
    return [
        # A layer's backward before the last micro-batch.
        (parameters, before + layer_gradient, "all and work"),
        reduction(none, head, head, "all"),
        backward(head, head, "all and work", layer_gradient),
        reduction(head, layer, units.first, "without the last layer"),
        backward(head + second, earlier, "without the last layer, and work", layer_gradient),
        backward(head + others, earlier, "the first layer, and work", layer_gradient),
        reduction(head + others, layer, units.first, "ends"),
        reduction(head + units.layers, embedding, embedding, "nothing"),
        # What follows the last backward, and the update.
        (np.maximum(parameters - rules.freed * everything, 0.0), gradients + later * later_unit, "nothing"),
    ]
