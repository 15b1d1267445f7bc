"""How islands join, as the planner prices it, from the settings of a run or of a plan."""

from __future__ import annotations

from meshwright.planner.rounds import Rounds
from meshwright.spec.gossip import GOSSIP_PEERS
from meshwright.train.config import OuterConfig


def make_rounds(outer: OuterConfig) -> Rounds:
    """Returns how islands join."""
    return Rounds(
        steps=outer.every,
        compress=outer.compress,
        direct_peers=GOSSIP_PEERS.get(outer.topology, 0),
        fragments=outer.fragments,
        delay=outer.delay,
    )
