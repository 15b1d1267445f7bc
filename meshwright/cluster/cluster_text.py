"""The short text form of a cluster (``64xh100``, ``2x8xh100@infiniband-hdr``), and the hosts of a hostfile."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path

from meshwright.cluster import catalogue
from meshwright.cluster.node import Node, standard_node
from meshwright.errors import ClusterError

_LEADING_NUMBER = re.compile(r"(\d+)\s*[x*]\s*(?:(\d+)\s*[x*]\s*)?([a-z].*)", re.IGNORECASE)
_TRAILING_NUMBER = re.compile(r"([a-z].*?)\s*[x*]\s*(\d+)", re.IGNORECASE)
_CARDS = re.compile(r"(\d+)\s*[x*]\s*(.+)")
_OVERSUBSCRIBED = re.compile(r"(.*?)\s*:\s*(\d+(?:\.\d+)?)")
_SLOTS = re.compile(r"\S+(?:\s+slots\s*=\s*(\d+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterTerm:
    """One term of a cluster's text."""

    devices: int
    """Number of devices of the term."""
    device: str
    """Device name as written."""
    per_node: int = 0
    """Devices of a node; 0 for the standard number."""
    link: str = ""
    """Network; empty for the standard one."""


def parse_part(text: str) -> ClusterTerm:
    """Parses ``64xh100``, ``h100x64``, ``2x8xh100`` or ``h100``, each with an optional ``@LINK``.

    Raises:
        ClusterError: for another form, an unknown device, or zero devices.
    """
    term_text, separator, link = text.strip().partition("@")
    term_text = term_text.strip()
    if separator and not link.strip():
        raise ClusterError(f"'{text}': a network's name follows @, as 16xh100@infiniband-hdr")
    leading_number, trailing_number = _LEADING_NUMBER.fullmatch(term_text), _TRAILING_NUMBER.fullmatch(term_text)
    if leading_number:
        leading_count, per_node_text, device = int(leading_number[1]), leading_number[2], leading_number[3]
        # 2x8xh100 is nodes x devices of a node.
        count, per_node = (
            (leading_count * int(per_node_text), int(per_node_text)) if per_node_text else (leading_count, 0)
        )
    # Some names end like a count; a known name is a device.
    elif trailing_number and not known(term_text):
        count, per_node, device = int(trailing_number[2]), 0, trailing_number[1]
    elif term_text and term_text[0].isalpha():
        count, per_node, device = 1, 0, term_text
    else:
        raise ClusterError(
            f"'{text}' is no cluster; write devices as 64xh100, nodes x devices as 2x8xh100, several kinds as "
            "64xh100+32xa100, or the path of a .toml file"
        )
    if count < 1:
        raise ClusterError(f"'{text}' has 0 devices; name at least one, as 8x{device}")
    catalogue.device(device)
    return ClusterTerm(devices=count, device=device, per_node=per_node, link=link.strip())


def read_nodes(text: str) -> list[tuple[Node, int]]:
    """Reads one term of a cluster's text as nodes of standard size, and one smaller node for the remainder.

    Raises:
        ClusterError: for an invalid term, zero devices, or an unknown device or link.
    """
    term = parse_part(text)
    standard = standard_node(term.device)
    per_node = term.per_node or min(standard.count, term.devices)
    node = with_network(standard.resized(per_node), term.link)
    if term.per_node and standard.rack > 1:
        # The rack keeps its number of devices when nodes have another size.
        node = dataclasses.replace(node, rack=max(1, math.ceil(standard.rack * standard.count / per_node)))
    full_nodes, remaining_devices = divmod(term.devices, per_node)
    return [(node, full_nodes)] + ([(node.resized(remaining_devices), 1)] if remaining_devices else [])


def known(name: str) -> bool:
    """Returns whether the catalogue has a device of this name."""
    try:
        catalogue.device(name)
    except ClusterError:
        return False
    return True


def network_of(node: Node) -> str:
    """Returns the network of a node as `with_network` reads it; ``no network`` without one."""
    if node.outside is None:
        return "no network"
    oversubscribed = f":{node.oversubscription:g}" if node.oversubscription > 1 else ""
    return f"{node.outside_count:g}x{node.outside.name}{oversubscribed}"


def with_network(node: Node, link: str) -> Node:
    """Returns the node with another network: ``infiniband-hdr``, ``4xinfiniband-hdr``, ``infiniband-hdr:2``.

    A number behind a colon is the network's oversubscription, 2 for 2:1. Without a number of cards: one of plain
    Ethernet, of any other network the standard number of the node.

    Raises:
        ClusterError: for an unknown link, or one that joins the devices of a node.
    """
    if not link:
        return node
    oversubscribed = _OVERSUBSCRIBED.fullmatch(link.strip())
    if oversubscribed:
        link = oversubscribed[1]
        node = dataclasses.replace(node, oversubscription=float(oversubscribed[2]))
    match = _CARDS.fullmatch(link.strip())
    name = match[2] if match else link
    cards = float(match[1]) if match else 1.0 if name.startswith("ethernet") else node.outside_count
    network = catalogue.link(name)
    if network.name in catalogue.links_within_nodes():
        devices = [other for other in catalogue.devices() if other.startswith(node.device.name)]
        kinds = f" ({', '.join(devices)})" if len(devices) > 1 else ""
        raise ClusterError(
            f"'@{name}' names the network between nodes, and {network.name} joins what is in one; write a network, as "
            f"@infiniband-ndr, or leave it out: a device's name says how those of a node are joined{kinds}"
        )
    return dataclasses.replace(node, outside=network, outside_count=cards)


def read_slots(path: Path) -> list[int]:
    """Returns the ranks of each host of a hostfile.

    Raises:
        ClusterError: when it can't be read, names no host, or one twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"the hostfile {path} can't be read: {error}; give a text file of 'host slots=8'") from None
    slots: dict[str, int] = {}
    for line_number, line in enumerate(lines, start=1):
        # Comments and blank lines are allowed.
        text = line.partition("#")[0].strip()
        match = _SLOTS.fullmatch(text)
        if text and (match is None or int(match[1] or 1) < 1):
            raise ClusterError(f"{path}:{line_number}: {text!r} is not a host; write it as 'host slots=8'")
        if not text or match is None:
            continue
        host = text.split()[0]
        if host in slots:
            raise ClusterError(f"{path}:{line_number}: {host} is named twice; give one line with all its slots")
        slots[host] = int(match[1] or 1)
    if not slots:
        raise ClusterError(f"the hostfile {path} names no host; write a line such as 'host slots=8' for each")
    return list(slots.values())
