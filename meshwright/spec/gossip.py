"""Topologies in which islands send their weights to a few others, as far as they cost bytes."""

from __future__ import annotations

from collections.abc import Mapping

GOSSIP_PEERS: Mapping[str, int] = {"ring": 2, "exponential": 1}
"""Topology to the islands that each sends all of its weights to in an exchange, at most; all others sum on the way."""
