"""The process that plans for the planner's page: a question a line on standard input, an answer a line on the output.

It is a process of its own so that a search can be ended from outside, whatever it is busy with.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import TextIO

from meshwright.errors import MeshwrightError
from meshwright.jobs.plan_model import model_of_sizes, plan_model, scale_model
from meshwright.jobs.plan_question import PlanQuestion
from meshwright.jobs.plan_sections import plan_sections, scaling_section
from meshwright.json_types import JsonObject
from meshwright.monitor.page import Section, note, preformatted, section_html, section_id
from meshwright.records import parse_json

MOST_BYTES = 8 * 2**30
"""Address space of the process; a search of 16,384 devices was seen with 0.2 GiB in memory."""
MOST_SPANS = 6000
"""Actions up to which the pipeline is drawn: a browser draws so many at once."""
COMMAND = "The same on the command line"
KINDS = ("plan", "curve")
"""What can be asked: the best layouts, or the best layout of each number of devices."""
_NICE = 5


def answer_question(kind: str, question: PlanQuestion) -> dict[str, object]:
    """Plans, and returns ``{"sections": {id: markup}, "state": sentence}``.

    Args:
        kind: one of `KINDS`.
        question: within its bounds.

    Raises:
        MeshwrightError: for what can't be, and where no layout fits.
    """
    if kind == "curve":
        config = question.curve_config()
        scaled = scale_model(config, model_of_sizes(config.sizes))
        return {"sections": _rendered([scaling_section(scaled)]), "state": ""}
    config = question.config()
    result = plan_model(config, model_of_sizes(config.sizes))
    command: Section = (COMMAND, [preformatted(question.command()), note("--json writes every figure.")])
    sections = _rendered([*plan_sections(result, most_spans=MOST_SPANS), command])
    return {"sections": sections, "state": f"{result.choice.considered:,} layouts considered"}


def _rendered(sections: list[Section]) -> dict[str, str]:
    return {section_id(heading): section_html(heading, elements) for heading, elements in sections}


def answer_line(line: str) -> JsonObject:
    """Returns the answer to a line, or ``{"refused": sentence}``."""
    try:
        message = parse_json(line.encode())
        question = PlanQuestion.from_dict(message["question"])
        question.check_all()
        return answer_question(str(message["kind"]), question)
    except MeshwrightError as error:
        return {"refused": str(error)}
    except MemoryError:
        return {"refused": "the search takes more memory than this page allows; ask for fewer devices or layers"}


def serve(questions: TextIO, answers: TextIO) -> None:
    """Answers one question after the other until the input ends."""
    for line in questions:
        answers.write(json.dumps(answer_line(line), separators=(",", ":")) + "\n")
        answers.flush()


if __name__ == "__main__":
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    serve(sys.stdin, sys.stdout)
