"""Whether the wires reach what their kind should: a sick fabric is found by measuring it, never by its name.

Source: of the ultra-scale playbook's runs on four nodes and more, two in three carry a world all-reduce at a part of
what healthy nodes of the same kind reach, and their steps are as much slower.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.cluster.calibration import Calibration
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.traffic import COLLECTIVES, collective_s
from meshwright.units import format_bytes

SICK = 2.0
"""How many times as long as expected a long message may take."""
LEAST_BYTES = 1 << 20
"""Shorter messages tell of latency, which varies more."""


def shortfalls(calibration: Calibration, cluster: Cluster) -> Iterator[str]:
    """Yields a sentence for each operation and placement that is far from what the catalogue's links give.

    Args:
        calibration: what was measured.
        cluster: the same machines as the catalogue has them, not calibrated.
    """
    for kind, ranks, nodes, before in dict.fromkeys(tuple(row[:4]) for row in calibration.collectives):
        size, took = calibration.times(kind, ranks, nodes, before)[-1]
        if size < LEAST_BYTES or kind not in COLLECTIVES:
            continue
        inside, domains, sharing = cluster.span(before, ranks)
        expected = collective_s(kind, size, inside, domains, cluster.fabric(), sharing)
        if took > SICK * expected:
            where = f" on {nodes} nodes" if nodes > 1 else ""
            yield (
                f"{kind} over {ranks} ranks{where}, {before} apart: {format_bytes(size / took)}/s where links of this "
                f"kind give {format_bytes(size / expected)}/s; look for a sick link before you train on it"
            )
