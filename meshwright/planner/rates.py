"""A layout's price from measured rates: operators of the model, collectives, and what the host takes beside them."""

from __future__ import annotations

import dataclasses

from meshwright.cluster.calibration import Calibration
from meshwright.cluster.traffic import span
from meshwright.planner.choose import Candidate, Question
from meshwright.planner.cost.kernels import move_s
from meshwright.planner.cost.operators import PipelineSeconds, WorkSeconds
from meshwright.planner.cost.prices import LAYER_TRAFFIC, Price
from meshwright.planner.cost.stages import divide
from meshwright.planner.timeline import send_of
from meshwright.schedules.costs import ActionCosts
from meshwright.schedules.makespan import makespan_s
from meshwright.schedules.simulate import simulate
from meshwright.schedules.spec import known_schedules
from meshwright.spec.axis import Mechanics
from meshwright.spec.model_shape import ModelWork

WIDE = 4
"""Bytes of a master weight and of a reduced gradient."""
COMPUTE = ("matmul", "attention", "elementwise")
"""Parts of a step that operators give."""
OPERATOR_PARTS = (*COMPUTE, "recompute", Mechanics.MATRICES.value, Mechanics.TOKENS.value, "host")
"""Parts of a micro-batch that `MeasuredTimes` finds for each layer."""


class MeasuredTimes:
    """What a layout takes on a machine that was measured.

    Args:
        question: what is planned.
        one: the layout, priced by the closed form, whose traffic of data axes and memory stay.
        work: the model's operators on a micro-batch, as ``tp`` splits them.
        found: their seconds.
        calibration: of the machine.
    """

    def __init__(
        self, question: Question, one: Candidate, work: ModelWork, found: PipelineSeconds, calibration: Calibration
    ) -> None:
        self._question, self._layout, self._closed = question, one.layout, one.price
        self._work, self._found, self._calibration = work, found, calibration
        self._layers = sum(work.counts)
        self._serial = calibration.machine.get("kind") == "cpu"
        # What is measured of whole rows holds for a rank's part of their tokens.
        self._share = 1.0 / one.layout.degree(Mechanics.TOKENS)
        shares = one.layout.shares()
        rows = question.job.rows * max(shares) / (sum(shares) * one.layout.microbatches)
        self._share *= rows / work.rows

    def price(self) -> Price:
        """Returns the layout's price."""
        parts = dict(self._closed.parts)
        micro, layout = self._layout.microbatches, self._layout
        ahead, back = self._layer()
        first, last = self._ends()
        whole = _summed([first[0], first[1], last[0], last[1]], [ahead, back], self._layers)
        ranks = layout.degree(Mechanics.STAGES)
        for name in OPERATOR_PARTS:
            parts[name] = micro * whole[name] / ranks
        if self._serial:
            parts["engine"] = 0.0  # among the stages' actions
        else:
            more = sum(parts[name] - self._closed.parts[name] for name in (*COMPUTE, "recompute"))
            parts["host"] = max(0.0, self._closed.parts["host"] - max(0.0, more))
        stages = self._closed.stages
        if ranks > 1:
            piped = self._pipeline_s(ahead, back, first, last)
            parts["send"] = 0.0  # where a send isn't hidden its receiver waits: that is in the bubble
            own = sum(parts[name] for name in (*COMPUTE, "recompute", *LAYER_TRAFFIC, "host"))
            parts["bubble"] = max(0.0, piped - own)
            stages = tuple(
                dataclasses.replace(
                    stage,
                    forward_s=(self._layers * _total(ahead) + _total(first[0]) + _total(last[0])) / ranks,
                    backward_s=(self._layers * _total(back) + _total(first[1]) + _total(last[1])) / ranks,
                )
                for stage in stages
            )
        else:
            parts["bubble"] = 0.0
            forward = self._layers * _total(ahead) + _total(first[0]) + _total(last[0])
            backward = self._layers * _total(back) + _total(first[1]) + _total(last[1])
            stages = tuple(dataclasses.replace(stage, forward_s=forward, backward_s=backward) for stage in stages)
        self._after(parts)
        return dataclasses.replace(self._closed, parts=parts, step_s=sum(parts.values()), stages=stages)

    # -------------------------------------------------------- a micro-batch

    def _layer(self) -> tuple[dict[str, float], dict[str, float]]:
        """Forward and backward of a layer, by part: compute, recompute, traffic inside it, host."""
        layer, calibration = self._found.layer, self._calibration
        ahead, back = self._scaled(layer)
        each = self._layout.degree(Mechanics.STAGES) / (self._layout.microbatches * self._layers)
        near = self._near(self._layout.degree(Mechanics.MATRICES))
        wires = self._sent(self._work.layers[0].sent if self._work.layers else [])
        ahead["tp"] = back["tp"] = (wires if near else self._closed.parts["tp"] * each) / 2
        if self._layout.degree(Mechanics.TOKENS) > 1:
            crossed = self._cp_s() / self._layers
            ahead["cp"], back["cp"] = crossed / 3, 2 * crossed / 3
        mode, share = self._layout.recompute.mode, self._layout.recompute.share(self._layers)
        seen = layer.operators * calibration.host_s("selective_operator")
        if mode == "full":
            # It ends with the last tensor that backward needs: the last product isn't made again.
            last = layer.last_s * self._share
            back["recompute"] = share * (sum(ahead[name] for name in COMPUTE) - last)
            back["host"] += share * ahead["host"]
            back["tp"] += share * ahead["tp"] * near
            cp, tp = self._layout.degree(Mechanics.TOKENS), self._layout.degree(Mechanics.MATRICES)
            back["cp"] += share * ahead["cp"] * self._near(cp, tp)
        elif mode == "selective":
            back["recompute"] = share * ahead["elementwise"]
            back["host"] += share * (ahead["host"] + seen)
            ahead["host"] += share * seen
        micro = calibration.host_s("shard_unit")
        if self._layout.zero:
            back["host"] += micro
        if self._layout.microbatches > 1:
            weights = self._question.job.shape.parameters / (self._layout.degree(Mechanics.MATRICES) * self._layers)
            times = (self._layout.microbatches - 1) / self._layout.microbatches
            back["elementwise"] += times * float(
                calibration.operation_s("add", weights / 6, "float32", self._question.cluster.devices > 1) * 6
            )
        return ahead, back

    def _ends(self) -> tuple[tuple[dict[str, float], dict[str, float]], tuple[dict[str, float], dict[str, float]]]:
        first, last = self._scaled(self._found.first), self._scaled(self._found.last)
        wires = self._sent(self._work.rest.sent) if self._near(self._layout.degree(Mechanics.MATRICES)) else 0.0
        for one in (*first, *last):
            one["tp"] = wires / 4
        last[1]["host"] += self._calibration.host_s("microbatch")
        return first, last

    def _scaled(self, seconds: WorkSeconds) -> tuple[dict[str, float], dict[str, float]]:
        found = []
        for one in (seconds.forward, seconds.backward):
            scaled = {name: self._share * value for name, value in one.items() if name != "host"}
            found.append({**scaled, "host": one["host"] if self._serial else 0.0, "recompute": 0.0, "cp": 0.0})
        return found[0], found[1]

    def _sent(self, sent: list[tuple[str, int, int]]) -> float:
        """Seconds of the collectives that a module was wrapped with."""
        return sum(self._share * self._collective_s(kind, size, degree) for kind, size, degree in sent)

    def _near(self, degree: int, before: int = 1) -> bool:
        """Whether the wires of an axis are known better than the closed form does: on one node, or as measured."""
        nodes = self._crossed(degree, before)[1]
        return self._question.cluster.nodes == 1 or self._calibration.covers("all_reduce", degree, nodes)

    def _crossed(self, degree: int, before: int) -> tuple[int, int, int]:
        """Members of a group on a node, nodes, and groups that share one's cards, for an axis of a ``degree``."""
        fabric = self._question.machine.fabric
        return tuple(int(value) for value in span(before, degree, fabric.devices, self._layout.world))  # type: ignore[return-value]

    def _collective_s(self, kind: str, size: float, degree: int, before: int = 1) -> float:
        """Seconds of a collective that compute waits for, by the table where it was measured."""
        calibration, (inside, nodes, sharing) = self._calibration, self._crossed(degree, before)
        if not calibration.covers(kind, degree, nodes):
            return float(self._question.cluster.seconds(kind, size, inside, nodes, sharing))
        return float(calibration.collective_s(kind, size, degree, nodes, before)) + calibration.host_s("wait")

    def _cp_s(self) -> float:
        """Seconds of a micro-batch's traffic over cp: queries, keys, values and what attention gives, both ways.

        Where keys and values are collected instead, forward gathers and backward scatters these two.
        """
        degree, job, tp = (
            self._layout.degree(Mechanics.TOKENS),
            self._question.job,
            self._layout.degree(Mechanics.MATRICES),
        )
        block = job.shape.blocks[0]
        if not block.heads or not self._near(degree, tp):
            return self._closed.parts["cp"] * self._layout.degree(Mechanics.STAGES) / self._layout.microbatches
        tokens = self._work.rows * self._share * job.sequence  # of a rank: the share has 1/cp in it
        if self._layout.attention == "gather":
            sizes = [degree * WIDE * tokens * width / tp for width in (block.key_width, block.value_width)]
            kinds = ("all_gather", "reduce_scatter")
            return self._layers * sum(self._collective_s(kind, size, degree, tp) for kind in kinds for size in sizes)
        widths = (block.query_width, block.key_width, block.value_width, block.mixed_width)
        each = sum(self._collective_s("all_to_all", WIDE * tokens * width / tp, degree, tp) for width in widths)
        return 2.0 * self._layers * each

    # -------------------------------------------------------- the pipeline

    def _pipeline_s(
        self,
        ahead: dict[str, float],
        back: dict[str, float],
        first: tuple[dict[str, float], dict[str, float]],
        last: tuple[dict[str, float], dict[str, float]],
    ) -> float:
        """Seconds of all micro-batches: the schedule's actions, run one by one.

        Where ranks share cores, a rank that waits leaves its share to the others: the step takes what all ranks
        together keep the cores busy, or the schedule with a core to each rank, whichever is longer.
        """
        question, layout, calibration = self._question, self._layout, self._calibration
        schedule = layout.pipeline()
        split = [float(size) for size in layout.split.layers] or None
        forward, backward, weight = [], [], []
        bounds = divide(question.job.shape, schedule.stages, question.runtime.split, split)
        action = calibration.host_s("action")
        for number, (start, stop) in enumerate(bounds):
            ends = ([first] if number == 0 else []) + ([last] if number == schedule.stages - 1 else [])
            forward.append((stop - start) * _total(ahead) + sum(_total(one[0]) for one in ends) + action)
            backward.append((stop - start) * _total(back) + sum(_total(one[1]) for one in ends) + action)
            products = (stop - start) * back["matmul"] + sum(one[1]["matmul"] for one in ends)
            weight.append(min(products / 2, backward[-1]))
        costs = ActionCosts(
            forward_s=tuple(forward),
            backward_s=tuple(backward),
            input_s=tuple(whole - part for whole, part in zip(backward, weight)),
            weight_s=tuple(part + action for part in weight),
            send_s=self._send_s(),
        )
        known = layout.schedule in known_schedules() or not layout.schedule
        piped = makespan_s(schedule, costs) if known else simulate(schedule, costs).makespan_s
        if calibration.crowd == 1.0:
            return piped
        busy = layout.microbatches * (sum(forward) + sum(backward)) / layout.degree(Mechanics.STAGES)
        return max(piped / calibration.crowd, busy)

    def _send_s(self) -> float:
        """Seconds of an activation from stage to stage, by the table where such neighbours were measured."""
        question, degree = self._question, self._layout.degree(Mechanics.STAGES)
        before = self._layout.world // degree
        nodes = self._crossed(degree, before)[1]
        size, closed_s = send_of(question.job, self._layout, question.machine, question.runtime)
        if not self._calibration.covers("send", degree, nodes):
            return closed_s
        return float(self._calibration.collective_s("send", size, degree, nodes, before))

    # -------------------------------------------------------- after the last backward

    def _after(self, parts: dict[str, float]) -> None:
        """Corrects what follows backward: gradients summed, their norm, the update; and FSDP2's copies."""
        calibration, layout, runtime = self._calibration, self._layout, self._question.runtime.runtime
        busy = self._question.cluster.devices > 1
        owned = parts["optimizer"] / float(move_s(runtime.update_bytes, self._question.machine.device))
        if calibration.optimizer:
            parts["optimizer"] = float(calibration.optimizer_s(owned))
            if calibration.has_operation("sum"):
                parts["optimizer"] += float(calibration.operation_s("sum", owned, "float32", busy))
        if calibration.host:
            layers = self._layers / layout.degree(Mechanics.STAGES)
            parts["step"] = calibration.host_s("step") + layers * calibration.host_s("step_layer")
        weights = self._question.job.shape.parameters / (
            layout.degree(Mechanics.STAGES) * layout.degree(Mechanics.MATRICES)
        )
        size = WIDE * weights / max(1, self._layers // layout.degree(Mechanics.STAGES) + 1)
        pass_s = 2 * WIDE * weights / float(calibration.bandwidth_bytes_per_s(size, "float32", busy))
        once, micro = layout.degree(Mechanics.STAGES) > 1, layout.microbatches
        if layout.zero:
            # A gather copies the shard in and the whole out, a scatter the gradients in and their sum out.
            gathers = 2 * micro if layout.zero == 3 and not once else 1
            scatters = micro if layout.zero >= 2 and not once else 1
            parts["gather"] += 2 * gathers * pass_s
            parts["reduce"] += 2 * scatters * pass_s


def _total(parts: dict[str, float]) -> float:
    return sum(parts.values())


def _summed(ends: list[dict[str, float]], layer: list[dict[str, float]], layers: int) -> dict[str, float]:
    """Seconds by part of a micro-batch of the whole model."""
    return {name: sum(one[name] for one in ends) + layers * sum(one[name] for one in layer) for name in OPERATOR_PARTS}
