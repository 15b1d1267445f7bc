"""Traffic that isn't inside a layer: sends between stages, gathered parameters, reduced gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.cluster import traffic
from meshwright.planner.cost.groups import GroupSpan
from meshwright.planner.cost.layers import PricedModel
from meshwright.planner.cost.layout_batch import Array
from meshwright.planner.cost.offload import added


class CommunicationTimes:
    """Collectives of the data axes and sends of the pipeline, for N layouts.

    Args:
        model: the layouts on their machine.
    """

    def __init__(self, model: PricedModel) -> None:
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
        runtime, d = self._model.engine.runtime, self._model.degrees
        times = np.where(self._once, 1.0, d.microbatches[:, None] if runtime.gather_each else 1.0)
        seconds = self._gathers_s(group)
        exposed = self._exposed(seconds, group.forward_busy)
        # A pipeline that keeps stages gathered gathers them before their first forward alone.
        exposed += np.where(self._once, 0.0, self._exposed(seconds, group.backward_busy))
        exposed += runtime.interference * (np.where(self._once, 1.0, 2.0) * seconds - exposed)
        return np.asarray((exposed * times * (d.zero[:, None] == 3)).max(axis=1))

    @property
    def _once(self) -> Array:
        """Whether a pipeline gathers parameters and scatters gradients once a step, (N, 1)."""
        model = self._model
        return np.asarray((model.degrees.pp[:, None] > 1) & model.engine.states.whole_in_pipeline)

    def _gathers_s(self, group: Any, pieces: Any = None) -> Array:
        """Returns seconds in which a rank's parameters are gathered once, (N, P)."""
        groups, (own, experts) = self._model.groups, group.parameters()
        seconds = self._columns(traffic.all_gather_s, own * self._gather_bytes, groups.shard_cp, pieces)
        return seconds + self._columns(traffic.all_gather_s, experts * self._gather_bytes, groups.expert_shard)

    def _exposed(self, seconds: Array, busy: Array) -> Array:
        """Returns what compute doesn't hide of gathers that go ahead of it, (N, P)."""
        hidden = self._model.engine.runtime.gather_overlap
        return np.asarray(np.maximum(seconds - hidden * busy, (1 - hidden) * seconds))

    def _left(self, group: Any, cover: Array) -> Array:
        """Returns what of a backward's cover ZeRO-3's gathers leave to the sums: the wire carries one at a time."""
        runtime, d = self._model.engine.runtime, self._model.degrees
        each = (d.zero[:, None] == 3) & ~self._once & (runtime.gather_each | (d.microbatches[:, None] == 1))
        if not each.any():
            return cover
        seconds = self._gathers_s(group)
        taken = seconds - self._exposed(seconds, group.backward_busy)
        return np.asarray(np.where(each, np.maximum(cover - taken, 0.0), cover))

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
        scatter += self._columns(traffic.reduce_scatter_s, experts * wire, groups.expert_shard)
        scatter += self._columns(traffic.all_reduce_s, group.divided(own, experts) * wire, groups.replicate)
        gather = self._gathers_s(group, np.maximum(1.0, runtime.gather_pieces * group.layers))
        seconds = np.where(zero > 0, scatter / runtime.scatter_share, whole)
        once = self._once
        each = runtime.reduce_each & (zero >= 2) & ~once
        times = np.where(each, d.microbatches[:, None], 1.0)
        sharded = runtime.dp_overlap if runtime.scatter_overlap is None else runtime.scatter_overlap
        window = np.where(once, 0.0, self._window()[:, None])
        cover = np.where(zero > 0, sharded, runtime.dp_overlap) * group.backward_busy * window
        if d.offload.any():
            # Only the first micro-batch's goes on beside backward where the host waits for the others to add them.
            cover = np.where(added(d)[:, None], cover / d.microbatches[:, None], cover)
        cover = self._left(group, cover)
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

    def _columns(self, kind: Any, size: Array, span: GroupSpan, pieces: Any = None) -> Array:
        """Returns seconds of a collective for each rank of the pipeline, (N, P), in equal ``pieces`` one by one."""
        if not size.any():
            return np.zeros_like(size)
        count = 1.0 if pieces is None else np.broadcast_to(pieces, size.shape)
        return np.asarray(count * self._model.groups.seconds(kind, size / count, span))
