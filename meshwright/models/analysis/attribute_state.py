"""Plain attributes of a module and of those below it: copied, put back, compared between calls of its forward."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from meshwright.parallel.forward_state import OF_MODULES

Place = tuple[str, str]
"""Dotted name of a module, and the key of an attribute of it."""
_UNCHANGING = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, type)
MISSING = object()
"""Stands for an attribute that a module doesn't have."""


class AttributeState:
    """Copies of the plain attributes of a module and of all below it: what is neither parameter, buffer nor module.

    Args:
        module: real; modules and parameters that attributes hold are the same objects in the copies.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = dict(module.named_modules())
        kept = (*self._modules.values(), *module.parameters(), *module.buffers())
        self._kept = {id(item): item for item in kept}
        self.values: dict[Place, Any] = self._copies(
            {(name, key): value for name, child in self._modules.items() for key, value in _attributes(child)}
        )

    def _copies(self, values: dict[Place, Any]) -> dict[Place, Any]:
        """Copies values deeply; what can't be copied is itself. Values that share an object share its copy."""
        memo: dict[int, Any] = dict(self._kept)
        copies = {}
        for place, value in values.items():
            copies[place] = value
            if not isinstance(value, _UNCHANGING) and not callable(value):
                # a lock, a graph's tensor and the like stay the same objects
                with contextlib.suppress(Exception):
                    copies[place] = copy.deepcopy(value, memo)
        return copies

    def restore(self) -> None:
        """Gives every module the attributes that it had."""
        self.set({})

    def set(self, others: dict[Place, Any]) -> None:
        """Gives every module the attributes that it had, but for some.

        Args:
            others: values of these, by their places; `MISSING` where there is none.
        """
        values = self._copies({key: value for key, value in (self.values | others).items() if value is not MISSING})
        for name, child in self._modules.items():
            for key in [key for key, _ in _attributes(child) if (name, key) not in values]:
                del child.__dict__[key]
        for (name, key), value in values.items():
            self._modules[name].__dict__[key] = value

    def changes_to(self, later: AttributeState) -> dict[Place, Any]:
        """Returns the later values of the attributes that differ, by their places; `MISSING` for one that is gone."""
        places = dict.fromkeys((*self.values, *later.values))
        pairs = {place: (self.values.get(place, MISSING), later.values.get(place, MISSING)) for place in places}
        return {place: after for place, (before, after) in pairs.items() if not are_equal(before, after)}


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the plain attributes of one module."""
    yield from [(key, value) for key, value in vars(module).items() if key not in OF_MODULES]


def are_equal(value: object, other: object, compared: set[tuple[int, int]] | None = None) -> bool:
    """Returns whether two values hold the same numbers, texts and tensors; objects are compared by their attributes.

    Args:
        value: anything.
        other: anything.
        compared: pairs, by their ids, that are being compared: values may hold each other.
    """
    compared = set() if compared is None else compared
    if value is other or (id(value), id(other)) in compared:
        return True
    compared.add((id(value), id(other)))
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        if value.shape != other.shape or value.dtype != other.dtype:
            return False
        return value.is_meta or torch.equal(torch.nan_to_num(value.detach()), torch.nan_to_num(other.detach()))
    if type(value) is not type(other):
        return False
    if isinstance(value, float) and value != value:
        return other != other
    if isinstance(value, _UNCHANGING):
        return bool(value == other)
    if isinstance(value, dict):
        return _are_equal_lists([*value.items()], [*other.items()], compared)  # type: ignore[attr-defined]
    if isinstance(value, (list, tuple, deque)):
        return _are_equal_lists(list(value), list(other), compared)  # type: ignore[call-overload]
    if isinstance(value, (set, frozenset)):
        # Copies of objects, as of tensors, have hashes of their own.
        has_copies = any(not isinstance(item, _UNCHANGING) for item in value)
        return len(value) == len(other) if has_copies else value == other  # type: ignore[arg-type]
    fields = None if callable(value) else getattr(value, "__dict__", None)
    return fields is None or are_equal(fields, vars(other), compared)


def _are_equal_lists(values: list[Any], others: list[Any], compared: set[tuple[int, int]]) -> bool:
    """Returns whether two lists are equal, item by item."""
    pairs = zip(values, others)
    return len(values) == len(others) and all(are_equal(value, other, compared) for value, other in pairs)
