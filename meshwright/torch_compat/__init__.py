"""Every private name of torch that this package rests on, with the versions that have it and why nothing public does.

One file for each part of torch, so that using one imports no other. Each states its names in ``PRIVATE_NAMES``; a test
looks each of them up in the torch that is installed and tries what it does, so that a release which changes one fails
there and not in somebody's run.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PrivateName:
    """One private name of torch."""

    path: str
    """``module:attribute.attribute``."""
    reason: str
    """What it is needed for, and why nothing public serves."""
    since: str = "2.11"
    """First supported version that has it."""
    until: str = ""
    """Last version that has it; empty where the newest does."""

    def resolve(self) -> object:
        """Returns the object.

        Raises:
            AttributeError: this torch doesn't have it.
            ImportError: this torch doesn't have its module.
        """
        module, _, attributes = self.path.partition(":")
        value: Any = importlib.import_module(module)
        for name in attributes.split("."):
            value = getattr(value, name)
        return value
