"""Public models by name, as sizes: ``presets.toml``."""

from __future__ import annotations

import dataclasses
import tomllib
from functools import cache
from pathlib import Path

from meshwright.planner.closed_form import Latent, TableSizes, shape_from_sizes
from meshwright.planner.preset_bytes import CountedPreset, counted_preset

FILE = Path(__file__).with_name("presets.toml")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A public model."""

    sizes: TableSizes
    """Its sizes."""
    source: str
    """The config or paper that states them."""
    counted: CountedPreset | None
    """What its modules take; None where they weren't counted, so that it is planned as a standard transformer."""


@cache
def presets() -> dict[str, Preset]:
    """Returns every public model by name, also by the names of others that have the same sizes."""
    models: dict[str, Preset] = {}
    for name, values in tomllib.loads(FILE.read_text(encoding="utf-8")).items():
        aliases, source, latent = values.pop("aliases", []), values.pop("source"), values.pop("latent", None)
        sizes = TableSizes(name=name, latent=None if latent is None else Latent(**latent), **values)
        counted = counted_preset(name, shape_from_sizes(sizes))
        for alias in (name, *aliases):
            models[alias] = Preset(sizes=dataclasses.replace(sizes, name=alias), source=source, counted=counted)
    return models
