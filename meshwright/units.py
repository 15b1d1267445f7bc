"""Quantities that a reader must not confuse, and how they are printed."""

from __future__ import annotations

import math
from typing import NewType

Flops = NewType("Flops", float)
"""Floating-point operations, so that nobody takes them for a rate."""


def _scaled(value: float, base: float, names: tuple[str, ...]) -> str:
    size, name = float(value), names[0]
    for name in names:
        if abs(size) < base or name == names[-1]:
            break
        size /= base
    digits = 0 if name == names[0] and size == int(size) else (2 if abs(size) < 10 else 1)
    return f"{size:.{digits}f} {name}".rstrip()


def format_bytes(value: float) -> str:
    """Formats a number of bytes with binary prefixes: ``1536`` becomes ``1.50 KiB``."""
    return _scaled(value, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def parse_count(text: str) -> float | None:
    """Parses a plain count with a decimal prefix: ``15T`` becomes 15e12; None for any other text."""
    text = text.strip().replace("_", "")
    prefixes = {"k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
    factor = prefixes.get(text[-1:], 1.0)
    digits = text[:-1] if text[-1:] in prefixes else text
    try:
        value = float(digits) * factor
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def format_count(value: float) -> str:
    """Formats a plain count with decimal prefixes: ``20_000_000`` becomes ``20.0 M``."""
    return _scaled(value, 1000.0, ("", "k", "M", "G", "T", "P"))


def format_seconds(value: float) -> str:
    """Formats a duration in seconds: ``0.0031`` becomes ``3.1 ms``, ``3700`` becomes ``1 h 01 min``."""
    if value < 1.0:
        return f"{value * 1e3:.1f} ms"
    if value < 120.0:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"
