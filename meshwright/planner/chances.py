"""The chances of a plan: that its step takes about so long, that it fits, that no other layout is faster."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from meshwright.planner.candidate import Candidate, Choice
from meshwright.planner.question import Question
from meshwright.planner.uncertainty import TIE_CHANCE
from meshwright.spec.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateChances:
    """How sure the price of one layout is."""

    step_low_s: float
    """Seconds of a step that it takes longer than, and `step_high_s` less than, with `uncertainty.INTERVAL`."""
    step_high_s: float
    fits: float
    """Chance that its ranks fit their devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceChances:
    """How sure the choice among the layouts that a search kept is."""

    best: float
    """Chance that the plan is the fastest of them."""
    ties: int
    """How many can't be told apart from the plan, itself included: those that are faster, or slower, with less than
    1 - `uncertainty.TIE_CHANCE`."""
    of: int
    """Number of layouts."""
    by_layout: dict[str, float]
    """For each by its text form the chance that it is the fastest."""


def candidate_chances(question: Question, candidate: Candidate) -> CandidateChances:
    """Returns how sure the price of a layout is."""
    step_s, factor = candidate.price.step_s, question.time_spread.factor(question.evidence)
    return CandidateChances(
        step_low_s=step_s / factor,
        step_high_s=step_s * factor,
        fits=question.chance_candidate_fits(candidate),
    )


def choice_chances(question: Question, choice: Choice) -> ChoiceChances:
    """Returns how sure a choice is, over the finalists and all that the search kept."""
    # Not `more`, which is what the user wants to see: that mustn't change the chances.
    step_s = {str(option.layout): option.price.step_s for option in choice.best}
    layouts = {str(option.layout): option.layout for option in choice.best}
    # The finalists were priced again since the search; what that changed in them it would about change in the others.
    ratios = [step_s[str(layout)] / seconds for seconds, layout in choice.kept if str(layout) in step_s]
    ratio = median(ratios) if ratios else 1.0
    for seconds, layout in choice.kept:
        step_s.setdefault(str(layout), seconds * ratio)
        layouts.setdefault(str(layout), layout)
    meshes = [_mesh(layout) for layout in layouts.values()]
    spread, plan = question.time_spread, choice.best[0]
    chances = spread.chances_best(list(step_s.values()), meshes)
    plan_s, plan_mesh = plan.price.step_s, _mesh(plan.layout)
    faster = [
        spread.chance_faster(seconds, plan_s, mesh == plan_mesh) for seconds, mesh in zip(step_s.values(), meshes)
    ]
    by_layout = dict(zip(step_s, chances.tolist()))
    return ChoiceChances(
        best=by_layout[str(plan.layout)],
        ties=sum(TIE_CHANCE <= chance <= 1 - TIE_CHANCE for chance in faster),
        of=len(step_s),
        by_layout=by_layout,
    )


def _mesh(layout: Layout) -> str:
    return ",".join(f"{axis}{degree}" for axis, degree in sorted(layout.degrees.items()) if degree > 1)
