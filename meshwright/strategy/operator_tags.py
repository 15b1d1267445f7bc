"""What torch's tags say of the operator behind a function's name: element by element, or random."""

from __future__ import annotations

import functools

import torch

from meshwright.torch_compat.tensors import TorchFunction

_OPERATORS = {
    **{"truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "pos": "positive", "invert": "bitwise_not"},
    **{"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "idiv": "div"},
}
"""Operators of Python by torch's names, where these are others."""


@functools.cache
def has_tag(name: str, tag: torch.Tag) -> bool:
    """Returns whether torch's operator behind a function's name, as ``__radd__`` or ``mul_``, has a tag."""
    base = name.strip("_").removeprefix("foreach_")
    if name.startswith("__"):
        base = _OPERATORS.get(base, base)
        if not hasattr(torch.ops.aten, base):
            base = _OPERATORS.get(base[1:], base[1:])  # reflected or in place
    packet = getattr(torch.ops.aten, base, None) or getattr(torch.ops.aten, f"{base}_", None)
    return packet is not None and any(tag in getattr(packet, item).tags for item in packet.overloads())


def is_random(name: str, func: TorchFunction) -> bool:
    """Returns whether a function draws random numbers, which a part would draw alone."""
    return getattr(func, "__module__", "") == "torch.nn.init" or has_tag(name, torch.Tag.nondeterministic_seeded)
