"""What a module's forward may write to besides its buffers: put back after a run that is to leave no trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


class ForwardState:
    """The arguments of a module's forward, and the attributes of it and of the modules below it, as they are now.

    Args:
        caller: the module.
        experts: a module below it, which is left as it is with all below.
        arguments: of its forward, nested.
    """

    def __init__(self, caller: nn.Module, experts: nn.Module, arguments: object) -> None:
        inside = set(experts.modules())
        self._saved = [
            (module, {key: value for key, value in vars(module).items() if key not in OF_MODULES})
            for module in caller.modules()
            if module not in inside
        ]
        values = [value for _, attributes in self._saved for value in attributes.values()]
        self._contents = [(value, value.copy()) for value in _containers([*values, arguments], set())]
        self._versions = [
            (key, value, value._version)
            for module, attributes in self._saved
            for key, value in (*attributes.items(), *module._parameters.items())
            if isinstance(value, torch.Tensor)
        ]

    def put_back(self) -> str:
        """Sets them again; returns the name of a tensor that was written into, "" for none."""
        for module, attributes in self._saved:
            for key in [key for key in vars(module) if key not in OF_MODULES and key not in attributes]:
                del module.__dict__[key]
            module.__dict__.update(attributes)
        for value, content in self._contents:
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)
        return next((key for key, tensor, version in self._versions if tensor._version != version), "")


OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that torch gives every module."""


def _containers(value: object, seen: set[int]) -> Iterator[Any]:
    """Yields the lists, dicts and sets in a value, each once, from the outermost to the innermost."""
    if not isinstance(value, list | tuple | dict | set) or id(value) in seen:
        return
    seen.add(id(value))
    if type(value) in (list, dict, set):
        yield value
    if not isinstance(value, set):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _containers(item, seen)
