"""A question and its best layout as one line of an answer that compares several: clusters, sizes, batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from meshwright.errors import PlanError
from meshwright.planner.candidate import Candidate
from meshwright.planner.choose import search_space
from meshwright.planner.compilation import compiled_question, may_compile
from meshwright.planner.question import Question

Solve = Callable[[Question], Candidate]
"""Maps a question to its plan, as `plan` would choose it; raises `PlanError` where nothing fits."""
Fits = Callable[[Question], bool]
"""Whether a question has a plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedCase:
    """A question with its best layout, or why there is none."""

    name: str
    """What is different in it."""
    question: Question
    """What was planned."""
    best: Candidate | None
    """None where no layout exists or fits."""
    why: str = ""
    """The reason for that."""

    def to_json(self) -> dict[str, object]:
        """Returns the case as plain values."""
        return {
            "name": self.name,
            "devices": self.question.cluster.devices,
            "parameters": self.question.job.shape.parameters,
            "batch": self.question.job.rows,
            "sequence": self.question.job.sequence,
            "best": None if self.best is None else candidate_json(self.best),
            "why": self.why,
        }

    def shape_json(self) -> dict[str, object]:
        """Returns the case with the sizes of its model."""
        shape = self.question.job.shape
        sizes = {"layers": shape.layers, "width": shape.width, "heads": shape.heads, "vocab": shape.vocab}
        return {"sizes": sizes, **self.to_json()}


def solve_case(name: str, question: Question, solve: Solve) -> PlannedCase:
    """Returns the case of a question; one that nothing fits has the reason instead of a layout."""
    try:
        return PlannedCase(name=name, question=question, best=solve(question))
    except PlanError as error:
        return PlannedCase(name=name, question=question, best=None, why=str(error))


def fits(question: Question) -> bool:
    """Returns whether some layout of a question exists and fits; compiled ones count where a plan has the choice."""
    try:
        if search_space(question).best is not None:
            return True
        return may_compile(question) and search_space(compiled_question(question)).best is not None
    except PlanError:
        return False


def candidate_json(candidate: Candidate) -> dict[str, object]:
    """Returns a layout and its price as plain values."""
    return {
        "layout": candidate.layout.to_json(),
        "price": dataclasses.asdict(candidate.price),
        "tokens_per_s": candidate.tokens_per_s,
        "cost_per_mtoken": candidate.cost_per_mtoken,
        "joules_per_token": candidate.joules_per_token,
        "tflops_per_device": candidate.flops_per_device / 1e12,
        "mfu": candidate.mfu,
    }
