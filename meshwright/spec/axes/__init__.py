"""The mesh axes: one file of facts for each, and `known_axes`, which finds them."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from meshwright.spec.axis import Axis


@cache
def known_axes() -> dict[str, Axis]:
    """Returns every axis that has a file in this folder, outermost first.

    A new axis joins by adding ``spec/axes/<name>.py`` with an ``AXIS``; nothing else lists axes.
    """
    modules = [importlib.import_module(f"{__name__}.{entry.name}") for entry in pkgutil.iter_modules(__path__)]
    axes = [module.AXIS for module in modules if isinstance(getattr(module, "AXIS", None), Axis)]
    return {axis.name: axis for axis in sorted(axes, key=lambda axis: axis.order)}
