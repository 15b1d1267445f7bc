"""A layout that runs today: its utilisation by the step time that was measured, and where it loses against the plan."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.errors import PlanError
from meshwright.planner.candidate import Candidate
from meshwright.planner.cases import PlannedCase, Solve, candidate_json
from meshwright.planner.device_kinds import kinds_of
from meshwright.planner.explain import NAMES, memory_sentence
from meshwright.planner.measured_price import Measure, price_layout
from meshwright.planner.question import Question
from meshwright.planner.unequal import price_unequal
from meshwright.planner.utilization import data_sheet_flops, model_flops_per_s
from meshwright.spec.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRun:
    """A measured step of a layout beside what is predicted of it and of the plan."""

    question: Question
    """Model, batch and cluster of the run."""
    predicted: Candidate
    """The layout as the planner prices it."""
    plan: PlannedCase
    """The best layout."""
    measured_s: float
    """Seconds of a step, measured."""
    tokens_per_s: float
    """Measured."""
    flops_per_device: float
    """Measured model FLOP/s of a device."""
    mfu: float
    """Their share of the data sheet's dense peak."""
    shortage: str
    """Why the layout shouldn't fit; empty where it does."""

    @property
    def losses(self) -> dict[str, float]:
        """Seconds that the layout takes longer than the plan, by part in words; ``unpredicted`` is the rest.

        They add up to the measured step less the plan's.
        """
        if self.plan.best is None:
            return {}
        ours, best = self.predicted.price.parts, self.plan.best.price.parts
        gaps = {NAMES[name]: ours.get(name, 0.0) - best.get(name, 0.0) for name in NAMES}
        return gaps | {"unpredicted": self.measured_s - self.predicted.price.step_s}

    @property
    def is_met(self) -> bool:
        """Whether the question has an answer, as always where it isn't refused."""
        return True

    def to_json(self) -> dict[str, object]:
        """Returns the answer as plain values."""
        names = ("measured_s", "tokens_per_s", "flops_per_device", "mfu", "shortage")
        return {name: getattr(self, name) for name in names} | {
            "predicted": candidate_json(self.predicted),
            "plan": self.plan.to_json(),
            "losses_s": self.losses,
        }


def measure_run(
    question: Question, layout: Layout, measured_s: float, solve: Solve, measure: Measure | None
) -> MeasuredRun:
    """Returns the utilisation of a layout that was timed, and what the plan does otherwise.

    Args:
        question: model, batch and cluster of the run.
        layout: that runs.
        measured_s: seconds of a step.
        solve: plans.
        measure: returns the model's operators; None where only its sizes are known.

    Raises:
        PlanError: when the layout doesn't divide the devices or the batch, or no devices are that fast.
    """
    predicted = _price(question, layout, measure)
    tokens = question.job.rows * question.job.sequence
    flops = model_flops_per_s(question.job, measured_s)
    peak_flops = data_sheet_flops(question.cluster, question.job.dtype)
    if flops > peak_flops:
        raise PlanError(
            f"measured_s = {measured_s:g} is {flops / peak_flops:.0%} of the dense peak of {question.cluster} in "
            f"{question.job.dtype}; a step of {question.job.rows} rows of {question.job.sequence} tokens takes at "
            f"least {measured_s * flops / peak_flops:.3g} s there: give the batch and cluster that were measured"
        )
    fits = predicted.price.peak <= question.usable_bytes
    return MeasuredRun(
        question=question,
        predicted=predicted,
        plan=PlannedCase(name="plan", question=question, best=solve(question)),
        measured_s=measured_s,
        tokens_per_s=tokens / measured_s,
        flops_per_device=flops / question.cluster.devices,
        mfu=flops / peak_flops,
        shortage="" if fits else memory_sentence(question, predicted),
    )


def _price(question: Question, layout: Layout, measure: Measure | None) -> Candidate:
    if question.cluster.uniform:
        return price_layout(question, layout, measure)
    candidate = price_unequal(question, kinds_of(question.cluster), layout)
    if candidate is None:
        raise PlanError(f"{layout} doesn't fit {question.cluster}; name the layout that runs there")
    return candidate
