"""How tokens travel to their experts (`Layout.ep_node`, `ep_keep`, ...): forms of the searched one, for finalists."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from meshwright.planner.candidate import Candidate, Choice
from meshwright.planner.forms import consider_forms
from meshwright.planner.question import Question
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout
from meshwright.spec.layout_rules import fits_expert_node

CHUNKS = (2, 4)
"""Numbers of chunks that are tried."""


def exchange_forms(layout: Layout, node_devices: int, chunks: Sequence[int] = CHUNKS) -> Iterator[Layout]:
    """Yields forms of a layout whose tokens travel in chunks, and otherwise: once for each expert, rank, or node.

    Args:
        layout: any.
        node_devices: devices of a node.
        chunks: numbers of them that are tried.
    """
    degree = layout.degree(Mechanics.EXPERTS)
    if degree == 1 or layout.ep_overlap:
        return
    yield from (dataclasses.replace(layout, ep_overlap=count) for count in chunks)
    for run in dict.fromkeys((0, 1, math.gcd(degree, node_devices))):
        if run != layout.ep_node and (not run or fits_expert_node(run, degree)):
            yield dataclasses.replace(layout, ep_node=run)


def halved_forms(layout: Layout, rows: int) -> Iterator[Layout]:
    """Yields forms of a layout in which the halves of each micro-batch take turns (`Layout.ep_halves`).

    Args:
        layout: any.
        rows: of the global batch.
    """
    if layout.ep_overlap or not layout.can_halve:
        return
    # A micro-batch of one row has no halves: half as many of two rows have.
    for microbatches in {layout.microbatches, max(1, layout.microbatches // 2)}:
        form = dataclasses.replace(layout, microbatches=microbatches)
        if rows % form.batch_unit == 0 and rows // form.batch_unit * min(form.reader_shares()) >= 2:
            yield dataclasses.replace(form, ep_halves=True)


def keeping_forms(layouts: Iterable[Layout], experts: Sequence[int]) -> Iterator[Layout]:
    """Yields forms of layouts that keep what recompute would exchange again (`Layout.ep_keep`).

    Args:
        layouts: any.
        experts: of each layer; where none that recomputes has any, there is nothing to keep.
    """
    for layout in layouts:
        if layout.degree(Mechanics.EXPERTS) == 1 or layout.ep_keep:
            continue
        if any(experts[layer] for layer in layout.recompute.layers(len(experts))):
            yield dataclasses.replace(layout, ep_keep=True)


def consider_exchange(question: Question, choice: Choice, price: Callable[[Layout], Candidate]) -> Choice:
    """Returns the choice, with finalists' forms of another exchange with experts beside them where these are faster.

    Args:
        question: what was planned; only our own runtime exchanges in these ways, and only GPUs hide it.
        choice: of layouts as the search prices them.
        price: prices a layout as the finalists are.
    """
    if question.engine is not None:
        return choice
    devices, chunks = question.machine.fabric.devices, CHUNKS if question.machine.device.units else ()
    experts = [block.experts for block in question.job.shape.blocks]
    fastest_s = min(option.price.step_s for option in choice.best)
    # Of others not even an exchange without a second, and none in what is recomputed, would make the plan.
    promising = {
        str(option.layout)
        for option in choice.best
        if option.price.step_s - 2.0 * option.price.parts.get("ep", 0.0) < fastest_s / (1 + question.tie_tolerance)
    }

    def forms(layout: Layout) -> Iterable[Layout]:
        if str(layout) not in promising:
            return ()
        halved = halved_forms(layout, question.job.rows) if chunks else ()
        others = (*exchange_forms(layout, devices, chunks), *halved)
        return itertools.chain(others, keeping_forms((layout, *others), experts))

    return consider_forms(question, choice, price, "another exchange", forms)
