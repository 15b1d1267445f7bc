"""The pipeline of a layout, simulated action by action with the times that were priced for its stages."""

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
        machine: what it runs on.
        engine: how it is run.
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
        machine: what it runs on.
        engine: how it is run.
    """
    schedule = layout.pipeline()
    spent = makespan_s if layout.schedule in known_schedules() or not layout.schedule else _simulated_s
    return spent(schedule, stage_costs(job, layout, machine, engine, schedule.stages))


def send_of(job: PricedJob, layout: Layout, machine: Machine, engine: FrameworkProfile) -> tuple[float, float]:
    """Returns the bytes of one activation from stage to stage, and the seconds that it takes."""
    wires = CommunicationTimes(
        PricedModel(job, LayoutBatch.from_layouts([layout], len(job.shape.blocks)), machine, engine)
    )
    return _one(wires.send_bytes()), _one(wires.send_s())


def _simulated_s(schedule: Schedule, costs: ActionCosts) -> float:
    return simulate(schedule, costs).makespan_s


def stage_costs(job: PricedJob, layout: Layout, machine: Machine, engine: FrameworkProfile, stages: int) -> ActionCosts:
    """Returns the seconds of every stage's actions on one micro-batch, and of a send between ranks."""
    engine = engine.for_layout(layout)
    degrees = LayoutBatch.from_layouts([layout], len(job.shape.blocks))
    model = PricedModel(job, degrees, machine, engine)
    split = [float(size) for size in layout.split.layers] or None
    known: dict[int, LayerCost] = {}
    forward, backward, weight = [], [], []
    for number, (start, stop) in enumerate(divide(job.shape, stages, engine.split, split)):
        parts = []
        for block in job.shape.blocks[start:stop]:
            if id(block) not in known:
                known[id(block)] = model.layer(block)
            parts.append(known[id(block)])
        parts += [embedding(model)] if number == 0 else []
        parts += [head(model)] if number == stages - 1 else []
        forward.append(_seconds([max(_one(part.forward.busy), _one(part.forward.host)) for part in parts], engine))
        backward.append(_seconds([max(_one(part.backward.busy), _one(part.backward.host)) for part in parts], engine))
        # Of the two products of backward one makes the weights' gradients; a split backward may put it off.
        weight.append(min(sum(_one(part.backward.matmul) for part in parts) / 2, backward[-1]))
    return ActionCosts(
        forward_s=tuple(forward),
        backward_s=tuple(backward),
        input_s=tuple(whole - part for whole, part in zip(backward, weight)),
        weight_s=tuple(weight),
        send_s=_one(CommunicationTimes(model).send_s()),
    )


def _seconds(parts: list[float], engine: FrameworkProfile) -> float:
    return sum(parts) + engine.runtime.action_s + engine.runtime.host_microbatch_s / 2


def _one(value: object) -> float:
    """The number of an array of one layout."""
    return float(getattr(value, "ravel", lambda: [value])()[0])  # type: ignore[arg-type]
