"""How tokens travel to their experts (`Layout.ep_node`): other forms than the searched one, tried for finalists."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from meshwright.cluster import traffic
from meshwright.planner.choose import Candidate, Choice, Question
from meshwright.planner.forms import consider_forms
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout, fits_expert_node


def with_expert_node(layout: Layout, node_devices: int) -> Iterator[Layout]:
    """Yields forms of a layout whose tokens travel otherwise: once for each expert, to each rank, or to each node.

    Args:
        layout: any.
        node_devices: devices of a node.
    """
    degree = layout.degree(Mechanics.EXPERTS)
    if degree == 1:
        return
    inside, _, _ = traffic.span(1, degree, node_devices, layout.world)
    for run in {0, 1, int(inside)} - {layout.ep_node}:
        if not run or fits_expert_node(run, degree):
            yield dataclasses.replace(layout, ep_node=run)


def consider_expert_node(question: Question, choice: Choice, price: Callable[[Layout], Candidate]) -> Choice:
    """Returns the choice, with finalists' forms of fewer exchanged tokens beside them where these fit and are faster.

    Args:
        question: what was planned; only our own runtime exchanges in this way.
        choice: of layouts that send a token once for each expert.
        price: prices a layout as the finalists are.
    """
    if question.engine is not None:
        return choice
    devices = question.machine.fabric.devices
    return consider_forms(question, choice, price, "ep_node", lambda layout: with_expert_node(layout, devices))
