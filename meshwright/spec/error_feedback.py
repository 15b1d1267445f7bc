"""Error feedback as a choice of the layout: which layouts can keep what approximate sums of gradients leave out."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.errors import PlanError
from meshwright.spec.axis import Mechanics
from meshwright.spec.groups import axis_with, island_count


def error_feedback_refusal(degrees: Mapping[str, int], offload: str) -> str:
    """Returns why a layout can't keep what sums leave out, with the nearest that works; empty where it can."""
    for mechanics, why in (
        (Mechanics.EXPERTS, "an expert's weights have copies of their own"),
        (Mechanics.STAGES, "a tied weight of two stages would owe twice"),
    ):
        axis = axis_with(mechanics, degrees)
        if degrees.get(axis, 1) > 1:
            return f"{why} under {axis}={degrees[axis]}; nearest that works: compress=int8, or drop {axis}"
    if island_count(degrees) > 1:
        return "islands keep no errors of copies; nearest that works: compress=int8"
    if offload == "parameters":
        return "offload=parameters has gradients in host memory; nearest that works: offload=optimizer"
    return ""


def check_error_feedback(text: str, degrees: Mapping[str, int], offload: str) -> None:
    """Refuses layouts that can't keep what sums over copies leave out.

    Args:
        text: of the choice, for the message.
        degrees: of the axes.
        offload: of the layout.

    Raises:
        PlanError: with the rule and the nearest layout that works.
    """
    if refusal := error_feedback_refusal(degrees, offload):
        raise PlanError(f"compress={text}: {refusal}")
