"""Prices a layout from measured rates: the model's operators, collectives, and host time.

Measured are the passes of a layer and of the model's ends, sends, and the update. What has no measurement keeps the
closed form's seconds, and both are added up over ranks, pipeline and data axes by the same formulas
(`planner.cost.ranks`).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from meshwright.array_types import Values
from meshwright.cluster.calibration import Calibration
from meshwright.cluster.traffic import span
from meshwright.planner.cost.element_bytes import compute_bytes, master_bytes
from meshwright.planner.cost.layer_cost import LayerCost
from meshwright.planner.cost.layer_sums import LayerCosts
from meshwright.planner.cost.layout_batch import LayoutBatch
from meshwright.planner.cost.operators import PipelineSeconds, WorkSeconds
from meshwright.planner.cost.pipeline_floor import sends_of_cut
from meshwright.planner.cost.price import price_of
from meshwright.planner.cost.prices import TRAFFIC_WORK, Price, straggler_share_of, with_straggler_share
from meshwright.planner.cost.ranks import RankTimes
from meshwright.planner.cost.stages import block_kinds
from meshwright.planner.question import Question
from meshwright.planner.timeline import price_send, simulated_s, stage_costs
from meshwright.spec.axis import Mechanics
from meshwright.spec.compression import assign_buckets
from meshwright.spec.key_ring import KeyRing
from meshwright.spec.layout import Layout
from meshwright.spec.model_shape import LayerShape, ModelWork, ModuleWork

FLOAT32_BYTES = 4
"""Bytes of an element of what FSDP2 copies in and out of its buffers, and of the update that is measured."""
GLOO_MESSAGES = 2
"""Collectives of a group that gloo carries at once. Source: torch 2.13, ProcessGroupGloo's options, 2 threads; NCCL
carries one."""
ADDED_TENSORS = 6
"""Weights of a layer, taken as equal, whose gradients are added to the sum one by one."""


class MeasuredTimes:
    """Seconds of a layout on a calibrated machine.

    Args:
        question: job, cluster and runtime.
        layout: any that the job's batch and the cluster's devices allow.
        work: the model's operators on a micro-batch, as ``tp`` splits them.
        operator_seconds: of the operators, by layer and end.
        calibration: of the machine.
    """

    def __init__(
        self,
        question: Question,
        layout: Layout,
        work: ModelWork,
        operator_seconds: PipelineSeconds,
        calibration: Calibration,
    ) -> None:
        self._question, self._layout = question, layout
        self._work, self._operator_seconds, self._calibration = work, operator_seconds, calibration
        self._layers = sum(work.counts)
        self._serial = calibration.machine.get("kind") == "cpu"
        # A quick calibration of a GPU has no seconds of its host.
        self._knows_host = self._serial or calibration.host_s("operator_forward") > 0.0
        self._under_load = question.under_load
        # Operators were traced on full rows of `work.rows`; cp and uneven rows give a rank a share of their tokens.
        self._share = 1.0 / layout.degree(Mechanics.TOKENS)
        shares = layout.reader_shares()
        self._share *= question.job.rows * max(shares) / (sum(shares) * layout.microbatches) / work.rows
        engine = question.runtime.for_layout(layout)
        # Gradients are added at measured rates below.
        engine = engine.with_options(runtime__reduce_rounds=self._reduce_rounds(), runtime__accumulate_bytes=0.0)
        if self._serial:
            engine = engine.with_options(runtime__host_runs_ahead=False)
        batch = LayoutBatch.from_layouts([layout], len(question.job.shape.blocks))
        self._closed_costs = LayerCosts.of(question.job, batch, question.machine, engine)
        # The same where nothing of tp's traffic is hidden, as what is measured isn't.
        self._plain_costs = self._closed_costs
        if layout.tp_overlap:
            plain = LayoutBatch.from_layouts(
                [dataclasses.replace(layout, tp_overlap=0)], len(question.job.shape.blocks)
            )
            self._plain_costs = LayerCosts.of(question.job, plain, question.machine, engine)

    def _reduce_rounds(self) -> float:
        """Returns in how many messages, one after the other, a sum of gradients over copies takes what it was measured.

        Each message costs its latency: on a wire with delay that is most of a short one's time.
        """
        layout, calibration = self._layout, self._calibration
        sizes = [count * master_bytes(self._question.job.precision) for count in self._work.gradients]
        messages = [sum(sizes[position] for position in bucket) for bucket in assign_buckets(sizes)]
        count, at_once = len(messages) / layout.degree(Mechanics.STAGES), GLOO_MESSAGES if self._serial else 1
        # The closed form's group of copies lies outside of tp.
        degree, rank_stride = layout.reader(0)[1] * layout.degree(Mechanics.TOKENS), layout.degree(Mechanics.MATRICES)
        inside, nodes, sharing = self._group_span(degree, rank_stride)
        if count <= 1 or degree == 1 or not calibration.covers("all_reduce", degree, nodes):
            return max(1.0, count / at_once)

        def closed_s(pieces: float) -> float:
            size = sum(messages) / layout.degree(Mechanics.STAGES) / pieces
            return pieces * float(self._question.cluster.seconds("all_reduce", size, inside, nodes, sharing))

        measured_s = sum(
            float(calibration.collective_s("all_reduce", size, degree, nodes, rank_stride)) for size in messages
        ) / (layout.degree(Mechanics.STAGES) * at_once)
        # The closed form is linear in the pieces: latency times pieces, and bytes over the rate.
        least_s, most_s = closed_s(1.0), closed_s(count)
        if most_s <= least_s:
            return 1.0
        return 1.0 + (count - 1.0) * min(1.0, max(0.0, (measured_s - least_s) / (most_s - least_s)))

    def price(self) -> Price:
        """Returns the layout's price."""
        ranks = RankTimes(self._measured_costs())
        closed_price = price_of(ranks)
        parts = dict(closed_price.parts)
        if ranks.ranks > 1:
            parts |= self._pipeline_parts(ranks)
        copies_s = self._correct_after_backward(parts, ranks)
        if ranks.ranks == 1:
            _move_rank_work(parts, ranks, copies_s)
        else:
            parts["gather"] += copies_s[0]
            parts["reduce"] += copies_s[1]
        parts = with_straggler_share(parts, straggler_share_of(closed_price.parts))
        return dataclasses.replace(closed_price, parts=parts, step_s=sum(parts.values()))

    # -------------------------------------------------------- a micro-batch

    def _measured_costs(self) -> LayerCosts:
        """Returns the closed form's costs of layers and ends, with what was measured in their place."""
        closed_costs, shape = self._closed_costs, self._question.job.shape
        embedding = self._with_operators(closed_costs.embedding, self._operator_seconds.first_end)
        head = self._with_operators(closed_costs.head, self._operator_seconds.last_end)
        if self._links_are_known(self._layout.degree(Mechanics.MATRICES)):
            for end in (embedding, head):
                # The traffic of both ends is recorded together.
                end.forward.tp = end.backward.tp = self._wrapped_collectives_s(self._work.rest) / 4
        head.backward.host = head.backward.host + self._calibration.host_s("microbatch")
        return dataclasses.replace(
            closed_costs,
            layers=tuple(
                self._measured_layer(cost, plain_cost, shape.blocks[block])
                for cost, plain_cost, block in zip(
                    closed_costs.layers, self._plain_costs.layers, block_kinds(shape)[1], strict=True
                )
            ),
            embedding=embedding,
            head=head,
        )

    def _measured_layer(self, closed_cost: LayerCost, plain_cost: LayerCost, block: LayerShape) -> LayerCost:
        """Returns the cost of a layer: measured operators and collectives, recompute, and gradients that add up.

        Args:
            closed_cost: by the closed form.
            plain_cost: the same without ``tp_overlap``; their ratio is that of what is seen of measured traffic.
            block: the layer's sizes.
        """
        operators, layout, calibration = self._operator_seconds.layer, self._layout, self._calibration
        cost = self._with_operators(closed_cost, operators)
        forward, backward = cost.forward, cost.backward
        tp, cp = layout.degree(Mechanics.MATRICES), layout.degree(Mechanics.TOKENS)
        full, selective = (layout.recompute.share(self._layers, mode) for mode in ("full", "selective"))
        # Recompute sends again what its forward sends. Selective recompute has kept sums over tp, and a ring, which is
        # part of attention.
        repeats = full + selective
        if self._links_are_known(tp):
            pass_s = self._layer_collectives_s() / 2
            forward.tp = pass_s * _ratio(closed_cost.forward.tp, plain_cost.forward.tp)
            gathers = full + selective * (0.5 if layout.sequence else 0.0)
            backward.tp = (1.0 + gathers) * pass_s * _ratio(closed_cost.backward.tp, plain_cost.backward.tp)
        if cp > 1 and block.heads and self._links_are_known(cp, tp):
            forward.cp = self._cp_pass_s(block)
            # A ring sends gradients beside keys and values in backward.
            factor = 2.0 if layout.attention == "ring" else 1.0
            backward.cp = (factor + (full if layout.attention == "ring" else repeats)) * forward.cp
            if layout.attention == "ring" and not self._serial:
                # It travels while attention computes with the block before.
                for pass_time in (forward, backward):
                    pass_time.cp = np.maximum(0.0, pass_time.cp - pass_time.attention)
        # Recompute stops at the last tensor that backward needs, so the last product isn't computed again.
        full_s = forward.compute - operators.last_s * self._share
        selective_s = forward.elementwise + operators.narrow_s * self._share
        backward.recompute = full * full_s + selective * selective_s
        inspection_s = selective * operators.operators * calibration.host_s("selective_operator")
        forward.host = forward.host + inspection_s
        backward.host = backward.host + inspection_s
        if self._knows_host:
            backward.host = backward.host + repeats * operators.forward["host"]
        if layout.zero:
            backward.host = backward.host + calibration.host_s("shard_unit")
        if layout.microbatches > 1:
            weights = self._question.job.shape.parameters / (tp * self._layers)
            add_s = calibration.operation_s("add", weights / ADDED_TENSORS, "float32", self._under_load) * ADDED_TENSORS
            # Gradients are added to the sum in every micro-batch but the first.
            repeated_share = (layout.microbatches - 1) / layout.microbatches
            backward.elementwise = backward.elementwise + float(add_s) * repeated_share
        return cost

    def _with_operators(self, closed_cost: LayerCost, seconds: WorkSeconds) -> LayerCost:
        """Returns a copy of a cost with the seconds of measured operators on this rank's share of the tokens.

        The host's seconds are replaced where they were measured, as they always are where it computes what it launches.
        """
        passes = []
        for closed_pass, by_part in ((closed_cost.forward, seconds.forward), (closed_cost.backward, seconds.backward)):
            compute_s = {name: self._share * by_part[name] for name in ("matmul", "attention", "elementwise")}
            host_s = by_part["host"] if self._knows_host else closed_pass.host
            passes.append(dataclasses.replace(closed_pass, **compute_s, recompute=0.0, host=host_s))
        return dataclasses.replace(closed_cost, forward=passes[0], backward=passes[1])

    def _layer_collectives_s(self) -> float:
        """Returns seconds of a layer's own collectives, the mean of all layers."""
        kind_counts = zip(self._work.counts, self._work.layers)
        return sum(count * self._wrapped_collectives_s(kind) for count, kind in kind_counts) / self._layers

    def _wrapped_collectives_s(self, work: ModuleWork) -> float:
        """Returns seconds of the collectives that a module's operators are wrapped in, forward and backward."""
        return sum(self._share * self._collective_s(kind, size, degree) for kind, size, degree in work.sent)

    def _links_are_known(self, degree: int, rank_stride: int = 1) -> bool:
        """Whether an axis's links are better known than by the closed form: inside one node, or measured."""
        nodes = self._group_span(degree, rank_stride)[1]
        return self._question.cluster.nodes == 1 or self._calibration.covers("all_reduce", degree, nodes)

    def _group_span(self, degree: int, rank_stride: int) -> tuple[int, int, int]:
        """Returns an axis's (members of a group on a node, nodes, groups that share a node's network cards)."""
        return span(rank_stride, degree, self._question.machine.fabric.devices, self._layout.world)

    def _collective_s(self, kind: str, size: float, degree: int, rank_stride: int = 1) -> float:
        """Returns seconds of a collective that compute waits for, by the calibration's table where it covers it."""
        calibration, (inside, nodes, sharing) = self._calibration, self._group_span(degree, rank_stride)
        if not calibration.covers(kind, degree, nodes):
            return float(self._question.cluster.seconds(kind, size, inside, nodes, sharing))
        return float(calibration.collective_s(kind, size, degree, nodes, rank_stride)) + calibration.host_s("wait")

    def _cp_pass_s(self, block: LayerShape) -> float:
        """Returns seconds of a layer's traffic over cp on a micro-batch, in forward; backward's are as long.

        With heads: an all-to-all of queries, keys, values and attention's output, in forward and backward. With
        ``attention=gather``: an all-gather of keys and values in forward, a reduce-scatter in backward. With
        ``attention=ring``: what the rank that sends most sends in each step, keys with values.
        """
        degree, tp = self._layout.degree(Mechanics.TOKENS), self._layout.degree(Mechanics.MATRICES)
        job = self._question.job
        # Bytes of a feature of the rank's tokens (the share has 1/cp in it), which travel in the type of compute.
        feature_bytes = compute_bytes(job.precision) * self._work.rows * self._share * job.sequence
        if self._layout.attention == "gather":
            sizes = [degree * feature_bytes * width / tp for width in (block.key_width, block.value_width)]
            kinds = ("all_gather", "reduce_scatter")
            return sum(self._collective_s(kind, size, degree, tp) for kind in kinds for size in sizes) / 2
        if self._layout.attention == "ring":
            ring = KeyRing(degree, job.sequence // (2 * degree), block.window)
            token_bytes = feature_bytes / (job.sequence / degree) * (block.key_width + block.value_width) / tp
            most_tokens = [
                max(ring.tokens_sent(rank, (rank + step) % degree) for rank in range(degree))
                for step in range(1, degree)
            ]
            return sum(self._collective_s("send", token_bytes * tokens, degree, tp) for tokens in most_tokens if tokens)
        widths = (block.query_width, block.key_width, block.value_width, block.mixed_width)
        return sum(self._collective_s("all_to_all", feature_bytes * width / tp, degree, tp) for width in widths)

    # -------------------------------------------------------- the pipeline

    def _pipeline_parts(self, ranks: RankTimes) -> dict[str, float]:
        """Returns seconds by part of all micro-batches: the mean rank's work, and as bubble what the actions add.

        The work is that of the mean, not of the slowest rank, because ranks that share cores don't wait for each
        other's.
        """
        by_rank = [ranks.busy_parts(np.array([rank])) for rank in range(ranks.ranks)]
        parts = {name: sum(float(busy[name][0]) for busy in by_rank) / ranks.ranks for name in by_rank[0]}
        # The simulated actions contain both: where a send isn't hidden, its receiver waits.
        parts |= {"engine": 0.0, "send": 0.0}
        return parts | {"bubble": max(0.0, self._pipeline_s(ranks) - sum(parts.values()))}

    def _pipeline_s(self, ranks: RankTimes) -> float:
        """Returns seconds of all micro-batches: the schedule's actions, simulated one by one.

        Where ranks share cores, a waiting rank leaves its share to the others. The result is the longer of the busy
        time of all ranks together, and the makespan of ranks that never compute beside each other.
        """
        layout, calibration = self._layout, self._calibration
        send_s, work_s = self._send_s()
        action_costs = stage_costs(ranks.costs, layout, send_s - work_s, calibration.host_s("action"))
        # A core's own seconds for what it sends and receives over a network: in each pass half of them.
        sends = sends_of_cut(ranks, ranks.cut_of(0)).stage_outside * work_s / 2.0
        action_costs = dataclasses.replace(
            action_costs,
            forward_s=tuple((action_costs.forward_s + sends).tolist()),
            backward_s=tuple((action_costs.backward_s + sends).tolist()),
            input_s=tuple((action_costs.input_s + sends).tolist()),
        )
        makespan_s = simulated_s(self._question.job, layout, action_costs)
        busy_s = (
            layout.microbatches
            * (sum(action_costs.forward_s) + sum(action_costs.backward_s))
            / layout.degree(Mechanics.STAGES)
        )
        return max(makespan_s / calibration.alone_speedup, busy_s)

    def _ahead_s(self, ranks: RankTimes) -> float:
        """Returns by how many seconds a step's passes keep the device busy for longer than the host issues them."""
        passes = ((ranks.forward_busy, ranks.forward_host), (ranks.backward_busy, ranks.backward_host))
        ahead_s = sum(float(np.max(busy_s) - np.max(host_s)) for busy_s, host_s in passes)
        return max(0.0, ahead_s * self._layout.microbatches)

    def _send_s(self) -> tuple[float, float]:
        """Returns seconds to send an activation to the next stage, and a core's own of a send and a receive.

        The first are by the calibration's table where it covers them, the second are those that it measured of bytes
        over a network.
        """
        question, degree = self._question, self._layout.degree(Mechanics.STAGES)
        rank_stride = self._layout.world // degree
        nodes = self._group_span(degree, rank_stride)[1]
        size, closed_s = price_send(question.job, self._layout, question.machine, question.runtime)
        send_s = closed_s
        if self._calibration.covers("send", degree, nodes):
            send_s = float(self._calibration.collective_s("send", size, degree, nodes, rank_stride))
        return send_s, min(send_s, size * question.machine.core_byte_s)

    # -------------------------------------------------------- after the last backward

    def _correct_after_backward(self, parts: dict[str, float], ranks: RankTimes) -> tuple[float, float]:
        """Corrects ``parts`` for the work after backward (norm, update), in place.

        Returns:
            Seconds of FSDP2's copies for gathers, and for sums of gradients.
        """
        calibration, layout, job = self._calibration, self._layout, self._question.job
        # An update in host memory is the host's, which isn't measured.
        if calibration.optimizer and layout.offload == "none":
            owned_elements = float(ranks.owned_parameters(*ranks.trained()).max())
            owned_elements *= master_bytes(job.precision) / FLOAT32_BYTES
            parts["optimizer"] = float(calibration.optimizer_s(owned_elements))
            if calibration.has_operation("sum"):
                parts["optimizer"] += float(calibration.operation_s("sum", owned_elements, "float32", self._under_load))
        # A calibration without a host's step, of GPUs or a quick one, still has the wait for other ranks.
        if calibration.host_s("step") or calibration.host_s("step_layer"):
            layers = self._layers / layout.degree(Mechanics.STAGES)
            step_s = calibration.host_s("step") + layers * calibration.host_s("step_layer")
            # A GPU's host issues it while the device is at what it was given before.
            ahead_s = 0.0 if self._serial else self._ahead_s(ranks) + parts["optimizer"]
            parts["step"] = max(0.0, step_s - ahead_s)
        weights = job.shape.parameters / (layout.degree(Mechanics.STAGES) * layout.degree(Mechanics.MATRICES))
        size = FLOAT32_BYTES * weights / max(1, self._layers // layout.degree(Mechanics.STAGES) + 1)
        copy_rate = float(calibration.bandwidth_bytes_per_s(size, "float32", self._under_load))
        copy_s = 2 * FLOAT32_BYTES * weights / copy_rate
        gathers_once, microbatches = layout.degree(Mechanics.STAGES) > 1, layout.microbatches
        if not layout.zero:
            return 0.0, 0.0
        # A gather copies the shard in and the full weight out, a scatter the gradients in and their sum out.
        layers_share = sum(block.parameters for block in job.shape.blocks) / job.shape.parameters
        # ZeRO-3 gathers what is outside of the layers for forward alone.
        gathers = microbatches * (1.0 + layers_share) if layout.zero == 3 and not gathers_once else 1
        scatters = microbatches if layout.zero >= 2 and not gathers_once else 1
        return 2 * gathers * copy_s, 2 * scatters * copy_s


def _ratio(seconds: Values, plain_s: Values) -> Values:
    """Returns seconds of traffic over those without overlap; 1 where there is none."""
    return np.divide(seconds, plain_s, out=np.ones_like(np.asarray(plain_s, float)), where=np.asarray(plain_s) > 0)


def _move_rank_work(parts: dict[str, float], ranks: RankTimes, copies_s: tuple[float, float]) -> None:
    """Moves what of gathers and sums a rank works itself to a part of its own, in place, with FSDP2's copies."""
    work_s = 0.0
    for name, seconds in zip(("gather", "reduce"), ranks.communication.rank_work_s(ranks), strict=True):
        moved_s = min(parts[name], float(seconds[0]))
        parts[name] -= moved_s
        work_s += moved_s
    if work_s + sum(copies_s):
        parts[TRAFFIC_WORK] = work_s + sum(copies_s)
