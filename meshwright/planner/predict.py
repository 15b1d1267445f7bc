"""Turns a price into a `Prediction`: the quantities that the runtime measures, so that the two can be compared."""

from __future__ import annotations

import dataclasses

from meshwright.planner.candidate import Candidate, Choice
from meshwright.planner.compilation import compiled_reason
from meshwright.planner.explain import against, reason
from meshwright.planner.measured_price import Measure, price_layout, untraced_note
from meshwright.planner.memory import ModelParts, StateSizes
from meshwright.planner.question import Question
from meshwright.planner.rounds import JOIN, OUTER
from meshwright.planner.run_history import TRAFFIC
from meshwright.planner.state_rule import named, predict
from meshwright.planner.traffic import step_collectives
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction

AFTER_PIPELINE = ("gather", "reduce", "offload", "optimizer", "step", "stragglers")
"""Parts of a step outside the pipeline."""


def prediction(question: Question, candidate: Candidate, sizes: StateSizes | ModelParts) -> Prediction:
    """Returns a layout's predicted memory, time and traffic.

    Model state is exact; other memory, time and traffic are the cost model's.

    Args:
        question: what was planned.
        candidate: the layout, priced by `price_layout`.
        sizes: of the model's state.
    """
    state = predict(candidate.layout, sizes, (candidate.rounds or question.rounds).outer_tensors)
    price, microbatches = candidate.price, candidate.layout.microbatches
    other_memory = {name: int(price.most[name]) for name in ("activations", "logits")}
    if OUTER in price.memory and OUTER not in state.memory:
        other_memory[OUTER] = int(price.memory[OUTER])
    parts = {"optimizer": price.parts["optimizer"], "reduce": price.parts["reduce"]}
    # Its copies are part of the update, as it is measured.
    if candidate.layout.offload == "optimizer" or candidate.layout.has_host_masters:
        parts["optimizer"] += price.parts["offload"]
    if candidate.layout.degree(Mechanics.STAGES) > 1:
        after_pipeline_s = sum(price.parts[name] for name in AFTER_PIPELINE)
        parts["pipeline"] = price.step_s - price.parts.get(JOIN, 0.0) - after_pipeline_s
    else:
        (stage,) = price.stages
        parts["forward"], parts["backward"] = microbatches * stage.forward_s, microbatches * stage.backward_s
    # A run's medians are of steps without a join, which most are.
    step_parts = {name: seconds for name, seconds in price.parts.items() if name != JOIN}
    unscaled_parts = question.history.of(candidate.layout).inverse.of_parts(step_parts)
    step_s, factor = price.step_s - price.parts.get(JOIN, 0.0), question.time_spread.factor(question.evidence)
    return Prediction(
        memory={**state.memory, **other_memory},
        peak=int(price.allocated),
        formula=state.formula,
        step_s=step_s,
        step_range_s=(step_s / factor, step_s * factor),
        fits=question.chance_candidate_fits(candidate),
        parts=parts,
        traffic=_traffic(question, candidate.layout, sizes),
        host=int(price.host),
        learned=sum(step_parts.values()) / sum(unscaled_parts.values()),
        waits_s=sum(unscaled_parts.get(name, 0.0) for name in TRAFFIC),
        flops=question.job.step_flops,
        join_s=price.parts.get(JOIN, 0.0),
        joules_per_token=candidate.joules_per_token,
    )


def _traffic(question: Question, layout: Layout, sizes: StateSizes | ModelParts) -> dict[str, int]:
    """Returns bytes that rank 0 sends in a step, by axis; empty where only counts of parameters are known."""
    if not isinstance(sizes, ModelParts):
        return {}
    return step_collectives(question.job, layout, sizes).sent()


def named_plan(question: Question, layout: Layout, sizes: StateSizes | ModelParts, measure: Measure) -> Plan:
    """Returns the plan for a layout that the user named, priced like any other."""
    whole_backward = whole_backward_reason(layout, sizes)
    question = dataclasses.replace(question, job=dataclasses.replace(question.job, splits_backward=not whole_backward))
    candidate = price_layout(question, layout, measure)
    notes = (question.history.note(layout), untraced_note(question, layout, measure))
    return Plan(
        layout=layout,
        prediction=prediction(question, candidate, sizes),
        ranks=question.cluster.devices,
        reason="; ".join(filter(None, (named(layout), whole_backward, *notes))),
        outer=_outer_settings(candidate),
    )


def whole_backward_reason(layout: Layout, sizes: StateSizes | ModelParts) -> str:
    """Returns why the model's backward isn't split as the schedule asks, in a clause; empty where that isn't so."""
    layer_graph = sizes.layer_graph if isinstance(sizes, ModelParts) else None
    if layer_graph is None or not layer_graph.whole_backward or not layout.pipeline().splits_backward:
        return ""
    return f"schedule={layout.schedule} runs each backward whole: {layer_graph.whole_backward}"


def chosen_plan(question: Question, choice: Choice, finalist_index: int, sizes: StateSizes | ModelParts) -> Plan:
    """Returns the plan for one of a choice's best layouts.

    Args:
        question: what was planned.
        choice: the answer.
        finalist_index: of the layout in `Choice.best`.
        sizes: of the model's state.
    """
    candidate = choice.best[finalist_index]
    rejected = {
        str(finalist.layout): against(finalist, candidate, question.tie_tolerance)
        for finalist in choice.best
        if finalist is not candidate
    }
    return Plan(
        layout=candidate.layout,
        prediction=prediction(question, candidate, sizes),
        ranks=question.cluster.devices,
        reason="; ".join(
            filter(
                None,
                (
                    reason(question, choice, candidate),
                    compiled_reason(question, candidate.layout),
                    question.history.note(candidate.layout),
                ),
            )
        ),
        rejected=rejected,
        outer=_outer_settings(candidate),
    )


def _outer_settings(candidate: Candidate) -> dict[str, int | str]:
    """Returns how a layout's islands join; nothing without several."""
    return candidate.rounds.settings if candidate.rounds is not None else {}
