"""Simulates a layout's pipeline action by action with the prices of its stages."""

from __future__ import annotations

import numpy as np

from meshwright.planner.cost.communication import CommunicationTimes
from meshwright.planner.cost.framework_profile import FrameworkProfile
from meshwright.planner.cost.groups import Machine
from meshwright.planner.cost.layer_sums import LayerCosts, LayerSums
from meshwright.planner.cost.layers import PricedModel
from meshwright.planner.cost.layout_batch import LayoutBatch, PricedJob
from meshwright.planner.cost.stages import cut
from meshwright.schedules.action import Schedule
from meshwright.schedules.costs import ActionCosts
from meshwright.schedules.makespan import makespan_s
from meshwright.schedules.simulate import Simulation, simulate
from meshwright.schedules.spec import known_schedules
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout


def timeline(job: PricedJob, layout: Layout, machine: Machine, engine: FrameworkProfile) -> Simulation | None:
    """Returns the simulated schedule of one step; None without a pipeline.

    Args:
        job: model and batch.
        layout: any.
        machine: the hardware.
        engine: the runtime's profile.
    """
    if layout.degree(Mechanics.STAGES) == 1:
        return None
    schedule = layout.pipeline()
    return simulate(schedule, stage_costs(job, layout, machine, engine, schedule.stages))


def pipeline_s(job: PricedJob, layout: Layout, machine: Machine, engine: FrameworkProfile) -> float:
    """Returns seconds of the simulated schedule of one step of a layout that has a pipeline.

    Args:
        job: model and batch.
        layout: any with ``pp``.
        machine: the hardware.
        engine: the runtime's profile.
    """
    schedule = layout.pipeline()
    return simulated_s(layout, schedule, stage_costs(job, layout, machine, engine, schedule.stages))


def simulated_s(layout: Layout, schedule: Schedule, costs: ActionCosts) -> float:
    """Returns seconds of a layout's schedule at the costs of its actions."""
    # Actions of a known schedule follow rules by which its makespan needs no record of each.
    if layout.schedule in known_schedules() or not layout.schedule:
        return makespan_s(schedule, costs)
    return simulate(schedule, costs).makespan_s


def price_send(job: PricedJob, layout: Layout, machine: Machine, engine: FrameworkProfile) -> tuple[float, float]:
    """Returns the bytes and the seconds of one send of an activation to the next stage."""
    batch = LayoutBatch.from_layouts([layout], len(job.shape.blocks))
    communication = CommunicationTimes(PricedModel(job, batch, machine, engine))
    return float(communication.send_bytes()[0]), float(communication.send_s()[0])


def stage_costs(job: PricedJob, layout: Layout, machine: Machine, engine: FrameworkProfile, stages: int) -> ActionCosts:
    """Returns the seconds of every stage's actions on one micro-batch, and of a send between ranks."""
    engine = engine.for_layout(layout)
    batch = LayoutBatch.from_layouts([layout], len(job.shape.blocks))
    costs = LayerCosts.of(job, batch, machine, engine)
    split = [float(size) for size in layout.split.layers] or None
    # Every stage is summed as if it were alone on a rank.
    sums = LayerSums(costs, [cut(job.shape, stages, 1, tuple(range(stages)), engine.split, split)], np.zeros(1, int))
    forward = np.maximum(sums.forward_busy, sums.forward_host)[0] + engine.runtime.action_s
    backward = np.maximum(sums.backward_busy, sums.backward_host)[0] + engine.runtime.action_s
    return action_costs(
        forward.tolist(), backward.tolist(), sums.weight[0].tolist(), price_send(job, layout, machine, engine)[1]
    )


def action_costs(
    forward: list[float], backward: list[float], weight: list[float], send_s: float, action_s: float = 0.0
) -> ActionCosts:
    """Returns the costs of a pipeline's actions.

    Args:
        forward: seconds of each stage's forward.
        backward: seconds of each stage's full backward.
        weight: seconds of each backward's weight gradients, which a split backward may delay.
        send_s: of an activation to the next stage.
        action_s: that a backward in two halves takes once more.
    """
    weight = [min(weight_s, backward_s) for weight_s, backward_s in zip(weight, backward)]
    return ActionCosts(
        forward_s=tuple(forward),
        backward_s=tuple(backward),
        input_s=tuple(backward_s - weight_s for backward_s, weight_s in zip(backward, weight)),
        weight_s=tuple(weight_s + action_s for weight_s in weight),
        send_s=send_s,
    )
