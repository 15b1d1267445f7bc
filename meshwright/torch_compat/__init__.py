"""Every private name of torch that this package rests on, with the versions that have it and why nothing public does.

One file for each part of torch, so that using one imports no other. Each states its names in ``PRIVATE_NAMES``; a house
rule finds names that are used and not stated. A test looks each of them up in the torch that is installed and tries
what it does, so that a release which changes one fails there and not in somebody's run.
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
    of_instances: bool = False
    """Whether the class itself lacks it, since its ``__init__`` or a later call sets it."""
    needs_cuda: bool = False
    """Whether torch has it only where it was built for GPUs."""

    def is_in(self, version: str) -> bool:
        """Returns whether a version of torch, such as ``2.13.0+cpu``, has the name."""
        release = _release(version)
        return _release(self.since) <= release and not (self.until and release > _release(self.until))

    def resolve(self) -> object:
        """Returns the object, or for a name of instances alone the class.

        Raises:
            AttributeError: this torch doesn't have it.
            ImportError: this torch doesn't have its module.
        """
        module, _, attributes = self.path.partition(":")
        value: Any = importlib.import_module(module)
        names = attributes.split(".")
        for name in names[:-1] if self.of_instances else names:
            value = getattr(value, name)
        return value


def _release(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)
