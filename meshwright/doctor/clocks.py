"""The comparison ``clocks``: how far the nodes' clocks are apart, from the round trips over their links."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from meshwright.doctor.contract import Observation
from meshwright.doctor.links import LinkMeasurement
from meshwright.units import format_seconds

MOST_SKEW_S = 1.0
"""Events of all nodes are ordered by their times in one log; leases don't depend on clocks, since each node counts the
age of another's lease by its own."""


def compare_clocks(links: Iterable[LinkMeasurement]) -> Observation:
    """Finds the nodes whose clock differs from the others'."""
    offsets = {(link.first, link.second): link.clock_offset_s for link in links if not link.fault}
    if not offsets:
        return Observation(value="not compared")
    clocks = _clocks(offsets)
    # The lower median is one node's own clock, also of two nodes.
    reference = statistics.median_low(clocks.values())
    reference_node = next(node for node, clock in clocks.items() if clock == reference)
    findings = []
    for node, clock in sorted(clocks.items()):
        ahead_s = clock - reference
        if abs(ahead_s) > MOST_SKEW_S:
            direction = "ahead of" if ahead_s > 0 else "behind"
            findings.append(
                f"the clock of node {node} is {abs(ahead_s):.1f} s {direction} that of node {reference_node}, more "
                f"than {MOST_SKEW_S:g} s; set both by NTP (chronyc tracking), or their events are out of order"
            )
    spread_s = max(clocks.values()) - min(clocks.values())
    return Observation(
        value=f"{format_seconds(spread_s)} apart",
        findings=tuple(findings),
        facts={"clock_s": {str(node): clock for node, clock in sorted(clocks.items())}},
    )


def _clocks(offsets: dict[tuple[int, int], float]) -> dict[int, float]:
    """Returns each node's clock relative to the first, over whatever links could be measured."""
    clocks = {min(first for first, _ in offsets): 0.0}
    grown = True
    while grown:
        grown = False
        for (first, second), offset in offsets.items():
            if first in clocks and second not in clocks:
                clocks[second], grown = clocks[first] + offset, True
            elif second in clocks and first not in clocks:
                clocks[first], grown = clocks[second] - offset, True
    return clocks
