"""A plan as one self-contained page, without a script."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.jobs.plan_model import PlanResult
from meshwright.jobs.plan_sections import plan_sections
from meshwright.monitor.page import page
from meshwright.planner.candidate import Choice
from meshwright.planner.question import Question


def write_page(path: Path, question: Question, choice: Choice, compared: Mapping[str, str]) -> Path:
    """Writes the page and returns its path.

    Args:
        path: of the HTML file; its directory is made.
        question: what was planned.
        choice: the answer.
        compared: layouts that the user named, with why they lose.

    Raises:
        ConfigError: for a path that can't be written.
    """
    result = PlanResult(question=question, choice=choice, compared=compared)
    name = f"{question.job.shape.name} on {question.cluster}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(name, plan_sections(result)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"html = {path} can't be written: {error.strerror}; name a file, as plan.html") from error
    return path
