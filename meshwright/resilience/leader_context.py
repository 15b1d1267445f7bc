"""The leader's collaborators and its view of the other nodes, and the errors by which leadership ends."""

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
    """This node reaches fewer of the live nodes than it misses, so a node of the majority should lead."""


@dataclasses.dataclass
class Member:
    """A connected node and its last report."""

    connection: PeerConnection | None
    """The connection to it; None for the leader's own."""
    report: Message
    """Its last report (`LocalNode.report`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeaderContext:
    """The leader's collaborators, built once by `Agent`."""

    local: LocalNode
    hub: Hub
    claims: Claims
    plans: Callable[[int], tuple[Plan, ModelAnalysis]]
    """Gives a plan for a number of ranks; refuses numbers that have no layout."""
    announce: Callable[[Plan], None]
    """Called with each later plan before its ranks start."""
    event: Callable[..., None]
    """Records an event: its kind, and its fields by keyword."""
