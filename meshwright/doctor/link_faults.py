"""Finds the slow or broken links among measured ones: against the others, a cluster's file, or the card's nominal rate.

A node whose links are all slow or broken is named instead of its links.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

from meshwright.units import format_bytes, format_seconds

SICK = 2.0
"""Ratio of the expected rate to the measured one from which a link counts as slow; `cluster.health.SICK` as well."""
SICK_NOMINAL = 8.0
"""The same ratio for a card's nominal rate, which one stream of gloo doesn't reach."""
STREAM_BYTES_PER_S = 1.25e9
"""What one stream can be expected to reach, however fast the card is: 10 Gbit/s."""
SICK_LATENCY, LEAST_LATENCY_S = 10.0, 0.002
"""A link is late that takes so many times the latency of a typical one, and at least so long."""
MOST_FAULT_CHARACTERS = 300


class MeasuredLink(Protocol):
    """The figures of a link; see `links.LinkMeasurement`."""

    @property
    def first(self) -> int:
        """Lower number of its ends."""

    @property
    def second(self) -> int:
        """Higher number."""

    @property
    def backend(self) -> str:
        """``gloo`` or ``nccl``."""

    @property
    def latency_s(self) -> float:
        """Half of a round trip."""

    @property
    def bytes_per_s(self) -> float:
        """The slower direction."""

    @property
    def forward_bytes_per_s(self) -> float:
        """From the first to the second."""

    @property
    def backward_bytes_per_s(self) -> float:
        """From the second to the first."""

    @property
    def fault(self) -> str:
        """Why nothing could be measured; empty when it could."""


def find_link_faults(
    links: Sequence[MeasuredLink], noun: str, expected: float | None = None, nominal: float | None = None
) -> tuple[str, list[str]]:
    """Returns the links' figures in a few words, and a sentence for each fault.

    Args:
        links: measured ones, of one backend or several.
        noun: what they join: ``node``, ``GPU``.
        expected: bytes per second by the cluster's file; the upper quartile of the links when None.
        nominal: bytes per second of the card by its driver, for a single link; None when it states none.
    """
    values: list[str] = []
    findings: list[str] = []
    for backend in dict.fromkeys(link.backend for link in links):
        of_backend = [link for link in links if link.backend == backend]
        good = [link for link in of_backend if not link.fault]
        if good:
            rates = sorted(link.bytes_per_s for link in good)
            latency = min(link.latency_s for link in good)
            rate_text = f"{format_bytes(rates[0])}/s to {format_bytes(rates[-1])}/s"
            values.append(f"{backend} {rate_text if len(rates) > 1 else rate_text.partition(' to ')[0]}, from "
                          f"{format_seconds(latency)}")  # fmt: skip
        findings += _broken(of_backend, noun)
        findings += _slow(good, noun, expected, nominal)
        findings += _late(good, noun)
    return "; ".join(values) or "no link", findings


def _broken(links: Sequence[MeasuredLink], noun: str) -> Iterator[str]:
    broken = [link for link in links if link.fault]
    nodes, pairs = _blame(links, broken)
    for node, fault in nodes.items():
        yield (
            f"{noun} {node} reaches no other {noun} over {fault.backend} ({fault.fault[:MOST_FAULT_CHARACTERS]}); open "
            "all ports between the nodes, and check its cable, address and GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"
        )
    for link in pairs:
        yield (
            f"{noun}s {link.first} and {link.second} can't exchange data over {link.backend} "
            f"({link.fault[:MOST_FAULT_CHARACTERS]}); open all ports between them, and check the link"
        )


def _slow(links: Sequence[MeasuredLink], noun: str, expected: float | None, nominal: float | None) -> Iterator[str]:
    rule = _expected_rate(links, expected, nominal)
    if rule is None:
        return
    limit, source = rule
    nodes, pairs = _blame(links, [link for link in links if link.bytes_per_s < limit])
    cure = "look at its cable, switch port and card, or train without it"
    for node, link in nodes.items():
        rates = [link.bytes_per_s for link in links if node in (link.first, link.second)]
        yield (
            f"all {len(rates)} links of {noun} {node} are slow: {format_bytes(max(rates))}/s at most over "
            f"{link.backend}, where {source}; {cure}"
        )
    for link in pairs:
        yield (
            f"the link between {noun}s {link.first} and {link.second} is slow: {format_bytes(link.bytes_per_s)}/s over "
            f"{link.backend}, where {source}; {cure}"
        )


def _expected_rate(
    links: Sequence[MeasuredLink], expected: float | None, nominal: float | None
) -> tuple[float, str] | None:
    """Returns the least good rate and the sentence's end that names its source; None without anything to compare."""
    if expected is not None:
        return expected / SICK, f"the cluster's file has {format_bytes(expected)}/s"
    rates = sorted(link.bytes_per_s for link in links)
    if len(rates) >= 3:
        # With one sick node of three or four, half of the links or more are slow: the median would be one of them.
        typical = rates[math.ceil(0.75 * len(rates)) - 1] if len(rates) > 3 else rates[-1]
        return typical / SICK, f"a typical link here reaches {format_bytes(typical)}/s"
    if nominal is not None and links:
        reachable = min(nominal, STREAM_BYTES_PER_S)
        return reachable / SICK_NOMINAL, f"the card's nominal rate is {format_bytes(nominal)}/s"
    return None


def _late(links: Sequence[MeasuredLink], noun: str) -> Iterator[str]:
    latencies = sorted(link.latency_s for link in links)
    if len(latencies) < 3:
        return
    typical = latencies[len(latencies) // 4]
    late = [link for link in links if link.latency_s > max(SICK_LATENCY * typical, LEAST_LATENCY_S)]
    nodes, pairs = _blame(links, late)
    ends = [(f"{noun} {node}", link) for node, link in nodes.items()]
    ends += [(f"the link between {noun}s {link.first} and {link.second}", link) for link in pairs]
    for subject, link in ends:
        yield (
            f"{subject} is late: {format_seconds(link.latency_s)} a message over {link.backend}, where a typical link "
            f"takes {format_seconds(typical)}; look at its route and switch"
        )


def _blame(
    links: Sequence[MeasuredLink], bad: Sequence[MeasuredLink]
) -> tuple[dict[int, MeasuredLink], list[MeasuredLink]]:
    """Returns the nodes whose links are all bad, each with one of these links, and the other bad links."""
    remaining, nodes = list(bad), {}
    for node in sorted({end for link in links for end in (link.first, link.second)}, key=lambda n: -_count(bad, n)):
        own = [link for link in remaining if node in (link.first, link.second)]
        # With every link bad no node is special; with one link neither end is.
        if len(own) > 1 and len(own) == _count(links, node) and len(bad) < len(links):
            nodes[node] = own[0]
            remaining = [link for link in remaining if link not in own]
    return nodes, remaining


def _count(links: Sequence[MeasuredLink], node: int) -> int:
    return sum(node in (link.first, link.second) for link in links)
