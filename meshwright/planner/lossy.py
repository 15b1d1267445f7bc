"""Layouts that send rounded numbers: priced beside the finalists, chosen where the user allows it, else mentioned."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

from meshwright.errors import PlanError
from meshwright.planner.candidate import Candidate, Choice, sort_candidates
from meshwright.planner.candidate_prices import price_possible
from meshwright.planner.choose import choose
from meshwright.planner.question import Question
from meshwright.spec.axis import Holds, Mechanics
from meshwright.spec.compression import Compression
from meshwright.spec.groups import row_axes
from meshwright.spec.layout import Layout
from meshwright.units import format_seconds

EXPOSED_SHARE = 0.1
"""Share of a step that exposed traffic of what may be rounded must have before rounding is mentioned."""
GAIN_SHARE = 0.05
"""Share of a step that rounding must save for that."""


def lossy_variants(layout: Layout, node_devices: int) -> Iterator[Layout]:
    """Yields layouts like one that sends exact values, with sums over copies or gathers in ``int8``, tokens in ``fp8``.

    Args:
        layout: that sends exact values.
        node_devices: devices of a node, of which some may hold copies that sum exactly first.
    """
    for copied in (layout, *_with_more_copies(layout)):
        choices = [Compression("int8", run) for run in range(1, node_devices + 1)] if copied.copies > 1 else []
        sums = [choice for choice in choices if choice.exact_copies(copied.copies) == choice.node_copies]
        weights_forms = ("none", "int8") if copied.zero == 3 else ("none",)
        tokens_forms = ("none", "fp8") if copied.degree(Mechanics.EXPERTS) > 1 else ("none",)
        for compress, weights, tokens in itertools.product((Compression(), *sums), weights_forms, tokens_forms):
            variant = dataclasses.replace(copied, compress=compress, compress_weights=weights, compress_tokens=tokens)
            if variant.is_lossy:
                yield variant


def _with_more_copies(layout: Layout) -> Iterator[Layout]:
    """Yields a layout with fewer shards and more copies: an exact reduce-scatter between nodes can't be rounded."""
    shards, copies = row_axes(Holds.SHARD)[0], row_axes(Holds.COPY)[0]
    degree = layout.degree(shards)
    for fewer in (size for size in range(1, degree) if degree % size == 0):
        degrees = {**layout.degrees, shards: fewer, copies: layout.degree(copies) * degree // fewer}
        try:
            yield layout.with_degrees(degrees)
        except PlanError:  # experts over ranks that are fewer now
            continue


def consider_lossy(question: Question, choice: Choice, price: Callable[[Layout], Candidate]) -> Choice:
    """Returns the choice, which a layout with rounded numbers leads where one is faster.

    Rounded are the finalists, and the best layouts without a pipeline: where exact gradients take long a pipeline wins,
    which sends few, and rounded ones may take less time than its bubble.

    Args:
        question: what was planned.
        choice: of exact layouts.
        price: prices a layout as the finalists are.
    """
    exact = choice.best[0]
    options = (*choice.best, *_without_pipeline(question, len(choice.best)))
    layouts = {str(option.layout): option.layout for option in options}
    fastest = [_fastest_variant(layout, question, price) for layout in layouts.values()]
    faster = [
        option
        for option in fastest
        if option and option.price.step_s * (1 + question.tie_tolerance) < exact.price.step_s
    ]
    if not faster:
        return choice
    best, ties = sort_candidates([*choice.best, *faster], question.tie_tolerance)
    plan = best[0].layout
    notes = choice.notes
    if plan.is_lossy:
        notes += (
            f"the plan rounds what it sends, as --allow lossy permits; the fastest exact layout, {exact.layout}, takes "
            f"{format_seconds(exact.price.step_s)} a step",
        )
    return dataclasses.replace(choice, best=best, ties=ties, notes=notes)


def _without_pipeline(question: Question, count: int) -> Sequence[Candidate]:
    """Returns the best exact layouts without a pipeline; none where its degree is given, or none fits."""
    fixed, stages = question.limits.get("fixed", {}), Layout().axis(Mechanics.STAGES)
    if stages in fixed:
        return ()
    limits = {**question.limits, "fixed": {**fixed, stages: 1}}
    try:
        return choose(dataclasses.replace(question, limits=limits), count).best
    except PlanError:
        return ()


def no_lossy_note(subject: str) -> str:
    """Returns a sentence on ``--allow lossy`` where no variant is searched: for ``islands``, or unequal devices."""
    cure = "their joins by --outer.compress, sums inside of one by " if subject == "islands" else ""
    return (
        f"--allow lossy changes nothing here: rounding isn't searched for {subject}; nearest that works: {cure}"
        "--layout with compress=int8, which is priced beside the plan"
    )


def _fastest_variant(layout: Layout, question: Question, price: Callable[[Layout], Candidate]) -> Candidate | None:
    """Returns the fastest way to round what a layout sends; None where it sends nothing that can be."""
    variants = price_possible(question, lossy_variants(layout, question.machine.fabric.devices), price)
    fitting = [variant for variant in variants if variant.price.peak <= question.usable_bytes]
    return min(fitting, key=lambda candidate: candidate.price.step_s, default=None)


def lossy_hint(question: Question, exact: Candidate, price: Callable[[Layout], Candidate]) -> str:
    """Returns a sentence on what rounding would save; empty where traffic is hidden, or the gain is small.

    Args:
        question: what was planned.
        exact: the plan.
        price: prices a layout as the plan is.
    """
    step_s = exact.price.step_s
    exposed = sum(exact.price.parts.get(name, 0.0) for name in ("reduce", "gather", "ep")) / step_s
    if exposed < EXPOSED_SHARE or (variant := _fastest_variant(exact.layout, question, price)) is None:
        return ""
    gain = 1 - variant.price.step_s / step_s
    if gain < GAIN_SHARE:
        return ""
    fields = set(str(exact.layout).split(","))
    changes = ",".join(field for field in str(variant.layout).split(",") if field not in fields)
    return (
        f"{exposed:.0%} of the step waits for gradients, weights or tokens on the wire: {changes} would save "
        f"{gain:.0%} of it by rounding them, which trains otherwise than exact numbers; --allow lossy lets the plan "
        "choose it"
    )
