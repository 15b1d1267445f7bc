"""Sentences about a plan that a user should read besides its figures."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.planner.candidate import Candidate
from meshwright.planner.question import USABLE, Question
from meshwright.spec.layout import Layout
from meshwright.units import format_bytes

NOTED_PACE_SPREAD = 0.1
"""Spread of a machine's pace during calibration from which a plan carries a note."""


def plan_notes(question: Question, best: Candidate) -> tuple[str, ...]:
    """Returns the sentences about a plan that a user should read besides its figures."""
    sentences = [*question.rounds.advice(best.price.parts), *_form_notes(best.layout)]
    index, device_bytes = question.tightest_stage(best)
    free_bytes = device_bytes - best.price.stages[index].peak
    if free_bytes < 0.08 * device_bytes:
        sentences.append(
            f"the fullest rank leaves {format_bytes(free_bytes)} free: longer rows or another allocator may not fit; "
            "--usable 0.85 plans with more room"
        )
    elif question.usable is None and question.usable_share < 0.9 * USABLE:
        is_known = question.evidence.own_bytes and question.evidence.device
        runs = "measured on one device and not on several" if is_known else "not measured on such devices"
        sentences.append(
            f"plans fill {question.usable_share:.0%} of a device at most, so that they fit with {question.fits:.0%}: "
            f"what this runtime takes was {runs}; `meshwright calibrate` there permits more, as does a smaller --fits"
        )
    bubble = best.price.parts.get("bubble", 0.0) / best.price.step_s
    if bubble > 0.2:
        sentences.append(f"{bubble:.0%} of the step is the pipeline's bubble: a larger batch would fill it")
    if history_note := question.history.note(best.layout):
        sentences.append(history_note)
    measured = question.cluster.calibration
    if measured is not None and measured.pace_spread > NOTED_PACE_SPREAD:
        sentences.append(
            f"while this machine was calibrated it ran {measured.pace_spread:.0%} slower in the median than at its "
            "fastest, so something else was running: times are no surer than that; calibrate again when it is quiet"
        )
    if unused_network := "" if question.other_island_devices else question.cluster.unused_network:
        sentences.append(f"the cluster is one node, so its network, {unused_network}, isn't used")
    if measured is None:
        sentences.append("device and links are the catalogue's figures; `meshwright calibrate` measures these machines")
    return tuple(sentences)


def _form_notes(layout: Layout) -> Iterator[str]:
    """Yields what a layout does that the search of plain layouts didn't price."""
    if layout.secondary:
        yield (
            f"secondary={layout.secondary}: backward gathers weights inside a node, whose ranks share each layer from "
            "its forward on"
        )
    if layout.tp_overlap:
        yield (
            f"tp_overlap={layout.tp_overlap}: tp's traffic is sent under products, which is priced and was never "
            "measured on several GPUs"
        )
    if layout.ep_node:
        whom = f"each {layout.ep_node} ranks" if layout.ep_node > 1 else "each rank"
        yield (
            f"ep_node={layout.ep_node}: a token travels once to {whom} with experts of it; priced for a router that "
            "chooses all experts, or groups of experts, as often, and never measured on several GPUs"
        )
    if layout.ep_overlap:
        yield (
            f"ep_overlap={layout.ep_overlap}: tokens travel to their experts under the products of others, which is "
            "priced and was never measured on several GPUs"
        )
    if layout.ep_halves:
        yield (
            "ep_halves=true: tokens travel to their experts under what the other half of a micro-batch computes, which "
            "is priced and was never measured on several GPUs"
        )
    if layout.ep_keep:
        yield "ep_keep=true: what came from the ranks of experts is kept, so that recompute exchanges nothing again"
