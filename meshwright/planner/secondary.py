"""The secondary copy of ZeRO-3's weights (`Layout.secondary`): tried for finalists whose gathers cross nodes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from meshwright.cluster import traffic
from meshwright.planner.candidate import Candidate, Choice
from meshwright.planner.forms import consider_forms
from meshwright.planner.question import Question
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout
from meshwright.spec.layout_choices import Recompute
from meshwright.spec.layout_rules import secondary_over

RECOMPUTED_SHARES = (0.125, 0.25, 0.5, 1.0)
"""Shares of the layers that may recompute to make room for the copy."""


def with_secondary(layout: Layout, node_devices: int, layers: int, recomputes: Sequence[str]) -> Iterator[Layout]:
    """Yields forms of a layout whose backward gathers weights inside nodes; none where all gathers do, or none can.

    Args:
        layout: any.
        node_devices: devices of a node.
        layers: of the model; some recompute to make room for the copy.
        recomputes: modes that may be used.
    """
    # Ranks of tp lie between neighbours that share state.
    stride = layout.degree(Mechanics.MATRICES)
    inside, nodes, _ = traffic.span(stride, layout.state_shards, node_devices, layout.world)
    secondary = secondary_over(int(inside), layout.degrees, layout.zero)
    if layout.secondary or nodes == 1 or not secondary:
        return
    shared = dataclasses.replace(layout, secondary=secondary)
    yield shared
    for mode in (mode for mode in recomputes if mode != "none"):
        for share in RECOMPUTED_SHARES:
            recomputed_layers = math.ceil(share * layers)
            recompute = Recompute(mode, recomputed_layers if recomputed_layers < layers else 0)
            if layout.recompute.share(layers) <= share or layout.recompute.mode != mode:
                yield dataclasses.replace(shared, recompute=recompute)


def consider_secondary(question: Question, choice: Choice, price: Callable[[Layout], Candidate]) -> Choice:
    """Returns the choice, with finalists' forms of a secondary copy beside them where these fit and are faster.

    Args:
        question: what was planned.
        choice: of layouts without one.
        price: prices a layout as the finalists are.
    """
    devices, layers = question.machine.fabric.devices, len(question.job.shape.blocks)
    modes = question.space.recomputes
    return consider_forms(
        question, choice, price, "secondary", lambda layout: with_secondary(layout, devices, layers, modes)
    )
