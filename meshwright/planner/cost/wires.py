"""Traffic that isn't inside a layer: sends between stages, gathered parameters, reduced gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.cluster import traffic
from meshwright.planner.cost.groups import Span
from meshwright.planner.cost.job import Array
from meshwright.planner.cost.layers import Model
from meshwright.planner.cost.offload import added


class Wires:
    """Collectives of the data axes and sends of the pipeline, for N layouts.

    Args:
        model: the layouts on their machine.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        # The engine's are of a parameter in 2 bytes; what computes in 4 is gathered so.
        self._gather_bytes = model.engine.runtime.gather_bytes * model.element / 2.0
        # Gradients are summed in 4 bytes whatever computes, but in float64.
        self._reduce_bytes = model.engine.runtime.reduce_bytes * (2.0 if model.job.precision == "float64" else 1.0)

    def send_s(self) -> Array:
        """Returns seconds of one activation from stage to stage, (N,)."""
        return self._model.groups.send(self.send_bytes())

    def send_bytes(self) -> Array:
        """Returns bytes of one activation from stage to stage, (N,)."""
        model = self._model
        divided = model.degrees.tp if model.engine.runtime.send_divided else model.divided
        return np.asarray(model.tokens * model.job.shape.width * model.element / divided)

    def gather_s(self, group: Any) -> Array:
        """Returns exposed seconds of ZeRO-3's gathers in a step, (N,): forward and backward, each micro-batch."""
        model, runtime, d = self._model, self._model.engine.runtime, self._model.degrees
        own, experts = group.parameters()
        times = d.microbatches[:, None] if runtime.gather_each else 1.0
        seconds = self._columns(traffic.all_gather_s, own * self._gather_bytes, model.groups.shard_cp)
        seconds += self._columns(traffic.all_gather_s, experts * self._gather_bytes, model.groups.expert_readers)
        hidden = runtime.gather_overlap
        exposed = np.maximum(seconds - hidden * group.forward_busy, (1 - hidden) * seconds)
        exposed += np.maximum(seconds - hidden * group.backward_busy, (1 - hidden) * seconds)
        exposed += 2 * runtime.interference * (2 * seconds - exposed) / 2
        return np.asarray((exposed * times * (d.zero[:, None] == 3)).max(axis=1))

    def reduce_s(self, group: Any, own: Array, experts: Array) -> Array:
        """Returns exposed seconds of a step's gradient reduction and of ZeRO-1's gather after it, (N, P)."""
        model, runtime, d = self._model, self._model.engine.runtime, self._model.degrees
        groups, zero = model.groups, d.zero[:, None]
        wire = self._reduce_bytes
        pieces = np.maximum(1.0, runtime.reduce_pieces * group.layers)
        buckets = np.maximum(1.0, own * wire / runtime.bucket_bytes) if runtime.bucket_bytes else 1.0
        whole = self._columns(traffic.all_reduce_s, own * wire, groups.readers, buckets)
        whole += self._columns(traffic.all_reduce_s, experts * wire, groups.expert_readers)
        scatter = self._columns(traffic.reduce_scatter_s, own * wire, groups.shard_cp, pieces)
        scatter += self._columns(traffic.reduce_scatter_s, experts * wire, groups.expert_readers)
        shard = np.maximum(1.0, d.shard * d.cp)[:, None]
        scatter += self._columns(traffic.all_reduce_s, own * wire / shard, groups.replicate)
        pieces = np.maximum(1.0, runtime.gather_pieces * group.layers)
        gather = self._columns(traffic.all_gather_s, own * self._gather_bytes, groups.shard_cp, pieces)
        gather += self._columns(traffic.all_gather_s, experts * self._gather_bytes, groups.expert_readers)
        seconds = np.where(zero > 0, scatter / runtime.scatter_share, whole)
        once = (d.pp[:, None] > 1) & model.engine.states.whole_in_pipeline
        each = runtime.reduce_each & (zero >= 2) & ~once
        times = np.where(each, d.microbatches[:, None], 1.0)
        sharded = runtime.dp_overlap if runtime.scatter_overlap is None else runtime.scatter_overlap
        window = np.where(once, 0.0, self._window()[:, None])
        cover = np.where(zero > 0, sharded, runtime.dp_overlap) * group.backward_busy * window
        if d.offload.any():
            # Only the first micro-batch's goes on beside backward where the host waits for the others to add them.
            cover = np.where(added(d)[:, None], cover / d.microbatches[:, None], cover)
        exposed = np.maximum(seconds - cover, 0.0) + runtime.interference * np.minimum(seconds, cover)
        late = np.where((zero == 1) | (zero == 2), gather / runtime.scatter_share, 0.0)
        cover = sharded * group.forward_busy * window
        return np.asarray(exposed * times + np.maximum(late - cover, 0.0))

    def _window(self) -> Array:
        """Returns micro-batches under whose backward a rank's gradients can go, (N,): the last one.

        Of several stages on a rank the first to end go under the last round of micro-batches of the others.
        """
        d = self._model.degrees
        return np.asarray(1.0 + (np.minimum(d.microbatches, d.pp) - 1.0) * (d.stages - 1.0) / d.stages)

    def _columns(self, kind: Any, size: Array, span: Span, pieces: Any = None) -> Array:
        """Returns seconds of a collective for each rank of the pipeline, (N, P), in equal ``pieces`` one by one."""
        if not size.any():
            return np.zeros_like(size)
        count = 1.0 if pieces is None else np.broadcast_to(pieces, size.shape)
        return np.asarray(count * self._model.groups.seconds(kind, size / count, span))

    def sent(self, group: Any) -> dict[str, Array]:
        """Returns bytes that the rank which sends most sends in a step, by axis."""
        runtime, d = self._model.engine.runtime, self._model.degrees
        m = d.microbatches
        found = {
            axis: group.summed(lambda cost, axis=axis: cost.sent.get(axis, 0.0)).max(axis=1) * m
            for axis in ("tp", "cp", "ep")
        }
        found["pp"] = 2.0 * self.send_bytes() * m * d.stages * (d.pp > 1)
        own, experts = group.parameters()
        total = (own + experts).max(axis=1)
        shards = d.shard * d.cp
        gathers = np.where(d.zero == 3, 2 * m if runtime.gather_each else 2, (d.zero > 0) * 1.0)
        found["shard"] = total * (self._reduce_bytes + self._gather_bytes * gathers) * (shards - 1) / shards
        found["shard"] = found["shard"] * (d.zero > 0)
        copies = np.where(d.zero > 0, d.replicate, d.readers)
        found["replicate"] = 2 * total * self._reduce_bytes / np.where(d.zero > 0, shards, 1) * (copies - 1) / copies
        return found
