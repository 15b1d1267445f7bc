"""Decodes blocks of rounded values with numpy alone: the server's shards load no torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.spec.compression import BLOCK_VALUES, FORMATS, count_blocks


def encoded_bytes(elements: int, number_format: str, value_bytes: int) -> int:
    """Returns the bytes of a box's values as they travel.

    Args:
        elements: of the box.
        number_format: ``raw``, or one of `spec.compression.FORMATS`.
        value_bytes: of a raw value.
    """
    if number_format == "raw":
        return elements * value_bytes
    return count_blocks(elements) * FORMATS[number_format].block_bytes


def decode_values(data: memoryview, elements: int, number_format: str, dtype: np.dtype) -> NDArray[np.floating]:
    """Returns (elements,) values of ``dtype``.

    Args:
        data: `encoded_bytes` bytes.
        elements: of the box.
        number_format: as in `encoded_bytes`.
        dtype: of the outer weights.
    """
    if number_format == "raw":
        return np.frombuffer(data, dtype=dtype)
    blocks = np.frombuffer(data, dtype=np.uint8).reshape(-1, FORMATS[number_format].block_bytes)
    if number_format == "bf16":
        # bfloat16 is the upper half of a float32.
        wide = np.ascontiguousarray(blocks).view(np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).reshape(-1)[:elements].astype(dtype)
    scales = np.ascontiguousarray(blocks[:, BLOCK_VALUES:]).view(np.float32).astype(dtype)
    codes = np.ascontiguousarray(blocks[:, :BLOCK_VALUES])
    values = codes.view(np.int8).astype(dtype) if number_format == "int8" else _FP8[codes].astype(dtype)
    return (values * scales).reshape(-1)[:elements]


def _fp8_values() -> NDArray[np.float64]:
    """Returns (256,) the values of float8_e4m3fn. Source: Micikevicius et al., FP8 Formats for Deep Learning (2022)."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    sizes = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values = np.where(codes >= 128, -sizes, sizes)
    return np.where(codes & 127 == 127, np.nan, values)


_FP8 = _fp8_values()
RAW = "raw"
WIRE_FORMATS = (RAW, "bf16", "int8", "fp8")
"""What movements travel as: the weights' own type, or blocks of `spec.compression.FORMATS`."""
