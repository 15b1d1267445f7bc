"""Prices a layout from measured rates: the model's operators, collectives, and host time."""

from __future__ import annotations

import dataclasses

from meshwright.cluster.calibration import Calibration
from meshwright.cluster.traffic import span
from meshwright.planner.choose import Candidate, Question
from meshwright.planner.cost.element_bytes import compute_bytes
from meshwright.planner.cost.kernels import move_s
from meshwright.planner.cost.operators import PipelineSeconds, WorkSeconds
from meshwright.planner.cost.prices import LAYER_TRAFFIC, Price
from meshwright.planner.cost.stages import divide
from meshwright.planner.timeline import action_costs, price_send, simulated_s
from meshwright.spec.axis import Mechanics
from meshwright.spec.model_shape import ModelWork

FLOAT32_BYTES = 4
"""Bytes of an element of what FSDP2 copies in and out of its buffers."""
COMPUTE = ("matmul", "attention", "elementwise")
"""Parts of a step that the operators' seconds replace."""
PassParts = tuple[dict[str, float], dict[str, float]]
"""Seconds by part of a micro-batch's forward and backward."""
OPERATOR_PARTS = (*COMPUTE, "recompute", Mechanics.MATRICES.value, Mechanics.TOKENS.value, "host")
"""Parts of a micro-batch that `MeasuredTimes` adds up from layers and ends."""


class MeasuredTimes:
    """Seconds of a layout on a calibrated machine.

    Args:
        question: job, cluster and runtime.
        candidate: the layout priced by the closed form, which still gives memory and traffic of the data axes.
        work: the model's operators on a micro-batch, as ``tp`` splits them.
        operator_seconds: of the operators, by layer and end.
        calibration: of the machine.
    """

    def __init__(
        self,
        question: Question,
        candidate: Candidate,
        work: ModelWork,
        operator_seconds: PipelineSeconds,
        calibration: Calibration,
    ) -> None:
        self._question, self._layout, self._closed_price = question, candidate.layout, candidate.price
        self._work, self._operator_seconds, self._calibration = work, operator_seconds, calibration
        self._layers = sum(work.counts)
        self._serial = calibration.machine.get("kind") == "cpu"
        # Operators were traced on full rows of `work.rows`; cp and uneven rows give a rank a share of their tokens.
        self._share = 1.0 / candidate.layout.degree(Mechanics.TOKENS)
        shares = candidate.layout.reader_shares()
        rows = question.job.rows * max(shares) / (sum(shares) * candidate.layout.microbatches)
        self._share *= rows / work.rows

    def price(self) -> Price:
        """Returns the layout's price."""
        parts = dict(self._closed_price.parts)
        microbatches, layout = self._layout.microbatches, self._layout
        layer_forward, layer_backward = self._layer_parts()
        first_end, last_end = self._end_parts()
        microbatch_parts = _sum_parts(
            [first_end[0], first_end[1], last_end[0], last_end[1]], [layer_forward, layer_backward], self._layers
        )
        ranks = layout.degree(Mechanics.STAGES)
        for name in OPERATOR_PARTS:
            parts[name] = microbatches * microbatch_parts[name] / ranks
        if self._serial:
            parts["engine"] = 0.0  # among the stages' actions
        else:
            # Slower operators leave the host more time to run ahead, so its exposed seconds shrink by as much.
            added_compute_s = sum(parts[name] - self._closed_price.parts[name] for name in (*COMPUTE, "recompute"))
            parts["host"] = max(0.0, self._closed_price.parts["host"] - max(0.0, added_compute_s))
        if ranks > 1:
            pipeline_s = self._pipeline_s(layer_forward, layer_backward, first_end, last_end)
            parts["send"] = 0.0  # where a send isn't hidden its receiver waits: that is in the bubble
            busy_s = sum(parts[name] for name in (*COMPUTE, "recompute", *LAYER_TRAFFIC, "host"))
            parts["bubble"] = max(0.0, pipeline_s - busy_s)
        else:
            parts["bubble"] = 0.0
        # The pipeline's ranks are shown with equal shares of the model's forward and backward.
        forward_s = (self._layers * _total(layer_forward) + _total(first_end[0]) + _total(last_end[0])) / ranks
        backward_s = (self._layers * _total(layer_backward) + _total(first_end[1]) + _total(last_end[1])) / ranks
        stages = self._closed_price.stages
        stages = tuple(dataclasses.replace(stage, forward_s=forward_s, backward_s=backward_s) for stage in stages)
        self._correct_after_backward(parts)
        return dataclasses.replace(self._closed_price, parts=parts, step_s=sum(parts.values()), stages=stages)

    # -------------------------------------------------------- a micro-batch

    def _layer_parts(self) -> PassParts:
        """Returns a layer's forward and backward seconds by part: compute, recompute, its own traffic, host."""
        layer, calibration = self._operator_seconds.layer, self._calibration
        forward, backward = self._scaled_parts(layer)
        per_layer = self._layout.degree(Mechanics.STAGES) / (self._layout.microbatches * self._layers)
        links_known = self._links_are_known(self._layout.degree(Mechanics.MATRICES))
        wrapped_s = self._wrapped_collectives_s(self._work.layers[0].sent if self._work.layers else [])
        forward["tp"] = backward["tp"] = (wrapped_s if links_known else self._closed_price.parts["tp"] * per_layer) / 2
        if self._layout.degree(Mechanics.TOKENS) > 1:
            cp_s = self._cp_s() / self._layers
            forward["cp"], backward["cp"] = cp_s / 3, 2 * cp_s / 3
        mode, share = self._layout.recompute.mode, self._layout.recompute.share(self._layers)
        selective_host_s = layer.operators * calibration.host_s("selective_operator")
        if mode == "full":
            # Recompute stops at the last tensor that backward needs, so the last product isn't computed again.
            last_product_s = layer.last_s * self._share
            backward["recompute"] = share * (sum(forward[name] for name in COMPUTE) - last_product_s)
            backward["host"] += share * forward["host"]
            backward["tp"] += share * forward["tp"] * links_known
            cp, tp = self._layout.degree(Mechanics.TOKENS), self._layout.degree(Mechanics.MATRICES)
            backward["cp"] += share * forward["cp"] * self._links_are_known(cp, tp)
        elif mode == "selective":
            backward["recompute"] = share * forward["elementwise"]
            backward["host"] += share * (forward["host"] + selective_host_s)
            forward["host"] += share * selective_host_s
        shard_unit_s = calibration.host_s("shard_unit")
        if self._layout.zero:
            backward["host"] += shard_unit_s
        if self._layout.microbatches > 1:
            weights = self._question.job.shape.parameters / (self._layout.degree(Mechanics.MATRICES) * self._layers)
            repeated_share = (self._layout.microbatches - 1) / self._layout.microbatches
            under_load = self._question.cluster.devices > 1
            # Gradients are added to the sum in every micro-batch but the first, priced as six equal tensors a layer.
            add_s = calibration.operation_s("add", weights / 6, "float32", under_load) * 6
            backward["elementwise"] += repeated_share * float(add_s)
        return forward, backward

    def _end_parts(self) -> tuple[PassParts, PassParts]:
        """Returns (forward, backward) seconds by part of the first end (embedding) and of the last (head, loss)."""
        first_end = self._scaled_parts(self._operator_seconds.first_end)
        last_end = self._scaled_parts(self._operator_seconds.last_end)
        links_known = self._links_are_known(self._layout.degree(Mechanics.MATRICES))
        wrapped_s = self._wrapped_collectives_s(self._work.rest.sent) if links_known else 0.0
        for parts in (*first_end, *last_end):
            parts["tp"] = wrapped_s / 4
        last_end[1]["host"] += self._calibration.host_s("microbatch")
        return first_end, last_end

    def _scaled_parts(self, seconds: WorkSeconds) -> PassParts:
        """Returns forward and backward seconds by part, scaled to this rank's share of the tokens."""
        passes = []
        for parts in (seconds.forward, seconds.backward):
            scaled = {name: self._share * value for name, value in parts.items() if name != "host"}
            passes.append({**scaled, "host": parts["host"] if self._serial else 0.0, "recompute": 0.0, "cp": 0.0})
        return passes[0], passes[1]

    def _wrapped_collectives_s(self, sent: list[tuple[str, int, int]]) -> float:
        """Returns seconds of a module's own collectives, each (kind, bytes, degree)."""
        return sum(self._share * self._collective_s(kind, size, degree) for kind, size, degree in sent)

    def _links_are_known(self, degree: int, rank_stride: int = 1) -> bool:
        """Whether an axis's links are better known than by the closed form: inside one node, or measured."""
        nodes = self._group_span(degree, rank_stride)[1]
        return self._question.cluster.nodes == 1 or self._calibration.covers("all_reduce", degree, nodes)

    def _group_span(self, degree: int, rank_stride: int) -> tuple[int, int, int]:
        """Returns an axis's (members of a group on a node, nodes, groups that share a node's network cards)."""
        fabric = self._question.machine.fabric
        return tuple(int(value) for value in span(rank_stride, degree, fabric.devices, self._layout.world))  # type: ignore[return-value]

    def _collective_s(self, kind: str, size: float, degree: int, rank_stride: int = 1) -> float:
        """Returns seconds of a collective that compute waits for, by the calibration's table where it covers it."""
        calibration, (inside, nodes, sharing) = self._calibration, self._group_span(degree, rank_stride)
        if not calibration.covers(kind, degree, nodes):
            return float(self._question.cluster.seconds(kind, size, inside, nodes, sharing))
        return float(calibration.collective_s(kind, size, degree, nodes, rank_stride)) + calibration.host_s("wait")

    def _cp_s(self) -> float:
        """Returns seconds of a micro-batch's traffic over cp.

        With heads: an all-to-all of queries, keys, values and attention's output, in forward and backward. With
        ``attention=gather``: an all-gather of keys and values in forward, a reduce-scatter in backward.
        """
        degree, job = self._layout.degree(Mechanics.TOKENS), self._question.job
        tp = self._layout.degree(Mechanics.MATRICES)
        block = job.shape.blocks[0]
        if not block.heads or not self._links_are_known(degree, tp):
            return self._closed_price.parts["cp"] * self._layout.degree(Mechanics.STAGES) / self._layout.microbatches
        # Bytes of a feature of the rank's tokens (the share has 1/cp in it), which travel in the type of compute.
        feature_bytes = compute_bytes(job.precision) * self._work.rows * self._share * job.sequence
        if self._layout.attention == "gather":
            sizes = [degree * feature_bytes * width / tp for width in (block.key_width, block.value_width)]
            kinds = ("all_gather", "reduce_scatter")
            return self._layers * sum(self._collective_s(kind, size, degree, tp) for kind in kinds for size in sizes)
        widths = (block.query_width, block.key_width, block.value_width, block.mixed_width)
        per_layer_s = sum(self._collective_s("all_to_all", feature_bytes * width / tp, degree, tp) for width in widths)
        return 2.0 * self._layers * per_layer_s

    # -------------------------------------------------------- the pipeline

    def _pipeline_s(
        self,
        layer_forward: dict[str, float],
        layer_backward: dict[str, float],
        first_end: PassParts,
        last_end: PassParts,
    ) -> float:
        """Returns seconds of all micro-batches: the schedule's actions, simulated one by one.

        Where ranks share cores, a waiting rank leaves its share to the others. The result is the longer of the busy
        time of all ranks together, and the makespan with a core to each rank.
        """
        question, layout, calibration = self._question, self._layout, self._calibration
        schedule = layout.pipeline()
        split = [float(size) for size in layout.split.layers] or None
        forward, backward, weight = [], [], []
        bounds = divide(question.job.shape, schedule.stages, question.runtime.split, split)
        action_host_s = calibration.host_s("action")
        for stage, (start, stop) in enumerate(bounds):
            stage_ends = ([first_end] if stage == 0 else []) + ([last_end] if stage == schedule.stages - 1 else [])
            forward.append(
                (stop - start) * _total(layer_forward) + sum(_total(end[0]) for end in stage_ends) + action_host_s
            )
            backward.append(
                (stop - start) * _total(layer_backward) + sum(_total(end[1]) for end in stage_ends) + action_host_s
            )
            matmul_s = (stop - start) * layer_backward["matmul"] + sum(end[1]["matmul"] for end in stage_ends)
            # Half of a backward's products are the weight gradients, which a schedule may delay.
            weight.append(matmul_s / 2)
        costs = action_costs(forward, backward, weight, self._send_s(), action_host_s)
        makespan = simulated_s(layout, schedule, costs)
        if calibration.crowd == 1.0:
            return makespan
        busy_s = layout.microbatches * (sum(forward) + sum(backward)) / layout.degree(Mechanics.STAGES)
        return max(makespan / calibration.crowd, busy_s)

    def _send_s(self) -> float:
        """Returns seconds to send an activation to the next stage, by the calibration's table where it covers it."""
        question, degree = self._question, self._layout.degree(Mechanics.STAGES)
        rank_stride = self._layout.world // degree
        nodes = self._group_span(degree, rank_stride)[1]
        size, closed_s = price_send(question.job, self._layout, question.machine, question.runtime)
        if not self._calibration.covers("send", degree, nodes):
            return closed_s
        return float(self._calibration.collective_s("send", size, degree, nodes, rank_stride))

    # -------------------------------------------------------- after the last backward

    def _correct_after_backward(self, parts: dict[str, float]) -> None:
        """Corrects ``parts`` for the work after backward (norm, update), and for FSDP2's copies, in place."""
        calibration, layout, runtime = self._calibration, self._layout, self._question.runtime.runtime
        under_load = self._question.cluster.devices > 1
        owned_elements = parts["optimizer"] / float(move_s(runtime.update_bytes, self._question.machine.device))
        if calibration.optimizer:
            parts["optimizer"] = float(calibration.optimizer_s(owned_elements))
            if calibration.has_operation("sum"):
                parts["optimizer"] += float(calibration.operation_s("sum", owned_elements, "float32", under_load))
        # A calibration without a host's step, of GPUs or a quick one, still has the wait for other ranks.
        if calibration.host_s("step") or calibration.host_s("step_layer"):
            layers = self._layers / layout.degree(Mechanics.STAGES)
            parts["step"] = calibration.host_s("step") + layers * calibration.host_s("step_layer")
        weights = self._question.job.shape.parameters / (
            layout.degree(Mechanics.STAGES) * layout.degree(Mechanics.MATRICES)
        )
        size = FLOAT32_BYTES * weights / max(1, self._layers // layout.degree(Mechanics.STAGES) + 1)
        copy_s = 2 * FLOAT32_BYTES * weights / float(calibration.bandwidth_bytes_per_s(size, "float32", under_load))
        gathers_once, microbatches = layout.degree(Mechanics.STAGES) > 1, layout.microbatches
        if layout.zero:
            # A gather copies the shard in and the full weight out, a scatter the gradients in and their sum out.
            gathers = 2 * microbatches if layout.zero == 3 and not gathers_once else 1
            scatters = microbatches if layout.zero >= 2 and not gathers_once else 1
            parts["gather"] += 2 * gathers * copy_s
            parts["reduce"] += 2 * scatters * copy_s


def _total(parts: dict[str, float]) -> float:
    return sum(parts.values())


def _sum_parts(ends: list[dict[str, float]], layer: list[dict[str, float]], layers: int) -> dict[str, float]:
    """Returns seconds by part of a micro-batch over the ends and ``layers`` equal layers."""
    return {
        name: sum(parts[name] for parts in ends) + layers * sum(parts[name] for parts in layer)
        for name in OPERATOR_PARTS
    }
