"""A link between devices: bandwidth, latency and protocols."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from meshwright.array_types import Values
from meshwright.errors import ClusterError


@dataclass(frozen=True, slots=True)
class Protocol:
    """One protocol of a library over a link (NCCL: LL, LL128, Simple); a message uses the fastest."""

    share: float
    """Share of the link's achievable rate."""
    start_s: float
    """Seconds once a collective."""
    hop_s: float
    """Seconds for each rank that the data passes through."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One link; rates are for one device and one direction."""

    name: str
    """Name in the catalogue: ``nvlink4``, ``infiniband-ndr``."""
    bytes_per_s: float
    """Nominal bandwidth."""
    latency_s: float
    """Least time of any message."""
    share: float = 1.0
    """Share of the nominal rate that a ring over long messages reaches."""
    reduce_share: float = 0.0
    """Share of the nominal rate at which switches reduce (NVLS, SHARP): a long all-reduce costs its bytes over this
    rate, for any number of ranks; 0 where no switch reduces."""
    peers: int = 0
    """Devices that each device is wired to directly, with an equal share of the rate; 0 behind a switch, where any pair
    has the full rate."""
    protocols: tuple[Protocol, ...] = ()
    """Protocols; without any, one at the full share with `latency_s` a hop."""
    source: str = ""
    """Source of the figures."""

    def __post_init__(self) -> None:
        """Refuses invalid figures and fills in the default protocol."""
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
        protocols = self.protocols or (Protocol(1.0, 0.0, self.latency_s),)
        if any(not 0 < protocol.share <= 1 or protocol.start_s < 0 or protocol.hop_s < 0 for protocol in protocols):
            raise ClusterError(f"link {self.name}: a protocol's share is within 0 and 1, its times not below 0")
        # The dataclass is frozen; this completes it.
        object.__setattr__(self, "protocols", tuple(protocols))

    @property
    def rate(self) -> float:
        """Bytes per second that a ring over long messages reaches, for one device and direction."""
        return self.bytes_per_s * self.share

    def rate_among(self, members: Values) -> Values:
        """Returns `rate` of a group by its number of members (a number or an array): only wires between them count."""
        if not self.peers:
            return self.rate
        # Without a switch a group of n uses n - 1 of the wires, each with an equal share.
        return self.rate * np.clip(np.asarray(members) - 1, 1, self.peers) / self.peers

    def to_dict(self) -> dict[str, Values]:
        """Returns plain values; protocols as lists of share, start and hop."""
        return dataclasses.asdict(self) | {
            "protocols": [list(dataclasses.astuple(protocol)) for protocol in self.protocols]
        }
