"""How islands join, as the planner prices it, from the settings of a run or of a plan."""

from __future__ import annotations

import dataclasses

from meshwright.planner.rounds import Rounds
from meshwright.spec.gossip import GOSSIP_PEERS
from meshwright.train.config import OuterConfig

LEAST_ROUNDS = 20
"""Rounds that a run has at least, under the steps of a round that a plan chooses."""


def make_rounds(outer: OuterConfig, run_steps: int | None = None) -> Rounds:
    """Returns how islands join.

    Args:
        outer: of which settings that are None are the plan's to choose, where islands are allowed.
        run_steps: steps that the run has at least, where they are known.
    """
    rounds = Rounds(
        steps=outer.round_steps,
        compress=outer.number_format,
        direct_peers=GOSSIP_PEERS.get(outer.topology, 0),
        fragments=outer.fragment_count,
        delay=outer.delay_steps,
        free=frozenset(name for name in Rounds().settings if getattr(outer, name) is None),
    )
    if run_steps is None:
        return rounds
    return dataclasses.replace(
        rounds,
        most_steps=max(0, run_steps - outer.warmup) // LEAST_ROUNDS,
        joint_share=min(1.0, outer.warmup / run_steps),
    )
