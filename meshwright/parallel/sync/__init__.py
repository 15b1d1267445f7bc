"""How islands exchange values: one file for each topology, and `known_exchanges`, which finds them."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from meshwright.errors import ConfigError, nearest
from meshwright.parallel.sync.contract import Exchange


@cache
def known_exchanges() -> dict[str, Exchange]:
    """Returns every topology that has a file in this folder, by name.

    A new one joins by adding ``parallel/sync/<name>.py`` with an ``EXCHANGE``; nothing else lists topologies.
    """
    modules = [importlib.import_module(f"{__name__}.{entry.name}") for entry in pkgutil.iter_modules(__path__)]
    exchanges = [module.EXCHANGE for module in modules if isinstance(getattr(module, "EXCHANGE", None), Exchange)]
    return {exchange.name: exchange for exchange in exchanges}


def find_exchange(name: str) -> Exchange:
    """Returns a topology by name.

    Raises:
        ConfigError: there is none; the message names the nearest.
    """
    exchanges = known_exchanges()
    if name not in exchanges:
        raise ConfigError(f"outer.topology = '{name}' is not known{nearest(name, exchanges)}")
    return exchanges[name]
