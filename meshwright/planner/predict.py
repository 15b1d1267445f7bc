"""A price as the treaty has it: in the words in which the runtime measures, so that the two stand side by side."""

from __future__ import annotations

from meshwright.planner.choose import AFTER_PIPELINE, Candidate, Choice, Question
from meshwright.planner.explain import against, reason
from meshwright.planner.measured_price import Measure, priced
from meshwright.planner.memory import ModelParts, StateSizes
from meshwright.planner.state_rule import named, predict
from meshwright.planner.traffic import step_collectives
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction


def prediction(question: Question, one: Candidate, sizes: StateSizes | ModelParts) -> Prediction:
    """Returns what a layout is expected to take.

    State is priced exactly, by the runtime's own accounts; what else a rank holds, time and traffic by the cost model.

    Args:
        question: what was planned.
        one: the layout with its price, as `priced` has it.
        sizes: of the model's state.
    """
    state = predict(one.layout, sizes)
    price, micro = one.price, one.layout.microbatches
    rest = {name: int(price.memory[name]) for name in ("activations", "logits") if name in price.memory}
    parts = {"optimizer": price.parts["optimizer"], "reduce": price.parts["reduce"]}
    if one.layout.offload == "optimizer":  # its copies are part of the update, as it is measured
        parts["optimizer"] += price.parts["offload"]
    if one.layout.degree(Mechanics.STAGES) > 1:
        after = sum(price.parts[name] for name in AFTER_PIPELINE)
        parts["pipeline"] = price.step_s - after
    else:
        (stage,) = price.stages
        parts["forward"], parts["backward"] = micro * stage.forward_s, micro * stage.backward_s
    return Prediction(
        memory={**state.memory, **rest},
        formula=state.formula,
        step_s=price.step_s,
        parts=parts,
        traffic=_traffic(question, one.layout, sizes),
        host=int(price.host),
        learned=question.lesson.of(one.layout),
    )


def _traffic(question: Question, layout: Layout, sizes: StateSizes | ModelParts) -> dict[str, int]:
    """Bytes that rank 0 sends in a step, by axis; none where only numbers of weights are known."""
    if not isinstance(sizes, ModelParts):
        return {}
    return step_collectives(question.job, layout, sizes).sent()


def named_plan(question: Question, layout: Layout, sizes: StateSizes | ModelParts, measure: Measure) -> Plan:
    """Returns the plan for a layout that the user named, priced like any other."""
    one = priced(question, layout, measure)
    ranks = question.cluster.devices
    return Plan(layout=layout, prediction=prediction(question, one, sizes), ranks=ranks, reason=named(layout))


def chosen_plan(question: Question, choice: Choice, at: int, sizes: StateSizes | ModelParts) -> Plan:
    """Returns the plan for one of the best.

    Args:
        question: what was planned.
        choice: the answer.
        at: which of its best is taken: the first that the model allows.
        sizes: of the model's state.
    """
    one = choice.best[at]
    others = {str(other.layout): against(other, one, question.same) for other in choice.best if other is not one}
    return Plan(
        layout=one.layout,
        prediction=prediction(question, one, sizes),
        ranks=question.cluster.devices,
        reason=reason(question, choice),
        rejected=others,
    )
