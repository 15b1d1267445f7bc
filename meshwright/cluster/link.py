"""One kind of wire between devices: how many bytes it carries, how long the first one takes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.errors import ClusterError


@dataclass(frozen=True, slots=True)
class Protocol:
    """One of the ways in which a library sends over a link; the fastest for the message at hand is taken."""

    share: float
    """Share of the link's achievable rate."""
    start_s: float
    """Once for a collective."""
    hop_s: float
    """For each rank that the data passes through."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One link; rates are for one device and one direction."""

    name: str
    """As the catalogue has it: ``nvlink4``, ``infiniband-ndr``."""
    bytes_per_s: float
    """Nominal."""
    latency_s: float
    """The least that anything sent over it takes."""
    share: float = 1.0
    """Share of the nominal rate that a ring over long messages reaches."""
    reduce_share: float = 0.0
    """Share of the nominal rate at which switches sum on the way (NVLS, SHARP): seconds of a long all-reduce are its
    bytes over this rate, whatever the number of ranks; 0 where no switch sums."""
    peers: int = 0
    """Devices that each is wired to one by one, with an equal part of the rate; 0 behind a switch, where any two have
    the whole rate."""
    protocols: tuple[Protocol, ...] = ()
    """Ways to send; none is one way at the full share with `latency_s` for each hop."""
    source: str = ""
    """Where the figures are from."""

    def __post_init__(self) -> None:
        """Refuses figures that no link has."""
        if not self.bytes_per_s > 0:
            raise ClusterError(
                f"link {self.name}: bytes_per_s = {self.bytes_per_s}; a link without bandwidth carries nothing, give "
                "bytes per second for one device and direction, or leave the link out"
            )
        if not self.latency_s >= 0:
            raise ClusterError(f"link {self.name}: latency_s = {self.latency_s} must be 0 or more")
        if not 0 < self.share <= 1 or not 0 <= self.reduce_share <= 1:
            raise ClusterError(
                f"link {self.name}: share = {self.share} must be above 0 and at most 1, reduce_share = "
                f"{self.reduce_share} from 0 to 1"
            )
        if self.peers < 0:
            raise ClusterError(f"link {self.name}: peers = {self.peers} must be 0 or more")
        ways = self.protocols or (Protocol(1.0, 0.0, self.latency_s),)
        if any(not 0 < way.share <= 1 or way.start_s < 0 or way.hop_s < 0 for way in ways):
            raise ClusterError(f"link {self.name}: a protocol's share is within 0 and 1, its times not below 0")
        object.__setattr__(self, "protocols", tuple(ways))

    @property
    def rate(self) -> float:
        """Bytes per second that a ring over long messages reaches, for one device and direction."""
        return self.bytes_per_s * self.share

    def rate_among(self, members: Any) -> Any:
        """Returns `rate` for a group of so many members, a number or an array: of the wires between them alone."""
        if not self.peers:
            return self.rate
        return self.rate * np.clip(np.asarray(members) - 1, 1, self.peers) / self.peers

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values; protocols as lists of share, start and hop."""
        return dataclasses.asdict(self) | {"protocols": [list(dataclasses.astuple(way)) for way in self.protocols]}
