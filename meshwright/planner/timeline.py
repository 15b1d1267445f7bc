"""Simulates a layout's pipeline action by action with the prices of its stages."""

from __future__ import annotations

from meshwright.planner.cost.communication import CommunicationTimes
from meshwright.planner.cost.embedding_and_head import embedding, head
from meshwright.planner.cost.framework_profile import FrameworkProfile
from meshwright.planner.cost.groups import Machine
from meshwright.planner.cost.layers import LayerCost, PricedModel
from meshwright.planner.cost.layout_batch import LayoutBatch, PricedJob
from meshwright.planner.cost.stages import divide
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
    costs = stage_costs(job, layout, machine, engine, schedule.stages)
    return simulate(schedule, costs)


def pipeline_s(job: PricedJob, layout: Layout, machine: Machine, engine: FrameworkProfile) -> float:
    """Returns seconds of the simulated schedule of one step of a layout that has a pipeline.

    Args:
        job: model and batch.
        layout: any with ``pp``.
        machine: the hardware.
        engine: the runtime's profile.
    """
    schedule = layout.pipeline()
    makespan = makespan_s if layout.schedule in known_schedules() or not layout.schedule else _simulated_s
    return makespan(schedule, stage_costs(job, layout, machine, engine, schedule.stages))


def send_of(job: PricedJob, layout: Layout, machine: Machine, engine: FrameworkProfile) -> tuple[float, float]:
    """Returns the bytes and the seconds of one send of an activation to the next stage."""
    communication = CommunicationTimes(
        PricedModel(job, LayoutBatch.from_layouts([layout], len(job.shape.blocks)), machine, engine)
    )
    return _scalar(communication.send_bytes()), _scalar(communication.send_s())


def _simulated_s(schedule: Schedule, costs: ActionCosts) -> float:
    return simulate(schedule, costs).makespan_s


def stage_costs(job: PricedJob, layout: Layout, machine: Machine, engine: FrameworkProfile, stages: int) -> ActionCosts:
    """Returns the seconds of every stage's actions on one micro-batch, and of a send between ranks."""
    engine = engine.for_layout(layout)
    batch = LayoutBatch.from_layouts([layout], len(job.shape.blocks))
    model = PricedModel(job, batch, machine, engine)
    split = [float(size) for size in layout.split.layers] or None
    cost_by_block: dict[int, LayerCost] = {}
    forward, backward, weight = [], [], []
    for stage, (start, stop) in enumerate(divide(job.shape, stages, engine.split, split)):
        layer_costs = []
        for block in job.shape.blocks[start:stop]:
            if id(block) not in cost_by_block:
                cost_by_block[id(block)] = model.layer(block)
            layer_costs.append(cost_by_block[id(block)])
        layer_costs += [embedding(model)] if stage == 0 else []
        layer_costs += [head(model)] if stage == stages - 1 else []
        forward.append(
            _pass_s(
                [max(_scalar(layer_cost.forward.busy), _scalar(layer_cost.forward.host)) for layer_cost in layer_costs],
                engine,
            )
        )
        backward.append(
            _pass_s(
                [
                    max(_scalar(layer_cost.backward.busy), _scalar(layer_cost.backward.host))
                    for layer_cost in layer_costs
                ],
                engine,
            )
        )
        # One of backward's two products computes weight gradients; a split backward may delay it.
        weight.append(min(sum(_scalar(layer_cost.backward.matmul) for layer_cost in layer_costs) / 2, backward[-1]))
    return ActionCosts(
        forward_s=tuple(forward),
        backward_s=tuple(backward),
        input_s=tuple(pass_s - layer_cost for pass_s, layer_cost in zip(backward, weight)),
        weight_s=tuple(weight),
        send_s=_scalar(CommunicationTimes(model).send_s()),
    )


def _pass_s(parts: list[float], engine: FrameworkProfile) -> float:
    return sum(parts) + engine.runtime.action_s + engine.runtime.host_microbatch_s / 2


def _scalar(value: object) -> float:
    """Returns the value of one layout's array, (1,) or a scalar, as a float."""
    return float(getattr(value, "ravel", lambda: [value])()[0])  # type: ignore[arg-type]
