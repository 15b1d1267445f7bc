"""Devices, links and nodes by name, as ``catalogue.toml`` has them; tolerant of how vendors and tables write names."""

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

FILE = Path(__file__).with_name("catalogue.toml")
_MAKERS = ("nvidia", "amd", "intel", "instinct", "tesla", "geforce", "rtx", "quadro", "dgx", "hgx", "gpu")
NOISE = frozenset((*_MAKERS, "accelerator", "hbm2", "hbm2e", "hbm3", "hbm3e"))
"""Words of a device's name that tell nothing which the rest doesn't."""
FAMILIES: Mapping[str, str] = {"gh": "gh200", "mi300": "mi300x", "mi250": "mi250x", "a10-g": "a10g", "core": "cpu"}
"""Short forms of families."""
FORMS = frozenset(("sxm", "sxm2", "sxm3", "sxm4", "sxm5", "sxm6", "pcie", "nvl", "nvl4", "nvl72", "oam", "ti", "gcd"))
"""Words of a name that say how the device is mounted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogueEntry:
    """A device of the catalogue, and what its name is matched by."""

    device: Device
    """Its figures."""
    family: str
    """``h100``."""
    gb: tuple[int, ...]
    """Sizes of memory that names give it."""
    form: tuple[str, ...]
    """How it is mounted."""
    node: str
    """The node that it usually comes in."""


@cache
def _read() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


@cache
def devices() -> dict[str, CatalogueEntry]:
    """Returns every device by its name in the catalogue."""
    found = {}
    for name, values in _read()["devices"].items():
        kept = dict(values)
        matched = {key: kept.pop(key) for key in ("family", "gb", "form", "node")}
        found[name] = CatalogueEntry(
            device=Device(name=name, **kept),
            family=matched["family"],
            gb=tuple(matched["gb"]),
            form=tuple(matched["form"]),
            node=matched["node"],
        )
    return found


@cache
def links() -> dict[str, Link]:
    """Returns every link by its name."""
    return {name: read_link({"name": name} | values) for name, values in _read()["links"].items()}


def read_link(values: Mapping[str, Any]) -> Link:
    """Builds a link from plain values; ``protocols`` are lists of share, start and hop."""
    ways = tuple(Protocol(*(float(item) for item in way)) for way in values.get("protocols", ()))
    return Link(**{**values, "protocols": ways})


@cache
def nodes() -> dict[str, dict[str, Any]]:
    """Returns the figures of every node by its name: count, links by name, cards, host memory, rack."""
    return dict(_read()["nodes"])


def link(name: str) -> Link:
    """Returns a link by name.

    Raises:
        ClusterError: for an unknown one, naming the nearest.
    """
    plain = name.lower().strip().replace("_", "-")
    if plain not in links():
        raise ClusterError(f"unknown link '{name}'{nearest(plain, links())}")
    return links()[plain]


def device(name: str) -> Device:
    """Returns a device by name: the catalogue's, a vendor's or a table's (``NVIDIA A100-SXM4-80GB``, ``h100_80gb``).

    Raises:
        ClusterError: for an unknown one, naming the nearest.
    """
    return entry(name).device


def entry(name: str) -> CatalogueEntry:
    """Returns a device with the node that it comes in; see `device`."""
    plain = name.lower().strip()
    if plain in devices():
        return devices()[plain]
    family, sizes, forms = _words(plain)
    known = [item for item in devices().values() if item.family == family]
    fitting = [
        item
        for item in known
        if (not sizes or set(sizes) & set(item.gb)) and all(_mounted(form, item.form) for form in forms)
    ]
    if not known:
        families = {item.family for item in devices().values()}
        raise ClusterError(f"unknown device '{name}'{nearest(family or plain, [*devices(), *families])}")
    if not fitting:
        names = ", ".join(item.device.name for item in known)
        raise ClusterError(f"there is no '{name}' in the catalogue; of this kind it has {names}")
    # Among those that fit, one whose form is named exactly goes before one that merely allows it.
    return max(fitting, key=lambda item: sum(form in item.form for form in forms))


def _mounted(form: str, forms: tuple[str, ...]) -> bool:
    """Whether a device comes in a form; any generation of SXM is SXM."""
    return form in forms or (form.startswith("sxm") and any(other.startswith("sxm") for other in forms))


def _words(name: str) -> tuple[str, list[int], list[str]]:
    """Splits a name into the family, the sizes of memory and the forms that it gives."""
    text = re.sub(r"\(.*?\)", " ", name).replace("gaudi ", "gaudi")
    sizes: list[int] = []
    forms: list[str] = []
    rest: list[str] = []
    for word in re.split(r"[\s_/-]+", text):
        size = re.fullmatch(r"(\d+)(?:gi?b)?", word)
        if not word or word in NOISE:
            continue
        if word in FORMS:
            forms.append(word)
        elif size and (rest or word.endswith("b")):
            sizes.append(int(size[1]))
        else:
            rest.append(re.sub(r"^rtx(?=\d|a\d)", "", word))
    if rest and (joined := re.fullmatch(r"(\d{4})(ti)", rest[0])):
        rest[0], forms = joined[1], [*forms, joined[2]]
    family = FAMILIES.get("-".join(rest), "-".join(rest))
    return family, sizes, forms
