"""The text form of a model's sizes: ``layers=96,width=12288,heads=96,vocab=51200``."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Any

from meshwright.errors import ConfigError, nearest
from meshwright.planner.closed_form import TableSizes

TRUTHS = MappingProxyType(dict.fromkeys(("true", "1", "yes"), True) | dict.fromkeys(("false", "0", "no"), False))
"""What is written for true and for false."""
_MOST_LAYERS = 10_000
"""Most blocks; a search takes a minute of them, and public models have 126 at the most."""
_MOST_SIZE = 1 << 31
"""Largest other number."""


def parse_sizes(text: str) -> TableSizes:
    """Returns the sizes that a text gives.

    Args:
        text: ``name=value`` separated by commas; layers, width, heads and vocab are needed.

    Raises:
        ConfigError: for a size that isn't known, isn't a number, is missing or given twice.
    """
    field_types = {item.name: str(item.type) for item in dataclasses.fields(TableSizes) if item.name != "latent"}
    values: dict[str, Any] = {}
    for assignment in (assignment.strip() for assignment in text.split(",") if assignment.strip()):
        key, equals, value = assignment.partition("=")
        if key not in field_types or not equals:
            raise ConfigError(
                f"sizes: '{assignment}' is unknown{nearest(key, field_types)}; write layers=96,width=12288,..."
            )
        if key in values:
            raise ConfigError(f"sizes: {key} is given twice; leave one of them")
        values[key] = _parse_size(key, value, field_types[key])
    missing = [key for key in ("layers", "width", "heads", "vocab") if key not in values]
    if missing:
        raise ConfigError(f"sizes: {', '.join(missing)} missing; a model needs layers, width, heads and vocab")
    return TableSizes(**({"name": "sizes"} | values))


def _parse_size(key: str, value: str, field_type: str) -> str | int | bool:
    if "bool" in field_type:
        if value.lower() not in TRUTHS:
            raise ConfigError(f"sizes: {key}={value} is neither true nor false")
        return TRUTHS[value.lower()]
    if field_type == "str":
        return value
    if not (value.isascii() and value.isdecimal()):
        raise ConfigError(f"sizes: {key}={value} is not a whole number")
    most = _MOST_LAYERS if key == "layers" else _MOST_SIZE
    # Python refuses to read thousands of digits.
    if len(value) > 20 or int(value) > most:
        raise ConfigError(f"sizes: {key}={value[:20]} is more than can be planned for; it goes up to {most}")
    return int(value)
