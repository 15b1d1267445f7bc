"""Devices, links and nodes of ``catalogue.toml`` by name, also by vendors' and tables' spellings."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.cluster.device import Device
from meshwright.cluster.link import Link, Protocol
from meshwright.errors import ClusterError, nearest
from meshwright.json_types import JsonObject

FILE = Path(__file__).with_name("catalogue.toml")
_MAKERS = ("nvidia", "amd", "intel", "instinct", "tesla", "geforce", "rtx", "quadro", "dgx", "hgx", "gpu")
NOISE = frozenset((*_MAKERS, "accelerator", "hbm2", "hbm2e", "hbm3", "hbm3e"))
"""Words of a device's name that carry no information."""
FAMILIES: Mapping[str, str] = {"gh": "gh200", "mi300": "mi300x", "mi250": "mi250x", "a10-g": "a10g", "core": "cpu"}
"""Short forms of families."""
FORMS = frozenset(("sxm", "sxm2", "sxm3", "sxm4", "sxm5", "sxm6", "pcie", "nvl", "nvl4", "nvl72", "oam", "ti", "gcd"))
"""Words of a name for the device's form factor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogueEntry:
    """A device of the catalogue, and the fields that a name is matched by."""

    device: Device
    """Its figures."""
    family: str
    """Family name: ``h100``."""
    gb: tuple[int, ...]
    """Memory sizes in GB that appear in names of it."""
    form: tuple[str, ...]
    """Form factors."""
    node: str
    """Name of its standard node."""


@cache
def _read_catalogue() -> JsonObject:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


@cache
def devices() -> dict[str, CatalogueEntry]:
    """Returns every device by its name in the catalogue."""
    entries = {}
    for name, values in _read_catalogue()["devices"].items():
        fields = dict(values)
        name_fields = {key: fields.pop(key) for key in ("family", "gb", "form", "node")}
        entries[name] = CatalogueEntry(
            device=Device(name=name, **fields),
            family=name_fields["family"],
            gb=tuple(name_fields["gb"]),
            form=tuple(name_fields["form"]),
            node=name_fields["node"],
        )
    return entries


@cache
def links() -> dict[str, Link]:
    """Returns every link by its name."""
    return {name: read_link({"name": name} | values) for name, values in _read_catalogue()["links"].items()}


def read_link(values: JsonObject) -> Link:
    """Builds a link from plain values; ``protocols`` are lists of share, start and hop."""
    protocols = tuple(Protocol(*(float(item) for item in fields)) for fields in values.get("protocols", ()))
    return Link(**{**values, "protocols": protocols})


@cache
def nodes() -> dict[str, dict[str, Any]]:
    """Returns the figures of every node by its name: count, links by name, cards, host memory, rack."""
    return dict(_read_catalogue()["nodes"])


@cache
def links_within_nodes() -> frozenset[str]:
    """Returns the links that join devices or the host of some node, and are the network of none."""
    tables = list(nodes().values())
    within = {name for table in tables for key in ("inside", "host_link") if (name := table.get(key))}
    within -= {table.get("outside") for table in tables}
    return frozenset(name for name in within if "ethernet" not in name)  # Gaudi's, which is a network too


def link(name: str) -> Link:
    """Returns a link by name.

    Raises:
        ClusterError: for an unknown one, naming the nearest.
    """
    normalised = name.lower().strip().replace("_", "-")
    if normalised not in links():
        raise ClusterError(f"unknown link '{name}'{nearest(normalised, links())}")
    return links()[normalised]


def device(name: str) -> Device:
    """Returns a device by name: the catalogue's, a vendor's or a table's (``NVIDIA A100-SXM4-80GB``, ``h100_80gb``).

    Raises:
        ClusterError: for an unknown one, naming the nearest.
    """
    return entry(name).device


def entry(name: str) -> CatalogueEntry:
    """Returns a device's entry, with its standard node; see `device` for names."""
    normalised = name.lower().strip()
    # The catalogue's own names need no parsing.
    if normalised in devices():
        return devices()[normalised]
    family, sizes, forms = _parse_name(normalised)
    family_entries = [item for item in devices().values() if item.family == family]
    # Memory sizes and form factors of the name must all match; one that the name leaves out may be any.
    fitting = [
        item
        for item in family_entries
        if (not sizes or set(sizes) & set(item.gb)) and all(_matches_form(form, item.form) for form in forms)
    ]
    if not family_entries:
        families = {item.family for item in devices().values()}
        raise ClusterError(f"unknown device '{name}'{nearest(family or normalised, [*devices(), *families])}")
    if not fitting:
        names = ", ".join(item.device.name for item in family_entries)
        raise ClusterError(f"there is no '{name}' in the catalogue; of this kind it has {names}")
    # Among those that match, the one whose form factor is named exactly wins over one that merely allows it.
    return max(fitting, key=lambda item: sum(form in item.form for form in forms))


def _matches_form(form: str, device_forms: tuple[str, ...]) -> bool:
    """Returns whether a device has a form factor; any generation of SXM matches SXM."""
    return form in device_forms or (form.startswith("sxm") and any(listed.startswith("sxm") for listed in device_forms))


def _parse_name(name: str) -> tuple[str, list[int], list[str]]:
    """Parses a name into family, memory sizes and form factors."""
    # Remarks in parentheses carry no name; "Gaudi 2" is one word in the catalogue.
    text = re.sub(r"\(.*?\)", " ", name).replace("gaudi ", "gaudi")
    sizes: list[int] = []
    forms: list[str] = []
    family_words: list[str] = []
    for token in re.split(r"[\s_/-]+", text):
        size = re.fullmatch(r"(\d+)(?:gi?b)?", token)
        if not token or token in NOISE:
            continue
        if token in FORMS:
            forms.append(token)
        # A number before the family's word is no memory size, unless it ends in gb.
        elif size and (family_words or token.endswith("b")):
            sizes.append(int(size[1]))
        else:
            family_words.append(re.sub(r"^rtx(?=\d|a\d)", "", token))
    # "3080ti" is "3080" with the form factor "ti".
    if family_words and (joined := re.fullmatch(r"(\d{4})(ti)", family_words[0])):
        family_words[0], forms = joined[1], [*forms, joined[2]]
    family = FAMILIES.get("-".join(family_words), "-".join(family_words))
    return family, sizes, forms
