"""The secondary copy of ZeRO-3's weights (`Layout.secondary`): tried for finalists whose gathers cross nodes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from meshwright.cluster import traffic
from meshwright.planner.choose import Candidate, Choice, Question, notes, price_possible, sort_candidates
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout, secondary_over
from meshwright.spec.layout_choices import Recompute
from meshwright.units import format_seconds

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
    options: dict[str, Candidate] = {}
    devices, layers = question.machine.fabric.devices, len(question.job.shape.blocks)
    modes = question.space.recomputes
    for option in choice.best:
        candidates = price_possible(with_secondary(option.layout, devices, layers, modes), price)
        fitting = [candidate for candidate in candidates if candidate.price.peak <= question.usable_bytes]
        fastest = min(fitting, key=lambda candidate: candidate.price.step_s, default=None)
        if fastest and fastest.price.step_s * (1 + question.same) < option.price.step_s:
            options[str(fastest.layout)] = fastest
    if not options:
        return choice
    without = choice.best[0]
    best, ties = sort_candidates([*choice.best, *options.values()], question.same)
    plan, sentences = best[0], choice.notes
    if plan.layout.secondary:
        sentences = (
            *notes(question, plan),
            f"secondary={plan.layout.secondary}: backward gathers weights inside a node, whose ranks share each layer "
            f"from its forward on; the fastest without, {without.layout}, takes {format_seconds(without.price.step_s)}",
        )
    return dataclasses.replace(choice, best=best, ties=ties, notes=sentences)
