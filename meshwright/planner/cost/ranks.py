"""Layouts with equally many ranks along pp: time and memory of each of these ranks, for all layouts at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from functools import reduce as fold
from operator import attrgetter
from typing import Any

import numpy as np

from meshwright.cluster.host import HostShare
from meshwright.errors import PlanError
from meshwright.planner.cost.communication import CommunicationTimes
from meshwright.planner.cost.embedding_and_head import embedding, head
from meshwright.planner.cost.framework_profile import FrameworkProfile
from meshwright.planner.cost.groups import Machine
from meshwright.planner.cost.kernels import move_s
from meshwright.planner.cost.layers import LayerCost, PassTime, PricedModel
from meshwright.planner.cost.layout_batch import Array, LayoutBatch, PricedJob
from meshwright.planner.cost.offload import spent, wide_bytes, without
from meshwright.planner.cost.prices import LAYER_TRAFFIC, MEMORY
from meshwright.planner.cost.stages import StageCut, cut, kinds
from meshwright.planner.cost.state_bytes import divided, state_bytes
from meshwright.planner.cost.timing import held, makespan
from meshwright.schedules.spec import ScheduleSpec

KEPT = ("matmul", "attention", "elementwise", "recompute", *LAYER_TRAFFIC)
"""Parts of a pass that are parts of a step."""
STATE = ("parameters", "gradients", "optimizer")
"""Parts of memory that may lie in host memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCosts:
    """What each kind of layer and the ends of the model cost on N layouts, wherever these cut the model."""

    model: PricedModel
    """What the layouts have in common."""
    layers: tuple[LayerCost, ...]
    """Of each kind of layer."""
    embedding: LayerCost
    """Of the first stage."""
    head: LayerCost
    """Of the last."""

    @classmethod
    def of(
        cls, job: PricedJob, degrees: LayoutBatch, machine: Machine, engine: FrameworkProfile, timed: bool = True
    ) -> LayerCosts:
        """Prices the layers and ends of a model.

        Args:
            job: model and batch.
            degrees: the layouts.
            machine: what they run on.
            engine: how they are run.
            timed: time and traffic too; else they stand at 0.
        """
        model = PricedModel(job, degrees, machine, engine)
        read = model.layer if timed else model.sizes
        layers = tuple(read(job.shape.blocks[at]) for at in kinds(job.shape)[1])
        return cls(model=model, layers=layers, embedding=embedding(model, timed), head=head(model, timed))

    def take(self, index: Any) -> LayerCosts:
        """Returns those of the layouts at an index, slice or mask."""
        count = self.model.degrees.count
        return LayerCosts(
            model=self.model.take(index),
            layers=tuple(_taken(cost, index, count) for cost in self.layers),
            embedding=_taken(self.embedding, index, count),
            head=_taken(self.head, index, count),
        )


def _taken(cost: Any, index: Any, count: int) -> Any:
    """A layer's or a pass's figures of some layouts; a figure that all share stays as it is."""
    fields: dict[str, Any] = {}
    for name in cost.__dataclass_fields__:
        value = getattr(cost, name)
        if isinstance(value, dict):
            fields[name] = {key: _some(one, index, count) for key, one in value.items()}
        else:
            fields[name] = _taken(value, index, count) if isinstance(value, PassTime) else _some(value, index, count)
    return type(cost)(**fields)


def _owners(spec: ScheduleSpec, ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """The rank of each stage."""
    return tuple(spec.rank_of(stage, ranks) for stage in range(ranks * stages_per_rank))


def _some(value: Any, index: Any, count: int) -> Any:
    return value[index] if np.shape(value) == (count,) else value


class RankTimes:
    """The ranks of N layouts that have P ranks along pp each; they may cut the model in different ways.

    Args:
        costs: of the layers on these layouts.
    """

    def __init__(self, costs: LayerCosts) -> None:
        self.costs, self.model = costs, costs.model
        self.job, self.degrees, self.engine = self.model.job, self.model.degrees, self.model.engine
        self.count, self.ranks = self.degrees.count, int(self.degrees.pp[0])
        self.cuts, which = self._cuts()
        self._which = which
        if len(self.cuts) == 1:
            self.counts = [row[None, :] for row in self.cuts[0].counts]
        else:
            self.counts = list(np.stack([one.counts for one in self.cuts], axis=1)[:, which])
        some = [0] if len(self.cuts) == 1 else which
        self.first = np.array([one.first for one in self.cuts])[some]
        self.last = np.array([one.last for one in self.cuts])[some]
        self.held = held(self.degrees, self.ranks)
        self.wires = CommunicationTimes(self.model)

    def _cuts(self) -> tuple[list[StageCut], Array]:
        """The different cuts, and the index of each layout's."""
        d, specs = self.degrees, self.degrees.schedules
        # Schedules that put their stages on the same ranks cut the model alike.
        owners = [spec.owners or spec.placement for spec in specs]
        alike = np.array([owners.index(one) for one in owners])
        keys, which = np.unique(d.stages * len(specs) + alike[d.schedule.astype(int)], return_inverse=True)
        found = [(int(key) // len(specs), specs[int(key) % len(specs)]) for key in keys]
        made: list[Any] = [(*one, None) for one in found]
        if d.splits:
            known: dict[Any, int] = {}
            split_keys = [(int(at), split) for at, split in zip(which, d.splits)]
            which = np.array([known.setdefault(key, len(known)) for key in split_keys])
            made = [(*found[at], split) for at, split in known]
        rule = self.engine.split
        return [
            cut(self.job.shape, self.ranks, stages, _owners(spec, self.ranks, stages), rule, split)
            for stages, spec, split in made
        ], which

    def cut_of(self, at: int) -> StageCut:
        """Returns how one layout cuts the model."""
        return self.cuts[int(self._which[at])]

    def layered(self, read: Callable[[LayerCost], Any]) -> Array:
        """Returns a figure of the layers added up on each rank, (N, P)."""
        total = np.zeros((self.count, self.ranks))
        for cost, counts in zip(self.costs.layers, self.counts):
            total += np.broadcast_to(read(cost), self.count)[:, None] * counts
        return total

    def summed(self, read: Callable[[LayerCost], Any]) -> Array:
        """Returns a figure of layers and ends added up on each rank, (N, P)."""
        total = self.layered(read)
        self._add_at(total, self.first, read(self.costs.embedding))
        self._add_at(total, self.last, read(self.costs.head))
        return total

    def _add_at(self, total: Array, rank: Array, value: Any) -> None:
        """Adds a value to one rank of each layout, in place."""
        if len(rank) == 1:
            total[:, rank[0]] += value
        else:
            total[np.arange(self.count), rank] += value

    def picked(self, read: Callable[[LayerCost], Any], at: Array) -> Array:
        """Returns what `summed` does of one rank of each layout, (N,)."""
        total = np.zeros(self.count)
        for cost, counts in zip(self.costs.layers, self.counts):
            total += read(cost) * (counts[0, at] if len(counts) == 1 else counts[np.arange(self.count), at])
        total += np.where(at == self.first, read(self.costs.embedding), 0.0)
        return total + np.where(at == self.last, read(self.costs.head), 0.0)

    def parameters(self) -> tuple[Array, Array]:
        """Returns parameters of each rank before the data axes shard them: without experts, and theirs; (N, P)."""
        return self._parameters

    @cached_property
    def _parameters(self) -> tuple[Array, Array]:
        own = self.summed(lambda cost: cost.parameters)
        if self.job.shape.tied:
            twice = self.job.shape.vocab * self.job.shape.width / self.degrees.tp
            self._add_at(own, self.first, -np.where(self.last == self.first, twice, 0.0))
        return own, self.summed(lambda cost: cost.experts)

    def trained(self) -> tuple[Array, Array]:
        """Returns the same of those that are trained; adapters count as none."""
        own, experts = self._parameters
        return (own * 0.0, experts * 0.0) if self.job.adapters else (own, experts)

    def divided(self, own: Array, experts: Array) -> Array:
        """Returns what the data axes leave a rank of its parameters, (N, P)."""
        return np.asarray(divided(self.engine.states, self.degrees, own, experts, self.job.shape.experts))

    @cached_property
    def layers(self) -> Array:
        """Layers of each rank, (N or 1, P)."""
        return np.asarray(sum(self.counts))

    @cached_property
    def sends(self) -> Array:
        """Seconds of a send to the next stage that nothing hides, (N,)."""
        piped = self.ranks > 1
        exposed = self.wires.send_s() * (1.0 - self.engine.runtime.send_overlap) if piped else 0.0
        return np.broadcast_to(exposed, self.count)

    @cached_property
    def action(self) -> Any:
        """Seconds that a pipeline engine spends on a forward or backward of all stages of a rank, (N,)."""
        return self.engine.runtime.action_s * (self.ranks > 1) * self.degrees.stages

    @cached_property
    def adds(self) -> Array:
        """Seconds in which a micro-batch's gradients are added to the sum, (N, P)."""
        own, experts = self._parameters
        return move_s((own + experts) * self.engine.runtime.accumulate_bytes, self.model.machine.device)

    @cached_property
    def forward_busy(self) -> Array:
        """Seconds of the device on a micro-batch's forward, (N, P)."""
        return self.summed(lambda cost: cost.forward.busy)

    @cached_property
    def backward_busy(self) -> Array:
        """Likewise of its backward."""
        return self.summed(lambda cost: cost.backward.busy)

    @cached_property
    def forward_host(self) -> Array:
        """Seconds of the host on a micro-batch's forward, (N, P)."""
        return self.summed(lambda cost: cost.forward.host) + self.engine.runtime.host_microbatch_s / 2

    @cached_property
    def backward_host(self) -> Array:
        """Likewise of its backward."""
        return self.summed(lambda cost: cost.backward.host) + self.engine.runtime.host_microbatch_s / 2

    @cached_property
    def forward(self) -> Array:
        """Seconds of each rank on a micro-batch's forward, exposed traffic included, (N, P)."""
        extra = (self.sends * self.degrees.stages + self.action)[:, None]
        return np.asarray(np.maximum(self.forward_busy, self.forward_host) + extra)

    @cached_property
    def backward(self) -> Array:
        """Likewise of its backward."""
        extra = (self.sends * self.degrees.stages + self.action)[:, None]
        return np.asarray(np.maximum(self.backward_busy + self.adds, self.backward_host) + extra)

    def piped(self) -> dict[str, Array]:
        """Returns seconds by part, (N,), of all micro-batches: what the dearest rank does, and its waiting."""
        d = self.degrees
        halves = (d.recompute == 0)[:, None]  # `Layout.unsplit`
        weight = self.summed(lambda cost: cost.backward.matmul) / 2 * halves
        whole = makespan(d, self.forward, self.backward, weight)
        parts = self._work(np.argmax(self.forward + self.backward, axis=1))
        parts["bubble"] = np.maximum(whole - sum(parts.values()), 0.0)
        return parts

    def _work(self, at: Array) -> dict[str, Array]:
        """Parts of the work of one rank of each layout on all micro-batches."""
        m, pick = self.degrees.microbatches, at[:, None]
        parts = {}
        for name in KEPT:
            read = attrgetter(f"forward.{name}", f"backward.{name}")
            parts[name] = self.picked(lambda cost, read=read: sum(read(cost)), at) * m  # type: ignore[misc]
        parts["elementwise"] = parts["elementwise"] + np.take_along_axis(self.adds, pick, 1)[:, 0] * m
        idle = np.maximum(self.forward_host - self.forward_busy, 0) + np.maximum(
            self.backward_host - self.backward_busy - self.adds, 0
        )
        parts["host"] = np.take_along_axis(idle, pick, 1)[:, 0] * m
        parts["engine"] = 2 * self.action * m
        parts["send"] = 2 * self.sends * self.degrees.stages * m
        return parts

    def ending(self) -> dict[str, Array]:
        """Returns seconds by part, (N,), of what the ranks that share the state do: gathers, sums, the update."""
        runtime, device = self.engine.runtime, self.model.machine.device
        own, experts = self.trained()
        after = self.wires.reduce_s(self, own, experts)
        trained, size = self.divided(own, experts), wide_bytes(self.job.precision)
        update = move_s(trained * runtime.update_bytes * size / 4.0, device)
        parts = {"reduce": after, "optimizer": update, "offload": np.zeros_like(update)}
        if self.degrees.offload.any():
            host = self._host()
            there, copies = spent(self, trained, host, size)
            parts |= {"optimizer": np.where(self.degrees.offload[:, None] > 0, there, update), "offload": copies}
        last = np.argmax(fold(np.add, parts.values()), axis=1)[:, None]
        found = {name: np.take_along_axis(seconds, last, 1)[:, 0] for name, seconds in parts.items()}
        return {"gather": self.wires.gather_s(self)} | found

    def _host(self) -> HostShare:
        host = self.model.machine.host
        if host is None:
            raise PlanError("nothing can be offloaded: no host memory, its bandwidth or the link to it is known")
        return host

    def memory(self) -> dict[str, Array]:
        """Returns bytes by part of `MEMORY`, (N, P), and ``allocated``, ``reserved``, ``peak``.

        Where some layout offloads also ``host``, the bytes in host memory, and ``whole``, the peak if none were there.
        """
        d, engine = self.degrees, self.engine
        own, experts = self._parameters
        units, size = self._gathered(own), wide_bytes(self.job.precision)
        wide = size if self.job.precision in ("float32", "float64") else 0.0
        found = state_bytes(engine.states, d, own, experts, self.divided(own, experts), units, wide)
        if self.job.adapters:
            found |= {name: np.zeros_like(own) for name in ("gradients", "optimizer", "update")}
        offloads = d.offload.any()
        before = sum(found[name] for name in STATE) if offloads else 0.0
        if offloads:
            without(found, d, self.divided(*self.trained()), own + experts, units, size)
        found["activations"] = self._activations()
        found["logits"] = np.zeros_like(own)
        self._add_at(found["logits"], self.last, self.costs.head.working)
        running = sum(found[name] for name in ("parameters", "gradients", "optimizer", "buffers"))
        forward = found["activations"] + found["logits"]
        update = found.pop("update")
        found["allocated"] = running + np.maximum(forward, update)
        reserved = running + np.maximum(forward * engine.allocator, update) + engine.allocator_bytes
        found["reserved"] = reserved
        found["reserve"] = reserved - running - forward + engine.context_bytes
        found["peak"] = np.asarray(sum(found[name] for name in MEMORY))
        if offloads:
            found["whole"] = found["peak"] + before - sum(found[name] for name in STATE)
        return found

    def _activations(self) -> Array:
        d, most = self.degrees, self.engine.saved.in_flight_extra
        live = self.held + np.maximum(np.minimum(d.microbatches[:, None] - self.held, most), 0.0)
        working = fold(np.maximum, [np.broadcast_to(cost.working, self.count) for cost in self.costs.layers])
        follows = d.microbatches[:, None] > self.held
        follows &= (d.pp[:, None] == 1) | (self.held > 2)
        kept = self.summed(lambda cost: cost.kept) * np.where(follows, live, 0.0)
        return np.asarray(self.summed(lambda cost: cost.saved) * live + kept + working[:, None])

    def _gathered(self, own: Array) -> Array:
        """Parameters that ZeRO-3 has whole at once: the ends, and the two largest layers."""
        largest = fold(np.maximum, [cost.parameters + cost.experts for cost in self.costs.layers])
        layers = self.summed(lambda cost: cost.parameters + cost.experts)
        ends = own - self.layered(lambda cost: cost.parameters)
        return np.minimum(2 * np.broadcast_to(largest, self.count)[:, None] + np.maximum(ends, 0), layers)
