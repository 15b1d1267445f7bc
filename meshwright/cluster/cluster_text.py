"""A cluster as a few words: ``64xh100``, ``2x8xh100@infiniband-hdr``; and the hosts of a hostfile."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path

from meshwright.cluster import catalogue
from meshwright.cluster.node import Node, standard_node
from meshwright.errors import ClusterError

_NUMBER_FIRST = re.compile(r"(\d+)\s*[x*]\s*(?:(\d+)\s*[x*]\s*)?([a-z].*)", re.IGNORECASE)
_NUMBER_LAST = re.compile(r"([a-z].*?)\s*[x*]\s*(\d+)", re.IGNORECASE)
_CARDS = re.compile(r"(\d+)\s*[x*]\s*(.+)")
_SLOTS = re.compile(r"\S+(?:\s+slots\s*=\s*(\d+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterTerm:
    """One term of a cluster's text."""

    devices: int
    """In all."""
    device: str
    """Name as written."""
    per_node: int = 0
    """Devices of a node; 0 for the usual number."""
    link: str = ""
    """Network; empty for the usual one."""


def parse_part(text: str) -> ClusterTerm:
    """Reads ``64xh100``, ``h100x64``, ``2x8xh100`` or ``h100``, with ``@LINK`` behind it or not.

    Raises:
        ClusterError: for anything else, or zero devices.
    """
    body, at, link = text.strip().partition("@")
    body = body.strip()
    if at and not link.strip():
        raise ClusterError(f"'{text}': a network's name follows @, as 16xh100@infiniband-hdr")
    first, last = _NUMBER_FIRST.fullmatch(body), _NUMBER_LAST.fullmatch(body)
    if first:
        outer, inner, device = int(first[1]), first[2], first[3]
        count, per_node = (outer * int(inner), int(inner)) if inner else (outer, 0)
    elif last and not known(body):
        count, per_node, device = int(last[2]), 0, last[1]
    elif body and body[0].isalpha():
        count, per_node, device = 1, 0, body
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
    """Reads one term of a cluster's text as nodes of their usual size, the rest in one smaller node.

    Raises:
        ClusterError: as `parse_part`; for an unknown link.
    """
    part = parse_part(text)
    usual = standard_node(part.device)
    per_node = part.per_node or min(usual.count, part.devices)
    node = with_network(usual.resized(per_node), part.link)
    if part.per_node and usual.rack > 1:
        node = dataclasses.replace(node, rack=max(1, math.ceil(usual.rack * usual.count / per_node)))
    whole, rest = divmod(part.devices, per_node)
    return [(node, whole)] + ([(node.resized(rest), 1)] if rest else [])


def known(name: str) -> bool:
    """Whether the catalogue has a device of this name."""
    try:
        catalogue.device(name)
    except ClusterError:
        return False
    return True


def with_network(node: Node, link: str) -> Node:
    """Returns the node with another network: ``infiniband-hdr``, ``4xinfiniband-hdr``.

    Without a number of cards: one of plain Ethernet, of other networks as many as the node usually has.

    Raises:
        ClusterError: for an unknown link.
    """
    if not link:
        return node
    found = _CARDS.fullmatch(link.strip())
    name = found[2] if found else link
    cards = float(found[1]) if found else 1.0 if name.startswith("ethernet") else node.outside_count
    return dataclasses.replace(node, outside=catalogue.link(name), outside_count=cards)


def read_slots(path: Path) -> list[int]:
    """Returns the ranks of each host of a hostfile.

    Raises:
        ClusterError: when it can't be read, or names no host.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"the hostfile {path} can't be read: {error}; give a text file of 'host slots=8'") from None
    slots = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        match = _SLOTS.fullmatch(text)
        if text and (match is None or int(match[1] or 1) < 1):
            raise ClusterError(f"{path}:{number}: {text!r} is not a host; write it as 'host slots=8'")
        if text and match:
            slots.append(int(match[1] or 1))
    if not slots:
        raise ClusterError(f"the hostfile {path} names no host; write a line such as 'host slots=8' for each")
    return slots
