"""Seconds in which a device rounds and decodes what travels in fewer bits, measured by calibration or from bytes.

The work runs where the model is computed: on a core beside everything else, on a GPU in kernels that fill its memory's
rate. So it adds to a step, wherever the wire hides. Of E values summed over n copies, with r, d and b the seconds to
round a value, to decode one, and to book the error of one,

    (1 + 1/n) E r + 2 E d + E b / n

since each copy rounds its own E and the sum of its E/n, decodes n terms of E/n, and all of the sum (`compression`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from meshwright.cluster.calibration import Calibration
from meshwright.cluster.device import Device
from meshwright.planner.cost.kernels import move_s
from meshwright.planner.cost.layout_batch import Array
from meshwright.spec.compression import FORMATS, METHODS

ROUND_BYTES = 208.0
"""Bytes that a device's memory moves to draw a random number and round a value by it. Counted on
`parallel.block_codec`: about 12 element-wise operations to draw and 14 to encode, which read and write 4 bytes each."""
NEAREST_BYTES = 112.0
"""The same to round to the nearest, without a draw."""
DECODE_BYTES = 24.0
"""The same to decode a value and add it to a sum or write it to its place: three operations."""
BOOK_BYTES = 96.0
"""The same to book the error of a summed value: its term and the sum decoded, two differences, three squares added."""
CORE_BYTE = "core_byte"
"""Name, in a calibration's table of the host, of a core's seconds for a byte that it sends over a network."""
REFERENCE_ELEMENTS = 1 << 20
"""Elements at which measured operations are read: about those of a message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundingTimes:
    """Seconds of a value, by the code of its number format in a batch of layouts: 0 for exact values."""

    round_s: tuple[float, ...]
    """By a random number."""
    nearest_s: tuple[float, ...]
    decode_s: tuple[float, ...]
    book_s: tuple[float, ...]
    """To book the error of a summed value, for metrics."""

    @classmethod
    def of(cls, device: Device, calibration: Calibration | None) -> Self:
        """Returns a device's times: of its calibration, or by the bytes that move where that has none of a format."""

        def by_format(operation: str, moved_bytes: float) -> tuple[float, ...]:
            names = [f"{operation}_{number_format}" for number_format in FORMATS]
            # Sums with error feedback round nothing.
            return 0.0, *(_value_s(name, moved_bytes, device, calibration) for name in names), *_NO_FORMAT

        return cls(
            round_s=by_format("round", ROUND_BYTES),
            nearest_s=by_format("nearest", NEAREST_BYTES),
            decode_s=by_format("decode", DECODE_BYTES),
            book_s=by_format("book", BOOK_BYTES),
        )

    def sum_s(self, codes: Array, elements: Array, copies: Array) -> Array:
        """Returns seconds of a rounded sum over copies on each of them, (N, P).

        Args:
            codes: (N,) of number formats.
            elements: (N, P) values that a copy rounds.
            copies: (N,) that exchange them.
        """
        index, shares = codes.astype(int), 1.0 / copies
        round_s, decode_s, book_s = (np.asarray(table)[index] for table in (self.round_s, self.decode_s, self.book_s))
        value_s = (1.0 + shares) * round_s + 2.0 * decode_s + shares * book_s
        return np.asarray(elements * value_s[:, None])

    def gather_s(self, codes: Array, owned: Array, elements: Array) -> Array:
        """Returns seconds of a gather of weights that are rounded to the nearest, (N, P).

        Args:
            codes: (N,) of number formats.
            owned: (N, P) weights that a rank rounds.
            elements: (N, P) that it decodes.
        """
        index = codes.astype(int)
        return np.asarray(
            owned * np.asarray(self.nearest_s)[index][:, None] + elements * np.asarray(self.decode_s)[index][:, None]
        )


_NO_FORMAT = (0.0,) * (len(METHODS) - len(FORMATS))


def _value_s(name: str, moved_bytes: float, device: Device, calibration: Calibration | None) -> float:
    """Returns seconds of a value."""
    if calibration is None or not calibration.has_operation(name):
        return float(move_s(moved_bytes, device))
    return float(calibration.operation_s(name, REFERENCE_ELEMENTS)) / REFERENCE_ELEMENTS
