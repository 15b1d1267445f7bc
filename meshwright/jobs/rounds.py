"""How islands join, as the planner prices it, from the settings of a run or of a plan."""

from __future__ import annotations

from meshwright.planner.rounds import Rounds
from meshwright.spec.compression import BLOCK_VALUES, FORMATS
from meshwright.spec.gossip import GOSSIP_PEERS
from meshwright.train.config import OuterConfig


def make_rounds(outer: OuterConfig) -> Rounds:
    """Returns how islands join."""
    rounded = outer.compress != "none"
    return Rounds(
        steps=outer.every,
        rounded_bytes=FORMATS[outer.compress].block_bytes / BLOCK_VALUES if rounded else 0.0,
        direct_peers=GOSSIP_PEERS.get(outer.topology, 0),
        fragments=outer.fragments,
        delay=outer.delay,
    )
