"""The walls that a model meets on a cluster: compute, memory, network; and which of them is nearest.

Each resource is doubled alone and the plan made again: what that gains says how much of the step stands at its wall.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from meshwright.errors import ClusterError
from meshwright.planner.budgets import cluster_sizes
from meshwright.planner.capacity import largest_that
from meshwright.planner.cases import Fits, PlannedCase, Solve, solve_case
from meshwright.planner.cost.prices import LAYER_TRAFFIC
from meshwright.planner.question import Question
from meshwright.planner.utilization import data_sheet_flops
from meshwright.planner.what_if import changed_cluster

STATE_BYTES = 16
"""Bytes of a parameter's state in float32: weight, gradient, two moments of Adam. Source: Rajbhandari et al., ZeRO
(2020), 3.1, whose 16 counts a 2-byte weight and gradient beside 12 bytes of float32."""
SUMMED_BYTES = 6.0
"""Bytes a parameter that data ranks send a step: gradients scattered in float32, weights gathered in 2 bytes."""
RESOURCES = {"flops": "compute", "bandwidth": "memory bandwidth", "memory": "memory", "inside": "links inside a node",
             "nic": "network", "latency": "latency"}  # fmt: skip
"""Figures that are doubled (latency: halved), with the name of their wall."""
TRAFFIC_PARTS = (*LAYER_TRAFFIC, "send", "gather", "reduce")
"""Parts of a step in which the devices wait for links."""
COMPUTE_PARTS = ("matmul", "attention", "elementwise", "recompute")
"""Parts of a step in which the devices compute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Walls:
    """Where the time and the memory of a plan go, and what more of each resource would bring."""

    today: PlannedCase
    """The plan."""
    step_flops: float
    """Model FLOPs of a step, without what is recomputed."""
    peak_s: float
    """Seconds that these take at the data sheet's dense peak of all devices."""
    compute_s: float
    """Seconds of the plan's step in which devices compute."""
    traffic_s: float
    """Seconds of it in which they wait for links."""
    state_bytes: float
    """Of the whole model's parameters, gradients and optimizer: `STATE_BYTES` a parameter."""
    memory_bytes: float
    """Of all devices together."""
    fewest_devices: int
    """Whole nodes of this kind, in 2^a 3^b nodes, that hold a training step of this batch on the devices."""
    hidden_tokens: float | None
    """Tokens a device and step below which sums over the network outlast compute; None without a network."""
    tokens_per_device: float
    """Of this batch."""
    doubled: tuple[PlannedCase, ...]
    """The plan with each resource doubled alone (latency halved)."""

    @property
    def nearest(self) -> str:
        """Name of the wall whose resource brings most when it is doubled."""
        gains = self.gains
        return max(gains, key=lambda name: gains[name]) if gains else ""

    @property
    def gains(self) -> dict[str, float]:
        """By wall: tokens a second with the resource doubled, over today's, less one."""
        if self.today.best is None:
            return {}
        rate = self.today.best.tokens_per_s
        return {case.name: case.best.tokens_per_s / rate - 1 for case in self.doubled if case.best}

    @property
    def is_met(self) -> bool:
        """Whether the question has an answer, as always where it isn't refused."""
        return True

    def to_json(self) -> dict[str, object]:
        """Returns the answer as plain values."""
        names = [item.name for item in dataclasses.fields(self) if item.name not in ("today", "doubled")]
        return {name: getattr(self, name) for name in names} | {
            "nearest": self.nearest,
            "gains": self.gains,
            "today": self.today.to_json(),
            "doubled": [case.to_json() for case in self.doubled],
        }


def find_walls(question: Question, solve: Solve, fits: Fits) -> Walls:
    """Plans today's question, and once more with each resource doubled.

    Args:
        question: its cluster is described by figures, not measured.
        solve: plans.
        fits: whether it finds a plan.

    Raises:
        PlanError: when nothing fits.
        ClusterError: for a cluster whose times are measured.
    """
    best = solve(question)
    job, cluster = question.job, question.cluster
    doubled = []
    for figure, name in RESOURCES.items():
        factor = 0.5 if figure == "latency" else 2.0
        try:
            changed = changed_cluster(cluster, {figure: factor})
        except ClusterError:
            if cluster.calibration is not None:
                raise
            continue  # a cluster without a network, or with one device a node
        doubled.append(solve_case(name, dataclasses.replace(question, cluster=changed), solve))
    parts, tokens = best.price.parts, job.rows * job.sequence
    step_flops = job.shape.train_flops_per_token(job.sequence) * tokens
    return Walls(
        today=PlannedCase(name="today", question=question, best=best),
        step_flops=step_flops,
        peak_s=step_flops / data_sheet_flops(cluster, job.dtype),
        compute_s=sum(parts.get(name, 0.0) for name in COMPUTE_PARTS),
        traffic_s=sum(parts.get(name, 0.0) for name in TRAFFIC_PARTS),
        state_bytes=float(STATE_BYTES * job.shape.parameters),
        memory_bytes=float(sum(group.node.device.memory_bytes * group.devices for group in cluster.groups)),
        fewest_devices=_fewest_devices(question, fits),
        hidden_tokens=hidden_tokens(question),
        tokens_per_device=tokens / cluster.devices,
        doubled=tuple(doubled),
    )


def _fewest_devices(question: Question, fits: Fits) -> int:
    """Returns the fewest devices of `cluster_sizes` that hold the job without state in host memory; 0 for none."""
    sizes = cluster_sizes(question)
    limits = {**question.limits, "offloads": ("none",), "fixed": {}}

    def too_few(count: int) -> bool:
        smaller = question.cluster.restricted(sizes[count - 1])
        return not fits(dataclasses.replace(question, cluster=smaller, limits=limits))

    refused = largest_that(too_few, 1, len(sizes))
    return sizes[refused] if refused < len(sizes) else 0


def hidden_tokens(question: Question) -> float | None:
    """Returns the tokens a device and step below which data-parallel sums over the network outlast compute.

    A node of g devices computes 6 N T g operations at its share of the peak, g P, and sends `SUMMED_BYTES` N bytes
    over its cards' rate R: T = SUMMED_BYTES P / (6 R). A mixture computes with the weights that a token visits and
    sends all.

    Source: Austin et al., How to Scale Your Model (2025), part 5: FSDP is bound by compute above C / W tokens a chip.
    """
    fabric, job = question.cluster.fabric(), question.job
    if fabric.outside is None or question.cluster.domain >= question.cluster.devices:
        return None
    device = question.cluster.device
    reached = device.peak(job.dtype) * device.share(job.dtype)
    network = fabric.outside.rate * fabric.cards
    sent_bytes = SUMMED_BYTES * job.shape.parameters
    return sent_bytes * reached / (6.0 * job.shape.matmul_parameters * network)
