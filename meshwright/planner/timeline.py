"""Simulates a layout's pipeline action by action with the prices of its stages."""

from __future__ import annotations

import dataclasses

import numpy as np

from meshwright.planner.cost.communication import CommunicationTimes
from meshwright.planner.cost.framework_profile import FrameworkProfile
from meshwright.planner.cost.groups import Machine
from meshwright.planner.cost.layer_sums import LayerCosts, LayerSums
from meshwright.planner.cost.layout_batch import Array, LayoutBatch, PricedJob
from meshwright.planner.cost.pipeline_floor import FILLING_ROUNDS, round_micro_batches
from meshwright.planner.cost.priced_model import PricedModel
from meshwright.planner.cost.ranks import RankTimes
from meshwright.planner.cost.stages import cut_stages
from meshwright.schedules.action import Schedule
from meshwright.schedules.costs import ActionCosts
from meshwright.schedules.makespan import makespan_s
from meshwright.schedules.simulate import Simulation, simulate
from meshwright.schedules.spec import known_schedules
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout


def schedule_of(job: PricedJob, layout: Layout) -> Schedule:
    """Returns the actions that the runtime runs: each backward unsplit where the model's can't come in halves."""
    schedule = layout.pipeline()
    return schedule if job.splits_backward else schedule.unsplit()


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
    return simulate(schedule_of(job, layout), _closed_stage_costs(job, layout, machine, engine))


def _closed_stage_costs(job: PricedJob, layout: Layout, machine: Machine, engine: FrameworkProfile) -> ActionCosts:
    """Returns the costs by which the layout is priced (`cost.pipeline_simulation`)."""
    engine = engine.for_layout(layout)
    batch = LayoutBatch.from_layouts([layout], len(job.shape.blocks))
    ranks = RankTimes(LayerCosts.of(job, batch, machine, engine))
    passes = ranks.stage_passes(ranks.cut_of(0), np.zeros(1, int))
    forward, backward, weight = (seconds[0] for seconds in passes[:3])
    # What a send takes beside the work of both ranks, which is among their passes.
    inside_s, outside_s = (float(seconds[0]) for seconds in ranks.hops_s())
    hop_s = inside_s if ranks.stage_sends_s()[0][0] > 0 else outside_s
    return _action_costs(forward, backward, weight, hop_s, engine.runtime.action_s)


def _action_costs(forward: Array, backward: Array, weight: Array, send_s: float, action_s: float) -> ActionCosts:
    """Returns costs from the seconds of each stage, (S,); a backward in two halves takes ``action_s`` once more."""
    return ActionCosts(
        forward_s=tuple(forward.tolist()),
        backward_s=tuple(backward.tolist()),
        input_s=tuple((backward - weight).tolist()),
        weight_s=tuple((weight + action_s).tolist()),
        send_s=send_s,
    )


def simulated_s(job: PricedJob, layout: Layout, costs: ActionCosts) -> float:
    """Returns seconds of a layout's schedule at the costs of its actions.

    Of a known schedule only as many micro-batches are simulated as it needs to fill: once full, each further round of
    as many micro-batches as there are ranks takes as long as the one before it.
    """
    if layout.schedule and layout.schedule not in known_schedules():
        return simulate(schedule_of(job, layout), costs).makespan_s
    ranks, microbatches = layout.degree(Mechanics.STAGES), layout.microbatches
    rounds = max(0, microbatches // ranks - FILLING_ROUNDS)
    if rounds == 0:
        return makespan_s(schedule_of(job, layout), costs)
    size = round_micro_batches(ranks, microbatches)
    # Actions of a known schedule follow rules by which its makespan needs no record of each.
    simulated = [
        makespan_s(schedule_of(job, dataclasses.replace(layout, microbatches=microbatches - left_out * size)), costs)
        for left_out in (rounds, rounds + 1)
    ]
    return simulated[0] + rounds * (simulated[0] - simulated[1])


def price_send(job: PricedJob, layout: Layout, machine: Machine, engine: FrameworkProfile) -> tuple[float, float]:
    """Returns the bytes and the seconds of one send of an activation to the next stage."""
    batch = LayoutBatch.from_layouts([layout], len(job.shape.blocks))
    communication = CommunicationTimes(PricedModel(job, batch, machine, engine))
    return float(communication.send_bytes()[0]), float(communication.send_s()[0])


def stage_costs(costs: LayerCosts, layout: Layout, send_s: float, action_s: float) -> ActionCosts:
    """Returns the seconds of every stage's actions on one micro-batch, and of a send between ranks.

    Args:
        costs: of the model's layers and ends on this layout alone.
        layout: with ``pp``.
        send_s: of an activation to the next stage.
        action_s: what the engine spends on an action beside computing; a backward in two halves takes it twice.
    """
    stages = layout.pipeline().stages
    split = [float(size) for size in layout.split.layers] or None
    # Every stage is summed as if it were alone on a rank.
    stage_cut = cut_stages(costs.model.job.shape, stages, 1, tuple(range(stages)), costs.model.engine.split, split)
    sums = LayerSums(costs, [stage_cut], np.zeros(1, int))
    forward = sums.with_host_s(sums.forward_busy, sums.forward_host)[0] + action_s
    backward = sums.with_host_s(sums.backward_busy, sums.backward_host)[0] + action_s
    weight = np.minimum(sums.weight[0], backward)
    return _action_costs(forward, backward, weight, send_s, action_s)
