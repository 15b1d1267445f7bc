"""What training on so many tokens takes: steps, days, device hours, dollars, energy; and the cheapest cluster for it.

Days are those of steps without faults, evaluation and checkpoints. Energy is that of the devices under load, without
hosts, switches and cooling.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.errors import PlanError
from meshwright.planner.cases import PlannedCase, Solve, solve_case
from meshwright.planner.question import Question

DAY_S = 86400.0
"""Seconds of a day."""
WATT_HOURS_OF_KWH = 1000.0
"""Watt hours of a kilowatt hour."""
GIVE_UP_FACTOR = 1.25
"""Share of the cheapest budget's device hours at which larger clusters of a kind aren't asked any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Training on so many tokens on one cluster."""

    case: PlannedCase
    """The cluster and its plan."""
    tokens: float
    """To train on."""
    steps: int = 0
    """Optimizer steps; 0 where nothing fits, like all that follows."""
    days: float = 0.0
    """Days of these steps."""
    device_hours: float = 0.0
    """Hours of all devices together."""
    dollars: float | None = None
    """At the catalogue's price; None where it isn't known."""
    kwh: float | None = None
    """Energy of the devices under load; None where their power isn't known."""

    def to_json(self) -> dict[str, object]:
        """Returns the budget as plain values."""
        fields = {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.name != "case"}
        return fields | {"case": self.case.to_json()}


def make_budget(case: PlannedCase, tokens: float) -> Budget:
    """Returns what training on some tokens takes by a case's plan.

    Args:
        case: a cluster and its plan; without one the budget has no figures.
        tokens: to train on; the last step is a full one.
    """
    if case.best is None:
        return Budget(case=case, tokens=tokens)
    cluster, job = case.question.cluster, case.question.job
    steps = math.ceil(tokens / (job.rows * job.sequence))
    seconds = steps * case.best.price.step_s
    hours = seconds / 3600.0
    return Budget(
        case=case,
        tokens=tokens,
        steps=steps,
        days=seconds / DAY_S,
        device_hours=hours * cluster.devices,
        dollars=None if cluster.price_per_hour is None else cluster.price_per_hour * hours,
        kwh=cluster.watts * hours / WATT_HOURS_OF_KWH if cluster.watts else None,
    )


def smallest_devices(question: Question, tokens: float, days: float) -> float:
    """Returns a number of devices below which no layout can meet a deadline: all products at the dense peak.

    Args:
        question: model and cluster.
        tokens: to train on.
        days: the deadline.

    Source: 6 N operations a token, attention left out; Kaplan et al., Scaling laws (2020), 2.1.
    """
    flops = 6.0 * question.job.shape.matmul_parameters * tokens
    fastest = max(group.node.device.peak(question.job.dtype) for group in question.cluster.groups)
    return flops / (fastest * days * DAY_S)


def cluster_sizes(question: Question) -> list[int]:
    """Returns the numbers of devices to ask: 2^a 3^b whole nodes, or devices of a single node, and all.

    Of several kinds together only all are asked.

    Degrees have to divide the devices and the batch, which other numbers of nodes do badly.
    """
    cluster = question.cluster
    if not cluster.uniform:
        return [cluster.devices]
    node = cluster.node_devices if cluster.nodes > 1 else 1
    most = max(1, cluster.devices // node)
    powers_of_3 = [3**power for power in range(most.bit_length())]
    counts = {2**power * odd for power in range(most.bit_length()) for odd in powers_of_3 if 2**power * odd <= most}
    return sorted({min(cluster.devices, count * node) for count in counts} | {cluster.devices})


def budgets_within(
    question: Question, tokens: float, days: float, sizes: Sequence[int], solve: Solve
) -> tuple[Budget, ...]:
    """Returns the budget of each number of devices that may meet a deadline, the smallest first.

    Asking ends once a size that meets it is known and larger ones have clearly more device hours.

    Args:
        question: its cluster has the most devices.
        tokens: to train on.
        days: the deadline.
        sizes: numbers of devices, the smallest first.
        solve: plans.
    """
    least = smallest_devices(question, tokens, days)
    promising = [size for size in sizes if size >= least] or list(sizes[-1:])
    budgets: list[Budget] = []
    for size in promising:
        smaller = dataclasses.replace(question, cluster=question.cluster.restricted(size))
        budgets.append(make_budget(solve_case(f"{size}x{_kinds(question)}", smaller, solve), tokens))
        cheapest = min((item.device_hours for item in budgets if meets(item, days)), default=math.inf)
        if budgets[-1].device_hours > GIVE_UP_FACTOR * cheapest:
            break
    return tuple(budgets)


def _kinds(question: Question) -> str:
    return "+".join(question.cluster.kinds)


def meets(budget: Budget, days: float) -> bool:
    """Returns whether a budget has a plan that ends within ``days``; 0 days is no deadline."""
    return budget.case.best is not None and (not days or budget.days <= days)


def cheapest_budget(budgets: Sequence[Budget], days: float, objective: str) -> Budget | None:
    """Returns the cheapest budget that meets a deadline, or None.

    Args:
        budgets: of any clusters.
        days: the deadline; 0 for none.
        objective: ``energy`` compares energy; else dollars are compared, or device hours of one kind without a price.

    Raises:
        PlanError: when kinds of devices differ and the price or power of one isn't known.
    """
    meeting = [item for item in budgets if meets(item, days)]
    field = "kwh" if objective == "energy" else "dollars"
    unknown = [item for item in meeting if getattr(item, field) is None]
    kinds = {tuple(item.case.question.cluster.kinds) for item in meeting}
    if unknown and len(kinds) > 1:
        missing = {"kwh": "power", "dollars": "price"}[field]
        key = {"kwh": "watts", "dollars": "price_per_hour"}[field]
        raise PlanError(
            f"no {missing} is known for {unknown[0].case.question.cluster}, so it can't be compared with other "
            f"devices; give {key} in the cluster's file, or name one cluster"
        )
    if unknown:
        field = "device_hours"
    return min(meeting, key=lambda item: float(getattr(item, field)), default=None)
