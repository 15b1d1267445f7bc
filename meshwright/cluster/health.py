"""Compares measured collectives with the catalogue's links, to detect a slow fabric before a run.

Source: of the ultra-scale playbook's runs on four nodes and more, two in three run a world all-reduce at a
fraction of the rate of healthy nodes of the same kind, and their steps are slower by as much.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.cluster.calibration import Calibration
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.traffic import COLLECTIVES, collective_s
from meshwright.units import format_bytes

SICK = 2.0
"""Ratio of measured to expected time from which a link counts as slow."""
LEAST_BYTES = 1 << 20
"""Shorter messages measure latency, which varies more."""


def shortfalls(calibration: Calibration, cluster: Cluster) -> Iterator[str]:
    """Yields a sentence for each collective and placement that is far slower than the catalogue's links.

    Args:
        calibration: the measurements.
        cluster: the same machines with the catalogue's figures, not calibrated.
    """
    for kind, ranks, nodes, rank_stride in dict.fromkeys(tuple(row[:4]) for row in calibration.collectives):
        size, measured_s = calibration.times(kind, ranks, nodes, rank_stride)[-1]
        # Only the largest message of each placement is judged.
        if size < LEAST_BYTES or kind not in COLLECTIVES:
            continue
        # The same placement, priced by the catalogue's links.
        inside, domains, sharing = cluster.span(rank_stride, ranks)
        expected_s = collective_s(kind, size, inside, domains, cluster.fabric(), sharing)
        if measured_s > SICK * expected_s:
            node_text = f" on {nodes} nodes" if nodes > 1 else ""
            yield (
                f"{kind} over {ranks} ranks{node_text}, {rank_stride} apart: {format_bytes(size / measured_s)}/s "
                f"where links of this kind give {format_bytes(size / expected_s)}/s; "
                "look for a sick link before you train on it"
            )
