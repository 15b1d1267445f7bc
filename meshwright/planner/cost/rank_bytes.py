"""Memory of the pipeline ranks of N layouts with P ranks along pp each, as arrays (N, P).

Weights, gradients, optimizer and buffers are the same however many layers recompute, so a search that asks for the
fewest that fit has them priced once (`RankBytes.by_recompute`); activations and the peak are priced for each number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from functools import reduce as fold
from typing import Any

import numpy as np

from meshwright.array_types import Index
from meshwright.planner.cost.communication import CommunicationTimes
from meshwright.planner.cost.element_bytes import compute_bytes, master_bytes
from meshwright.planner.cost.framework_profile import FrameworkProfile
from meshwright.planner.cost.layer_cost import LayerCost
from meshwright.planner.cost.layer_sums import LayerCosts, LayerSums
from meshwright.planner.cost.layout_batch import Array
from meshwright.planner.cost.offload import PARAMETERS, move_state_to_host
from meshwright.planner.cost.priced_model import PricedModel
from meshwright.planner.cost.rank_activations import RankActivations
from meshwright.planner.cost.stages import StageCut, cut_stages
from meshwright.planner.cost.state_bytes import StateElements, owned_parameters, state_bytes
from meshwright.planner.cost.step_memory import StateRules, StepMoments, UnitElements, single_moment, step_moments
from meshwright.planner.cost.timing import in_flight_microbatches

OFFLOADABLE = ("parameters", "gradients", "optimizer")
"""Parts of a rank's memory that may lie in host memory."""


def _distinct_cuts(model: PricedModel) -> tuple[list[StageCut], Array]:
    """Returns the distinct cuts, and each layout's index among them, (N,) int64."""
    layouts, specs, ranks = model.layouts, model.layouts.schedules, int(model.layouts.pp[0])
    # Schedules that place their stages on the same ranks cut the model in the same way, so they share a key.
    owners = [spec.owners or spec.placement for spec in specs]
    owners_code = np.array([owners.index(owner) for owner in owners])
    keys, cut_index = np.unique(
        layouts.stages * len(specs) + owners_code[layouts.schedule.astype(int)], return_inverse=True
    )
    stages_and_specs = [(int(key) // len(specs), specs[int(key) % len(specs)]) for key in keys]
    stages_specs_splits: list[Any] = [(*key, None) for key in stages_and_specs]
    if layouts.splits:
        index_by_key: dict[Any, int] = {}
        split_keys = [(int(index), split) for index, split in zip(cut_index, layouts.splits)]
        cut_index = np.array([index_by_key.setdefault(key, len(index_by_key)) for key in split_keys])
        stages_specs_splits = [(*stages_and_specs[index], split) for index, split in index_by_key]
    rule = model.engine.split
    # A layout's own split of its layers goes before the framework's rule.
    return [
        cut_stages(model.job.shape, ranks, stages, spec.owners or spec.placement, rule, split)
        for stages, spec, split in stages_specs_splits
    ], cut_index


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryByRecompute:
    """Memory of N layouts' ranks but for the activations, which follow from the share of layers that recompute."""

    engine: FrameworkProfile
    """The runtime's profile."""
    moments: StepMoments
    """Weights, gradients and logits at the moments of a step."""
    activations: RankActivations
    """What the activations are computed of."""
    resting: Array
    """Bytes of optimizer and buffers, which stay throughout the step, (N, P)."""
    update: Array
    """Bytes of the update's temporaries, (N, P)."""

    def take(self, index: Index) -> MemoryByRecompute:
        """Returns the memory of some of the layouts."""
        return MemoryByRecompute(
            engine=self.engine,
            moments=self.moments.take(index),
            activations=self.activations.take(index),
            resting=self.resting[index],
            update=self.update[index],
        )

    def at(self, recompute_share: Array) -> dict[str, Array]:
        """Returns bytes by part at the fullest moment, ``allocated``, ``reserved`` and ``peak``, (N, P) each.

        Args:
            recompute_share: of the model's layers, (N,).
        """
        engine = self.engine
        memory = self.moments.fullest(self.activations.parts(recompute_share))
        # Activations and the update's temporaries are never alive together, so the larger counts.
        resident = memory["parameters"] + memory["gradients"] + self.resting
        forward = memory["activations"] + memory["logits"]
        memory["allocated"] = resident + np.maximum(forward, self.update) + engine.workspace_bytes
        memory["reserved"] = resident + np.maximum(forward * engine.allocator, self.update) + engine.allocator_bytes
        memory["peak"] = memory["reserved"] + engine.context_bytes
        memory["reserve"] = memory["peak"] - resident - forward
        return memory


class RankBytes(LayerSums):
    """Memory of the ranks of N layouts with P ranks along pp each; their cuts may differ.

    Args:
        costs: of the layers on these layouts.
    """

    def __init__(self, costs: LayerCosts) -> None:
        super().__init__(costs, *_distinct_cuts(costs.model))
        self.in_flight = in_flight_microbatches(self.layouts, self.ranks)
        self.communication = CommunicationTimes(self.model)

    @cached_property
    def parameters(self) -> tuple[Array, Array]:
        """(dense, expert) parameters of each rank before the data axes shard them, (N, P) each."""
        dense = self.sum_layers_and_ends(lambda cost: cost.parameters)
        if self.job.shape.tied:
            # A tied embedding and head on one rank are one weight.
            tied_parameters = self.job.shape.vocab * self.job.shape.width / self.layouts.tp
            self._add_to_rank(
                dense, self.first_rank, -np.where(self.last_rank == self.first_rank, tied_parameters, 0.0)
            )
        return dense, self.sum_layers_and_ends(lambda cost: cost.experts)

    def trained(self) -> tuple[Array, Array]:
        """Returns (dense, expert) trained parameters, (N, P) each; with adapters 0, as they are too few to count."""
        dense, experts = self.parameters
        return (dense * 0.0, experts * 0.0) if self.job.adapters else (dense, experts)

    def owned_parameters(self, dense: Array, experts: Array) -> Array:
        """Returns the parameters that a rank owns after the data axes shard ``dense`` and ``experts``; all (N, P)."""
        return np.asarray(owned_parameters(self.engine.states, self.layouts, dense, experts, self.job.shape.experts))

    @cached_property
    def layers(self) -> Array:
        """Number of layers of each rank, (N or 1, P)."""
        return np.asarray(sum(self.counts))

    def memory(self) -> dict[str, Array]:
        """Returns bytes by part of `MEMORY` at the fullest moment, (N, P) each.

        Also ``allocated``, ``reserved`` and ``peak``; if any layout offloads, ``host``, the bytes in host memory, and
        ``unoffloaded_peak``, as if all stayed.
        """
        layouts, engine, resting = self.layouts, self.engine, self._resting_bytes
        memory = self.by_recompute.at(layouts.recompute_share)
        memory |= {name: resting[name] for name in ("optimizer", "buffers", "host") if name in resting}
        # Where memory is short the allocator waits for what is freed late, so that only what is reserved counts it.
        elements = self.model.tokens * self.job.shape.width
        late_bytes = engine.saved.late_bytes(layouts, elements, self.job.shape.width, self.layers, self.in_flight)
        memory["reserved"] = memory["reserved"] + engine.allocator * late_bytes
        if "moved" in resting:
            memory["unoffloaded_peak"] = memory["peak"] + resting["moved"]
        return memory

    @cached_property
    def by_recompute(self) -> MemoryByRecompute:
        """Memory by the share of layers that recompute."""
        bytes_by_part = self._resting_bytes
        return MemoryByRecompute(
            engine=self.engine,
            moments=self._moments(),
            activations=self._activations,
            resting=bytes_by_part["optimizer"] + bytes_by_part["buffers"],
            update=bytes_by_part["update"],
        )

    @cached_property
    def most_bytes(self) -> dict[str, Array]:
        """Bytes by part, each when it is most, (N, P) each, and ``update``, the update's temporaries.

        If any layout offloads, also ``host``, the bytes in host memory, and ``moved``, what leaves the device.
        """
        activations = self._activations.parts(self.layouts.recompute_share)
        return self._resting_bytes | {"activations": activations.saved + activations.working}

    @cached_property
    def _resting_bytes(self) -> dict[str, Array]:
        """`most_bytes` without the activations."""
        layouts, engine = self.layouts, self.engine
        dense, experts = self.parameters
        gathered, master_size = self._gathered_parameters(dense), float(master_bytes(self.job.precision))
        memory = self._state(gathered)
        if layouts.offload.any():
            state_before = sum(memory[name] for name in OFFLOADABLE)
            move_state_to_host(
                memory,
                engine.states,
                layouts,
                self.owned_parameters(*self.trained()),
                dense + experts,
                gathered,
                master_size,
            )
            memory["moved"] = np.asarray(state_before - sum(memory[name] for name in OFFLOADABLE))
        memory["logits"] = np.zeros_like(dense)
        self._add_to_rank(memory["logits"], self.last_rank, self.costs.head.working)
        return memory

    def _state(self, gathered_at_once: Array) -> dict[str, Array]:
        """Returns bytes of model state by part, and of the update's temporaries, (N, P) each."""
        layouts, states, (dense, experts) = self.layouts, self.engine.states, self.parameters
        zero, total, owned = layouts.zero[:, None], dense + experts, self.owned_parameters(dense, experts)
        gathers_once, accumulates = states.gathers_once(layouts.pp)[:, None], (layouts.microbatches > 1)[:, None]
        gathered = np.where(gathers_once | (zero < 3), total, np.minimum(gathered_at_once, total))
        # Without mixed precision the weights that compute are the masters.
        is_mixed = compute_bytes(self.job.precision) == 2
        memory = state_bytes(
            states,
            StateElements(total=total, owned=owned, gathered=gathered),
            keeps_full_gradients=states.keeps_full_gradients(zero, accumulates, (layouts.pp > 1)[:, None]),
            has_masters=(zero > 0) | is_mixed,
            unmixed_bytes=0.0 if is_mixed else float(compute_bytes(self.job.precision)),
            is_lone=self._is_lone,
        )
        further_gradients, memory["update"] = states.further_bytes(zero, total, owned)
        memory["gradients"] = memory["gradients"] + further_gradients
        if self.job.adapters:
            memory |= {name: np.zeros_like(dense) for name in ("gradients", "optimizer", "update")}
        return memory | {"buffers": self._compression_buffers(dense)}

    def _compression_buffers(self, dense: Array) -> Array:
        """Returns bytes of rounded messages under way, or of errors, (N, P).

        An estimate from the largest weights and FSDP units:
        `planner.compression_buffers` has them exactly, of a model whose weights are known.
        """
        layouts, value_bytes = self.layouts, self.communication.rounded_value_bytes
        if not (layouts.compress.any() or layouts.compress_weights.any()):
            return np.zeros_like(dense)
        layer_sizes = [np.asarray(cost.parameters + cost.experts) for cost in self.costs.layers]
        largest_layer = fold(np.maximum, layer_sizes)[:, None]
        ends = dense - self.sum_layers(lambda cost: cost.parameters)
        unit, shards = np.maximum(ends, largest_layer), layouts.state_shards[:, None]
        # A sharded unit is a message, of which two are under way: one sent and received, one gathered. A plain weight
        # is one too, of a layer's at most a third, of which the next begins before those under way go on.
        is_sharded = layouts.zero[:, None] > 0
        embedding = (self.job.shape.vocab * self.job.shape.width / layouts.tp)[:, None]
        largest_weight = np.maximum(np.minimum(ends, embedding), largest_layer / 3.0)
        summed = np.where(is_sharded, 3.0 * unit / shards, 5.0 * largest_weight)
        gathered = np.where(is_sharded, unit * (1.0 + 1.0 / shards), 0.0)
        # What a copy owes, and what it will owe after this step; bases are small beside them.
        keeps_errors = (layouts.low_rank + layouts.inverse_density)[:, None] > 0
        owed = np.where(keeps_errors, 2.0 * master_bytes(self.job.precision) * dense / shards, 0.0)
        return np.asarray(
            owed + summed * value_bytes(layouts.compress, 0.0) + gathered * value_bytes(layouts.compress_weights, 0.0)
        )

    @cached_property
    def _activations(self) -> RankActivations:
        """What the activations of each rank are computed of."""

        def by_kind(figure: Callable[[LayerCost], Any]) -> Array:
            return np.stack([np.broadcast_to(figure(cost), self.count)[:, None] for cost in self.costs.layers])

        ends = np.zeros((self.count, self.ranks))
        self._add_to_rank(ends, self.first_rank, self.costs.embedding.saved)
        self._add_to_rank(ends, self.last_rank, self.costs.head.saved)
        return RankActivations(
            shape=self.job.shape,
            cuts=self.cuts,
            cut_index=self.cut_index,
            counts=np.stack(self.counts),
            saved=by_kind(lambda cost: cost.saved),
            spared=by_kind(lambda cost: cost.spared),
            spared_rest=by_kind(lambda cost: cost.spared_rest),
            ends=ends,
            working=self._largest_layer(lambda cost: cost.working),
            in_flight=self.in_flight,
            mode=self.layouts.recompute[:, None],
            rest=self.layouts.recompute_rest[:, None],
            measured=self.job.activations_of(self.engine.saved.compiled),
        )

    def _largest_layer(self, figure: Callable[[LayerCost], Any]) -> Array:
        """Returns a figure of the largest of each rank's layers, (N, P), 0 where a rank has but an end."""
        sizes = [
            np.broadcast_to(figure(cost), self.count)[:, None] * (counts > 0)
            for cost, counts in zip(self.costs.layers, self.counts)
        ]
        return np.asarray(fold(np.maximum, sizes))

    def _moments(self) -> StepMoments:
        """Returns bytes of weights, gradients and logits at the moments that may be the fullest."""
        parameters, gradients, logits = (self._resting_bytes[name] for name in ("parameters", "gradients", "logits"))
        if not self.engine.states.walks_backward:
            return single_moment(parameters, gradients, logits)
        dense, experts = self.parameters
        layers = self.sum_layers(lambda cost: cost.parameters + cost.experts)
        head = np.zeros_like(dense)
        if not self.job.shape.tied:
            self._add_to_rank(head, self.last_rank, self.costs.head.parameters)
        units = UnitElements(
            layers=layers,
            layer=self._largest_layer(lambda cost: cost.parameters + cost.experts),
            first=self._largest_layer(lambda cost: cost.first_gradient),
            embedding=np.maximum(dense + experts - layers - head, 0.0),
            head=head,
            is_tied=self.job.shape.tied,
        )
        owned_share = self.owned_parameters(dense, experts) / np.maximum(dense + experts, 1.0)
        return step_moments(parameters, gradients, logits, units, self._state_rules(owned_share))

    def _state_rules(self, owned_share: Array) -> StateRules:
        """Returns how gradients come and weights go; ``owned_share`` is what the data axes leave of them, (N, P)."""
        layouts, states = self.layouts, self.engine.states
        width = float(compute_bytes(self.job.precision))
        is_mixed, trained = width == 2, 0.0 if self.job.adapters else 1.0
        zero, microbatches = layouts.zero[:, None], layouts.microbatches[:, None]
        accumulates, is_piped = microbatches > 1, layouts.pp[:, None] > 1
        on_host = layouts.offload[:, None] == PARAMETERS
        in_units = ((zero > 0) | is_mixed) & ~self._keeps_copies
        by_layer = in_units & ~is_piped
        gradient = trained * (states.gradient if is_mixed else width)
        kept = np.where(self._is_lone, trained * states.lone_gradient, gradient) if is_mixed else gradient
        # Of three micro-batches or more whose gradients are reduced, one keeps the weights beside all gradients.
        freed = (states.parameter if is_mixed else width) * by_layer * (zero < 3) * ((microbatches <= 2) | (zero < 2))
        is_single = in_units & (layouts.state_shards[:, None] == 1)
        # Outside of units a gradient is widened from the type of compute.
        widened = ~in_units & (kept > width)
        return StateRules(
            computed=np.asarray(trained * width),
            reduced=gradient * by_layer,
            reduced_later=gradient * (in_units & is_piped),
            own=kept * owned_share * (in_units | ~accumulates),
            copies=np.where(is_single, 1.0, np.where(widened, width / states.gradient, 0.0)),
            stays=kept * owned_share * ~on_host,
            comes_late=~is_piped & (~accumulates | (on_host & (zero >= 2))),
            comes_whole=by_layer & accumulates & (zero < 2),
            freed=freed,
        )

    @property
    def _keeps_copies(self) -> Array:
        """Whether each rank keeps its weights in the type of compute (`Layout.has_compute_copies`), (N, 1) bool."""
        layouts, is_mixed = self.layouts, compute_bytes(self.job.precision) == 2
        rests = (layouts.zero == 0) & (layouts.offload != PARAMETERS) & (layouts.pp == 1) & (layouts.compress == 0)
        return (rests & (is_mixed and self.engine.states.compute_copies))[:, None]

    @property
    def _is_lone(self) -> Array:
        """Whether nothing is added to a gradient of such a rank, in its micro-batch or by others, (N, 1) bool."""
        layouts = self.layouts
        return self._keeps_copies & ((layouts.readers == 1) & (layouts.microbatches == 1))[:, None]

    def _gathered_parameters(self, dense: Array) -> Array:
        """Returns the parameters that ZeRO-3 has gathered at once, (N, P): two neighbours, and tied or other ends."""
        largest = fold(np.maximum, [cost.parameters + cost.experts for cost in self.costs.layers])
        all_layers = self.sum_layers_and_ends(lambda cost: cost.parameters + cost.experts)
        end_parameters = dense - self.sum_layers(lambda cost: cost.parameters)
        largest = np.broadcast_to(largest, self.count)[:, None]
        gathered = 2 * largest + np.maximum(end_parameters, 0)
        if not self.job.shape.tied:
            # Embedding and head are units of their own, each gathered beside its neighbour alone.
            embedding = (self.job.shape.vocab * self.job.shape.width / self.layouts.tp)[:, None]
            head = np.broadcast_to(self.costs.head.parameters, self.count)[:, None]
            rest = np.maximum(end_parameters - embedding - head, 0.0)
            gathered = largest + np.maximum(np.maximum(embedding, head), largest) + rest
        if self.layouts.secondary.any():
            # A rank has a part of every layer but the one at work; experts over ep have none.
            over_ep, secondary = self.layouts.ep > 1, self.layouts.secondary[:, None]
            shared = self.sum_layers(lambda cost: cost.parameters + np.where(over_ep, 0.0, cost.experts))
            parts = np.maximum(shared - largest, 0.0) / np.maximum(secondary, 1.0)
            gathered = gathered + np.where(secondary > 0, parts, 0.0)
        return np.minimum(gathered, all_layers)
