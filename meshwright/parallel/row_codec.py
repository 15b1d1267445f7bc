"""Rows of tokens in float8 on their way to experts: e4m3 with a power of two as the scale of each 128 values.

Such a scale costs no precision, as float8 has an exponent of its own, and a row that was rounded once is rounded to
itself, so that on a way of two exchanges the second changes nothing. Values in a run with one that isn't finite, or
lies beyond float32's range, arrive as NaN: a step that overflowed is skipped as it is without rounding.

Source: DeepSeek-AI, DeepSeek-V3 (2024), sections 3.2.2 and 3.3.2, for what is rounded, runs of 128 and powers of two;
Rouhani et al., OCP Microscaling Formats (2023), section 5.4.1, for a scale of eight bits (E8M0).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.parallel.block_codec import cast, rounded_to_format, widen_into
from meshwright.spec.compression import FLOAT8_CAPABILITY, FORMATS, RUN_VALUES, row_bytes

_MANTISSA_BITS = 23
"""Of float32."""
_INFINITE = 0x7F800000
"""Bits of float32's infinity; those of what isn't a number are above."""
_LARGEST_SCALE = 255 - 8
"""Exponent of the scale of float32's largest number."""
_NOT_A_NUMBER = 0xFF
"""The scale of a run with a value that isn't finite."""
_LARGEST_EXPONENT = 8
"""Of e4m3, whose largest number is 1.75 * 2**8."""
_ABOVE_LARGEST = 0x1FFFFF
"""Added to the bits of a float32 it raises the exponent where the mantissa is above 1.75."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTransfer:
    """Rows that have come in float8, for who checks them."""

    exact: torch.Tensor
    """(N, D), what was sent."""
    arrived: torch.Tensor
    """(N, D), what the program reads."""


class RowCodec:
    """Rounds rows of tokens, or of their gradients, to float8, and decodes them.

    Args:
        is_fused: whether torch.compile makes three kernels of both; else they are 22.
    """

    def __init__(self, is_fused: bool = False) -> None:
        self.observer: Callable[[RowTransfer], None] | None = None
        """Checks all rows that come, and may change what the program reads; where a proof set it."""
        # How many rows there are is known at run time alone.
        self._encode: Callable[[torch.Tensor], torch.Tensor] = _fused(_encode) if is_fused else _encode
        self._decode_into: Callable[[torch.Tensor, torch.Tensor], None] = (
            _fused(_decode_into) if is_fused else _decode_into
        )

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the bytes of ``rows: (N, D)``, (N, row_bytes(D)) uint8: D values, then the exponents of the scales.

        Args:
            rows: of any floating dtype, rounded to the nearest, ties to even.
        """
        if not rows.numel():
            return rows.new_empty((len(rows), row_bytes(rows.shape[1])), dtype=torch.uint8)
        return self._encode(rows)

    def decode_into(self, rows: torch.Tensor, encoded: torch.Tensor) -> None:
        """Writes the values of ``encoded: (N, row_bytes(D)) uint8`` to ``rows: (N, D)``, of any floating dtype."""
        if rows.numel():
            self._decode_into(rows, encoded)


def can_fuse(device: torch.device) -> bool:
    """Returns whether the compiler makes kernels with float8 for a device: of GPUs those that have such products."""
    if device.type != "cuda":
        return False
    major, minor = torch.cuda.get_device_capability(device)
    return major + minor / 10 >= FLOAT8_CAPABILITY


def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True, fullgraph=True)
    return compiled


def _encode(rows: torch.Tensor) -> torch.Tensor:
    """Returns what `RowCodec.encode` does of ``rows: (N, D)``, (N, row_bytes(D)) uint8."""
    count, width = rows.shape
    encoded = rows.new_empty((count, row_bytes(width)), dtype=torch.uint8)
    # A scale may lie beyond float16's range; in the others a product with a power of two is exact.
    wide = rows.float() if rows.dtype == torch.float16 else rows
    runs = _in_runs(wide)
    largest = cast(runs.abs().amax(dim=2), torch.float32)
    bits = largest.view(torch.int32)
    exponents = ((bits + _ABOVE_LARGEST) >> _MANTISSA_BITS) - _LARGEST_EXPONENT
    # Smaller scales aren't normal numbers, which some devices take for zero.
    exponents = exponents.clamp_(1, _LARGEST_SCALE)
    # The exponent of 2**e is kept as e + 127, and so that of 2**-e is 254 less it.
    scaled = runs * cast(_power_of_two(254 - exponents), runs.dtype).unsqueeze(2)
    exponents.masked_fill_(bits >= _INFINITE, _NOT_A_NUMBER)
    if scaled.dtype == torch.float64:
        # Torch narrows to float32 first, which would round twice.
        scaled = rounded_to_format(scaled, FORMATS["fp8"])
    encoded[:, :width].view(torch.float8_e4m3fn).copy_(scaled.view(count, -1)[:, :width])
    encoded[:, width:] = exponents
    return encoded


def _decode_into(rows: torch.Tensor, encoded: torch.Tensor) -> None:
    """Writes the values of ``encoded: (N, row_bytes(D)) uint8`` to ``rows: (N, D)``."""
    count, width = rows.shape
    exponents = encoded[:, width:].to(torch.int32)
    scale = _power_of_two(exponents).masked_fill_(exponents == _NOT_A_NUMBER, torch.nan)
    # As for encoding, a scale may lie beyond float16's range.
    is_narrow = rows.dtype == torch.float16
    values = torch.empty_like(rows, dtype=torch.float32) if is_narrow else rows
    widen_into(values, encoded[:, :width].view(torch.float8_e4m3fn))
    scale = cast(scale, values.dtype)
    if width % RUN_VALUES:
        values.mul_(scale.repeat_interleave(RUN_VALUES, dim=1)[:, :width])
    else:
        values.view(count, -1, RUN_VALUES).mul_(scale.unsqueeze(2))
    if is_narrow:
        # What was rounded up beyond the largest number of float16.
        largest = torch.finfo(rows.dtype).max
        rows.copy_(values.clamp_(-largest, largest))


def _in_runs(rows: torch.Tensor) -> torch.Tensor:
    """Returns (N, ceil(D/128), 128) of ``rows: (N, D)``, the last run filled up with zeros."""
    missing = -rows.shape[1] % RUN_VALUES
    if missing:
        rows = torch.cat([rows, rows.new_zeros(len(rows), missing)], dim=1)
    return rows.reshape(len(rows), -1, RUN_VALUES)


def _power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Returns 2**(e - 127) in float32 of each e of ``exponents: int32``, from 1 to 254, of the same shape."""
    return (exponents << _MANTISSA_BITS).view(torch.float32)
