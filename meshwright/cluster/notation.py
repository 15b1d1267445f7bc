"""A cluster as tables, in TOML or JSON; read with every key checked."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.cluster import catalogue
from meshwright.cluster.cluster_text import known
from meshwright.cluster.device import Device
from meshwright.cluster.link import Link
from meshwright.cluster.node import Node, named_node, standard_node
from meshwright.errors import ClusterError, nearest
from meshwright.records import parse_json

NODE_KEYS = (
    "nodes",
    "kind",
    "device",
    "count",
    "inside",
    "outside",
    "outside_count",
    "host_memory_bytes",
    "host_bandwidth_bytes_per_s",
    "host_link",
    "rack",
)
"""Keys of one ``[[group]]``."""


def read_file(path: Path) -> dict[str, Any]:
    """Reads a cluster's TOML or JSON file.

    Raises:
        ClusterError: when it isn't there or can't be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
        found = parse_json(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ClusterError(f"the cluster's file {path} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise ClusterError(f"{path} is not valid {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(found, dict):
        raise ClusterError(f"{path}: a cluster is a table with [[group]] in it")
    return found


def read_nodes(values: Mapping[str, Any]) -> list[tuple[Node, int]]:
    """Reads the ``[[group]]`` tables of a cluster with the ``[devices.NAME]`` and ``[links.NAME]`` beside them.

    Raises:
        ClusterError: for unknown keys, devices and links, and values that can't be.
    """
    _check_keys(values, ("name", "group", "devices", "links"), "")
    links = {name: _link(name, table) for name, table in _table(values, "links").items()}
    devices = {name: _device(name, table) for name, table in _table(values, "devices").items()}
    groups = values.get("group", [])
    if isinstance(groups, Mapping):
        groups = [groups]
    if not groups:
        raise ClusterError("the cluster has no [[group]]; give one with device = 'h100' and nodes = 8")
    return [_group(group, index, devices, links) for index, group in enumerate(groups)]


def _group(
    values: Mapping[str, Any], index: int, devices: Mapping[str, Device], links: Mapping[str, Link]
) -> tuple[Node, int]:
    where = f"group[{index}]."
    _check_keys(values, NODE_KEYS, where)
    if "device" not in values:
        raise ClusterError(f"{where}device is missing; name one, as device = 'h100'")
    name = str(values["device"])
    item = devices.get(name) or catalogue.device(name)
    kind = values.get("kind")
    if kind is not None:
        node = named_node(str(kind), item)
    elif known(name):
        node = dataclasses.replace(standard_node(name), device=item)
    else:
        node = Node(device=item, count=_whole(values, "count", 1, where), inside=links.get("inside") or _loose(values))

    def pick(key: str, now: Link | None) -> Link | None:
        if key not in values:
            return now
        wanted = str(values[key])
        return None if wanted == "none" else links.get(wanted) or catalogue.link(wanted)

    node = node.resized(_whole(values, "count", node.count, where))
    outside = pick("outside", node.outside)
    cards = float(values.get("outside_count", node.outside_count or 1)) if outside else 0
    node = dataclasses.replace(
        node,
        inside=pick("inside", node.inside) or node.inside,
        outside=outside,
        outside_count=cards,
        host_link=pick("host_link", node.host_link),
        host_memory_bytes=_whole(values, "host_memory_bytes", node.host_memory_bytes, where),
        host_bandwidth_bytes_per_s=_rate(values, "host_bandwidth_bytes_per_s", node.host_bandwidth_bytes_per_s, where),
        rack=_whole(values, "rack", node.rack, where),
    )
    return node, _whole(values, "nodes", 1, where)


def _loose(values: Mapping[str, Any]) -> Link:
    """Returns the link inside a node of a device that the catalogue doesn't have; it must be named when it matters."""
    wanted = str(values.get("inside", "pcie4"))
    return catalogue.links().get(wanted) or catalogue.link("pcie4")


def _device(name: str, values: Mapping[str, Any]) -> Device:
    keys = [field.name for field in dataclasses.fields(Device) if field.name != "name"]
    _check_keys(values, (*keys, "like"), f"devices.{name}.")
    kept = dict(values)
    like = kept.pop("like", None)
    try:
        if like is not None or known(name):
            return dataclasses.replace(catalogue.device(str(like or name)), name=name, **kept)
        return Device(name=name, **kept)
    except TypeError as error:
        raise ClusterError(
            f"devices.{name}: {_plain(error)}; or name a device that it is like: like = 'h100'"
        ) from None


def _link(name: str, values: Mapping[str, Any]) -> Link:
    keys = [field.name for field in dataclasses.fields(Link) if field.name != "name"]
    _check_keys(values, (*keys, "like"), f"links.{name}.")
    kept = dict(values)
    like = kept.pop("like", None)
    base = catalogue.link(str(like)).to_dict() if like is not None else {}
    base |= catalogue.link(name).to_dict() if not base and name in catalogue.links() else {}
    try:
        return catalogue.read_link({**base, **kept, "name": name})
    except TypeError as error:
        raise ClusterError(f"links.{name}: {_plain(error)}; or name a link that it is like: like = 'pcie4'") from None


def _plain(error: TypeError) -> str:
    return re.sub(r"^.*__init__\(\) ", "", str(error)).replace("keyword-only arguments", "values")


def _table(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = values.get(key, {})
    if not isinstance(found, Mapping) or not all(isinstance(item, Mapping) for item in found.values()):
        raise ClusterError(f"{key} must hold a table for each name, as [{key}.NAME]")
    return found


def _whole(values: Mapping[str, Any], key: str, default: int, where: str) -> int:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ClusterError(f"{where}{key} = {value!r} must be a whole number")
    return value


def _rate(values: Mapping[str, Any], key: str, default: float, where: str) -> float:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ClusterError(f"{where}{key} = {value!r} must be a number of bytes per second")
    return float(value)


def _check_keys(values: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    if not isinstance(values, Mapping):
        raise ClusterError(f"{where.rstrip('.')} must be a table")
    for key in values:
        if key not in known:
            raise ClusterError(f"unknown key '{where}{key}'{nearest(key, known)}")


def write_nodes(name: str, groups: Sequence[tuple[Node, int]]) -> dict[str, Any]:
    """Returns what `read_nodes` takes back, with every device and link written out."""
    devices: dict[str, Any] = {}
    links: dict[str, Any] = {}
    rows = []
    for node, count in groups:
        row: dict[str, Any] = {"nodes": count, "device": _kept(devices, node.device), "count": node.count}
        for key in ("inside", "outside", "host_link"):
            link = getattr(node, key)
            row[key] = "none" if link is None else _kept(links, link)
        row |= {"host_memory_bytes": node.host_memory_bytes, "rack": node.rack}
        row["host_bandwidth_bytes_per_s"] = node.host_bandwidth_bytes_per_s
        if node.outside is not None:
            row["outside_count"] = node.outside_count
        rows.append(row)
    return {"name": name, "group": rows, "devices": devices, "links": links}


def _kept(table: dict[str, Any], item: Device | Link) -> str:
    """Writes a device or link into its table and returns its name there."""
    values = {key: value for key, value in item.to_dict().items() if key != "name"}
    name, number = item.name, 1
    while name in table and table[name] != values:
        number += 1
        name = f"{item.name}-{number}"
    table[name] = values
    return name
