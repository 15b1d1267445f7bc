"""Public models by name, as sizes: ``presets.toml``."""

from __future__ import annotations

import dataclasses
import tomllib
from functools import cache
from pathlib import Path

from meshwright.planner.closed_form import Latent, TableSizes

FILE = Path(__file__).with_name("presets.toml")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A public model."""

    sizes: TableSizes
    """Its sizes."""
    source: str
    """The config or paper that states them."""


@cache
def presets() -> dict[str, Preset]:
    """Returns every public model by name, also by the names of others that have the same sizes."""
    models: dict[str, Preset] = {}
    for name, values in tomllib.loads(FILE.read_text(encoding="utf-8")).items():
        aliases, source, latent = values.pop("aliases", []), values.pop("source"), values.pop("latent", None)
        sizes = TableSizes(name=name, latent=None if latent is None else Latent(**latent), **values)
        for alias in (name, *aliases):
            models[alias] = Preset(sizes=dataclasses.replace(sizes, name=alias), source=source)
    return models
