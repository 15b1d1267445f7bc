"""What a leader works with and whom it counts on, and why it may have to stop leading."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from meshwright.resilience.claims import Claims
from meshwright.resilience.local_node import GenerationAborted, LocalNode
from meshwright.resilience.peers import Hub, Message, PeerConnection
from meshwright.spec.plan import Plan
from meshwright.train.model_analysis import ModelAnalysis


class LeadershipLost(GenerationAborted):
    """Another node leads now."""


class MinorityPartition(LeadershipLost):
    """Others are to lead: more nodes live that this one can't reach than that it can."""


@dataclasses.dataclass
class Member:
    """A node that is there."""

    line: PeerConnection | None
    """The connection to it; None for the leader's own."""
    report: Message
    """What it told last (`LocalNode.report`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeaderContext:
    """What a leader works with."""

    local: LocalNode
    hub: Hub
    claims: Claims
    plans: Callable[[int], tuple[Plan, ModelAnalysis]]
    """Gives a plan for a number of ranks; refuses numbers that have no layout."""
    announce: Callable[[Plan], None]
    """Told of each later plan before its ranks start."""
    event: Callable[..., None]
    """Takes kind and data of what happened."""
