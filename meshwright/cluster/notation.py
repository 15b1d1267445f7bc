"""Reads and writes a cluster as tables of TOML or JSON, and checks every key."""

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
from meshwright.json_types import JsonObject
from meshwright.records import parse_json

NODE_KEYS = (
    "nodes",
    "kind",
    "device",
    "count",
    "inside",
    "outside",
    "outside_count",
    "oversubscription",
    "host_memory_bytes",
    "host_bandwidth_bytes_per_s",
    "host_update_share",
    "host_norm_share",
    "host_link",
    "rack",
)
"""Keys of one ``[[group]]``."""
INSIDE_OF_UNKNOWN_DEVICE = "pcie4"
"""Link between the devices of a node that the catalogue doesn't know and the file doesn't describe."""


def read_file(path: Path) -> JsonObject:
    """Reads a cluster's TOML or JSON file.

    Raises:
        ClusterError: when it is missing or can't be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = parse_json(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ClusterError(f"the cluster's file {path} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise ClusterError(f"{path} is not valid {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(values, dict):
        raise ClusterError(f"{path}: a cluster is a table with [[group]] in it")
    return values


def read_nodes(values: JsonObject) -> list[tuple[Node, int]]:
    """Reads the ``[[group]]`` tables of a cluster with the ``[devices.NAME]`` and ``[links.NAME]`` beside them.

    Raises:
        ClusterError: for unknown keys, devices and links, and for invalid values.
    """
    _check_keys(values, ("name", "group", "devices", "links"), "")
    links = {name: _read_link(name, table) for name, table in _read_tables(values, "links").items()}
    devices = {name: _read_device(name, table) for name, table in _read_tables(values, "devices").items()}
    groups = values.get("group", [])
    # A single [group] table is accepted as a list of one.
    if isinstance(groups, Mapping):
        groups = [groups]
    if not isinstance(groups, Sequence) or isinstance(groups, str):
        raise ClusterError(f"group = {groups!r} must be tables, as [[group]]")
    if not groups:
        raise ClusterError("the cluster has no [[group]]; give one with device = 'h100' and nodes = 8")
    return [_read_group(group, index, devices, links) for index, group in enumerate(groups)]


def _read_group(
    values: JsonObject, index: int, devices: Mapping[str, Device], links: Mapping[str, Link]
) -> tuple[Node, int]:
    """Reads one ``[[group]]``: a node, whose fields override those of the device's standard node, and a count."""
    key_prefix = f"group[{index}]."
    _check_keys(values, NODE_KEYS, key_prefix)
    if "device" not in values:
        raise ClusterError(f"{key_prefix}device is missing; name one, as device = 'h100'")
    name = str(values["device"])
    device = devices.get(name) or catalogue.device(name)
    kind = values.get("kind")
    if kind is not None:
        node = named_node(str(kind), device)
    # A known device comes in its standard node, with the user's figures for it.
    elif known(name):
        node = dataclasses.replace(standard_node(name), device=device)
    else:
        node = Node(device=device, count=1, inside=catalogue.link(INSIDE_OF_UNKNOWN_DEVICE))

    def chosen_link(key: str, default: Link | None) -> Link | None:
        if key not in values:
            return default
        link_name = str(values[key])
        return None if link_name == "none" else links.get(link_name) or catalogue.link(link_name)

    node = node.resized(_read_int(values, "count", node.count, key_prefix))
    outside = chosen_link("outside", node.outside)
    # Without a network there are no cards to count.
    cards = _read_number(values, "outside_count", node.outside_count or 1, key_prefix, "cards") if outside else 0
    rack = _read_int(values, "rack", node.rack, key_prefix)
    inside = chosen_link("inside", node.inside)
    if inside is None and node.count * rack > 1:
        raise ClusterError(
            f"{key_prefix}inside = 'none', but {node.count * rack} devices share it: name a link, or write count = 1"
        )
    node = dataclasses.replace(
        node,
        inside=inside or node.inside,
        outside=outside,
        outside_count=cards,
        oversubscription=_read_number(
            values, "oversubscription", node.oversubscription, key_prefix, "bytes sent over bytes carried"
        ),
        host_link=chosen_link("host_link", node.host_link),
        host_memory_bytes=_read_int(values, "host_memory_bytes", node.host_memory_bytes, key_prefix),
        host_bandwidth_bytes_per_s=_read_number(
            values, "host_bandwidth_bytes_per_s", node.host_bandwidth_bytes_per_s, key_prefix, "bytes per second"
        ),
        host_update_share=_read_number(values, "host_update_share", node.host_update_share, key_prefix, "a share"),
        host_norm_share=_read_number(values, "host_norm_share", node.host_norm_share, key_prefix, "a share"),
        rack=rack,
    )
    return node, _read_int(values, "nodes", 1, key_prefix)


def _read_device(name: str, values: JsonObject) -> Device:
    """Reads one ``[devices.NAME]``, with the fields of ``like`` or of the catalogue's device of that name."""
    keys = [field.name for field in dataclasses.fields(Device) if field.name != "name"]
    _check_keys(values, (*keys, "like"), f"devices.{name}.")
    fields = dict(values)
    base_name = fields.pop("like", None)
    try:
        if base_name is not None or known(name):
            return dataclasses.replace(catalogue.device(str(base_name or name)), name=name, **fields)
        return Device(name=name, **fields)
    except (TypeError, ValueError, AttributeError) as error:
        raise ClusterError(
            f"devices.{name}: {_readable(error)}; or name a device that it is like: like = 'h100'"
        ) from None


def _read_link(name: str, values: JsonObject) -> Link:
    """Reads one ``[links.NAME]``, with the fields of ``like`` or of the catalogue's link of that name."""
    keys = [field.name for field in dataclasses.fields(Link) if field.name != "name"]
    _check_keys(values, (*keys, "like"), f"links.{name}.")
    fields = dict(values)
    base_name = fields.pop("like", None)
    base_fields = catalogue.link(str(base_name)).to_dict() if base_name is not None else {}
    # A link named like one of the catalogue changes only the fields that are given.
    base_fields |= catalogue.link(name).to_dict() if not base_fields and name in catalogue.links() else {}
    try:
        return catalogue.read_link({**base_fields, **fields, "name": name})
    except (TypeError, ValueError, AttributeError) as error:
        raise ClusterError(
            f"links.{name}: {_readable(error)}; or name a link that it is like: like = 'pcie4'"
        ) from None


def _readable(error: Exception) -> str:
    return re.sub(r"^.*__init__\(\) ", "", str(error)).replace("keyword-only arguments", "values")


def _read_tables(values: JsonObject, key: str) -> JsonObject:
    tables = values.get(key, {})
    if not isinstance(tables, Mapping) or not all(isinstance(item, Mapping) for item in tables.values()):
        raise ClusterError(f"{key} must hold a table for each name, as [{key}.NAME]")
    return tables


def _read_int(values: JsonObject, key: str, default: int, key_prefix: str) -> int:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ClusterError(f"{key_prefix}{key} = {value!r} must be a whole number")
    return value


def _read_number(values: JsonObject, key: str, default: float, key_prefix: str, unit: str) -> float:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ClusterError(f"{key_prefix}{key} = {value!r} must be a number of {unit}")
    return float(value)


def _check_keys(values: JsonObject, known_keys: Sequence[str], key_prefix: str) -> None:
    if not isinstance(values, Mapping):
        raise ClusterError(f"{key_prefix.rstrip('.')} must be a table")
    for key in values:
        if key not in known_keys:
            raise ClusterError(f"unknown key '{key_prefix}{key}'{nearest(key, known_keys)}")


def write_nodes(name: str, groups: Sequence[tuple[Node, int]]) -> JsonObject:
    """Returns plain values for `read_nodes`, with every device and link written out."""
    devices: dict[str, Any] = {}
    links: dict[str, Any] = {}
    rows = []
    for node, count in groups:
        row: dict[str, Any] = {"nodes": count, "device": _store_named(devices, node.device), "count": node.count}
        for key in ("inside", "outside", "host_link"):
            link = getattr(node, key)
            row[key] = "none" if link is None else _store_named(links, link)
        row |= {"host_memory_bytes": node.host_memory_bytes, "rack": node.rack}
        row["host_bandwidth_bytes_per_s"] = node.host_bandwidth_bytes_per_s
        for key in ("host_update_share", "host_norm_share"):
            if getattr(node, key):
                row[key] = getattr(node, key)
        if node.outside is not None:
            row["outside_count"] = node.outside_count
            row["oversubscription"] = node.oversubscription
        rows.append(row)
    return {"name": name, "group": rows, "devices": devices, "links": links}


def _store_named(table: dict[str, Any], item: Device | Link) -> str:
    """Stores a device or link in its table; returns its name, numbered where another has the same."""
    values = {key: value for key, value in item.to_dict().items() if key != "name"}
    name, number = item.name, 1
    # Nodes may hold different devices under one name, as one that was calibrated.
    while name in table and table[name] != values:
        number += 1
        name = f"{item.name}-{number}"
    table[name] = values
    return name
