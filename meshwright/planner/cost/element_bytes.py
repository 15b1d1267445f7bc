"""Bytes of an element: of activations and products, and of master weights."""

from __future__ import annotations

from meshwright.spec.layout_fields import FLOAT8_RECIPES

ELEMENT_BYTES = {"float64": 8.0, "float32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp4": 0.5}
"""Bytes of an element by data type; tf32 is stored as float32."""


def master_bytes(precision: str) -> int:
    """Returns the bytes of a master weight, a reduced gradient or a moment: float32, or float64 where all is."""
    return 8 if precision == "float64" else 4


def compute_bytes(precision: str) -> int:
    """Returns the bytes of an activation or a gathered parameter; with products in float8 these are in bf16."""
    return int(ELEMENT_BYTES["bf16" if precision in FLOAT8_RECIPES else precision])
