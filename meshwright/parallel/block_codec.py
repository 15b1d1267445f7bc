"""Rounds blocks of values to a number format with a scale each, and packs weights into such blocks.

A value that isn't finite spoils its block: what is decoded is NaN, so a step that overflowed is skipped on every rank
as it is without compression. Values beyond float32's range count as not finite.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch

from meshwright.parallel.keyed_random import RowBox, random_fractions, row_keys
from meshwright.spec.compression import BLOCK_VALUES, NumberFormat, count_blocks

_WIRE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
_FLOAT32_MAX, _BF16_MAX = torch.finfo(torch.float32).max, torch.finfo(torch.bfloat16).max
_EXPONENT_BITS = {torch.float32: (torch.int32, 0x7F800000), torch.float64: (torch.int64, 0x7FF0000000000000)}
SLICE_BLOCKS = 4096
"""Blocks that are rounded at a time, 4 MiB of float32: temporaries are some times that, however long the message."""
CORE_SLICE_SHARE = 4
"""On a processor core slices are shorter by this factor: 1 MiB stays in its cache, while only long slices fill the rate
of a GPU's memory."""
_BLOCK_BOX = RowBox(np.zeros(1, dtype=np.int64), np.arange(BLOCK_VALUES))


class BlockCodec:
    """Encodes and decodes blocks of values.

    Args:
        name: of the number format, as in `spec.compression.FORMATS`.
        number_format: its facts.
    """

    def __init__(self, name: str, number_format: NumberFormat) -> None:
        self._dtype, self._format = _WIRE_DTYPES[name], number_format
        self._value_bytes = BLOCK_VALUES * number_format.value_bytes
        self.block_bytes = number_format.block_bytes

    def encode(self, blocks: torch.Tensor, fractions: torch.Tensor | None) -> torch.Tensor:
        """Returns the bytes of some blocks, (N, block_bytes) uint8.

        Args:
            blocks: (N, 256) float32 or float64.
            fractions: (N, 256) float32 random numbers in [0, 1), by which a value is rounded up or down so that the
                mean over draws is the value; None rounds to the nearest, ties to even.
        """
        encoded = blocks.new_empty((len(blocks), self.block_bytes), dtype=torch.uint8)
        if not len(blocks):
            return encoded
        if self._format.largest:
            scaled, scale = self._scaled(blocks)
            encoded[:, self._value_bytes :] = scale.view(torch.uint8)
        else:
            scaled = torch.where(blocks.abs() <= _FLOAT32_MAX, blocks.clamp(-_BF16_MAX, _BF16_MAX), torch.nan)
        largest = self._format.largest or _BF16_MAX
        rounded = rounded_to_format(scaled, self._format, fractions).clamp_(-largest, largest)
        encoded[:, : self._value_bytes] = cast(rounded, self._dtype).view(torch.uint8)
        return encoded

    def decode(self, encoded: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the values, (N, 256) of ``dtype``, of encoded blocks, (N, block_bytes) uint8."""
        if not len(encoded):
            return encoded.new_empty((0, BLOCK_VALUES), dtype=dtype)
        values = encoded.new_empty((len(encoded), BLOCK_VALUES), dtype=dtype)
        widen_into(values, encoded[:, : self._value_bytes].contiguous().view(self._dtype))
        if self._format.largest:
            values *= encoded[:, self._value_bytes :].contiguous().view(torch.float32).to(dtype)
        return values

    def encode_store(
        self, store: BlockStore, count: int, draw_fractions: Callable[[int, int], torch.Tensor] | None
    ) -> torch.Tensor:
        """Returns the bytes of a store's first ``count`` blocks as `encode` does, with temporaries of a slice.

        Args:
            store: whose values are rounded.
            count: blocks.
            draw_fractions: returns the random numbers, (count, 256) float32, of ``count`` blocks from ``first`` on, by
                ``(first, count)``; None rounds to the nearest.
        """
        encoded = torch.empty((count, self.block_bytes), dtype=torch.uint8, device=store.device)
        for first, size in slices(count, store.device):
            fractions = None if draw_fractions is None else draw_fractions(first, size)
            encoded[first : first + size] = self.encode(store.read(first, size), fractions)
        return encoded

    def decode_to_store(self, store: BlockStore, encoded: torch.Tensor) -> None:
        """Writes decoded values, (N, block_bytes) uint8, to a store's first blocks, with temporaries of a slice."""
        for first, size in slices(len(encoded), encoded.device):
            store.write(first, self.decode(encoded[first : first + size], store.dtype))

    def sum_terms(self, terms: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Returns the sum of decoded terms, (N, 256) of ``dtype``, from the first term to the last.

        Args:
            terms: (N, block_bytes) uint8 each.
            dtype: of the sum.
        """
        total = torch.empty((len(terms[0]), BLOCK_VALUES), dtype=dtype, device=terms[0].device)
        for first, size in slices(len(total), total.device):
            target = total[first : first + size]
            target.copy_(self.decode(terms[0][first : first + size], dtype))
            for term in terms[1:]:
                target.add_(self.decode(term[first : first + size], dtype))
        return total

    def rounding_error(
        self,
        store: BlockStore,
        first: int,
        term: torch.Tensor,
        total: torch.Tensor,
        rounded: torch.Tensor,
        terms: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the square of a rounded sum's expected distance from the exact one, and of the sum; scalars each.

        Args:
            store: this rank's exact values.
            first: number of the sum's first block there.
            term: (M, block_bytes) uint8, this rank's values as they were sent.
            total: (M, 256) the sum of all ranks' terms.
            rounded: (M, block_bytes) uint8, the sum as it is sent.
            terms: of the sum.
        """
        error = squared_sum = torch.zeros((), dtype=total.dtype, device=total.device)
        for start, size in slices(len(total), total.device):
            run = slice(start, start + size)
            # The other ranks' terms are rounded as this one's is, independently: their squares add up.
            own_error = self.decode(term[run], total.dtype).sub_(store.read(first + start, size)).square_().sum()
            sum_error = self.decode(rounded[run], total.dtype).sub_(total[run]).square_().sum()
            error = error + own_error * terms + sum_error
            squared_sum = squared_sum + total[run].square().sum()
        return error, squared_sum

    def _scaled(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns blocks, (N, 256), over their scale, and the scales, (N, 1) float32; NaN where not finite."""
        # A tensor of it: by a plain number CUDA multiplies with its reciprocal, which gives other bits than division.
        largest = blocks.new_full((1, 1), self._format.largest)
        scale = cast(blocks.abs().amax(dim=1, keepdim=True) / largest, torch.float32)
        scale = torch.where(torch.isfinite(scale), scale, torch.nan)
        # A scale of zero or NaN divides by one: zeros stay zeros, and NaN times any number is NaN again.
        divisor = torch.where(scale > 0, scale, 1.0).to(blocks.dtype)
        scaled = (blocks / divisor).masked_fill_(torch.isnan(scale), 0.0)
        return scaled.clamp_(-self._format.largest, self._format.largest), scale


def rounded_to_format(
    scaled: torch.Tensor, number_format: NumberFormat, fractions: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns values of a number format, of any shape, next to the scaled ones.

    Args:
        scaled: float32 or float64, none larger than the format's largest.
        number_format: of the values.
        fractions: as for `BlockCodec.encode`.
    """
    distance: float | torch.Tensor = 1.0
    if number_format.mantissa_bits:
        # Numbers of one exponent lie equally far apart; the bits of the exponent alone are that power of two.
        integers, exponent_bits = _EXPONENT_BITS[scaled.dtype]
        distance = scaled.view(integers).bitwise_and(exponent_bits).view(scaled.dtype)
        distance.clamp_(min=2.0**number_format.least_exponent).mul_(2.0**-number_format.mantissa_bits)
    # Division by a power of two is exact, and so is the difference to the floor.
    steps = scaled / distance
    if fractions is None:
        return steps.round_().mul_(distance)
    low = steps.floor()
    # Compared in place, 0 or 1 in the steps' own type: a tensor of truth values would be converted to be added.
    return low.add_(steps.sub_(low).gt_(fractions)).mul_(distance)


class BlockStore(Protocol):
    """Blocks of values that are read and written a slice at a time."""

    dtype: torch.dtype
    """In which they are rounded: float32 or float64."""
    device: torch.device

    def read(self, first: int, count: int) -> torch.Tensor:
        """Returns blocks from ``first`` on, (count, 256) of `dtype`, which nobody may write to."""

    def write(self, first: int, blocks: torch.Tensor) -> None:
        """Writes blocks, (N, 256), from ``first`` on."""


class DenseBlocks:
    """A tensor of blocks, (N, 256), as a store."""

    def __init__(self, blocks: torch.Tensor) -> None:
        self._blocks, self.dtype, self.device = blocks, blocks.dtype, blocks.device

    def read(self, first: int, count: int) -> torch.Tensor:
        """Returns blocks from ``first`` on, (count, 256)."""
        return self._blocks[first : first + count]

    def write(self, first: int, blocks: torch.Tensor) -> None:
        """Writes blocks, (N, 256), from ``first`` on."""
        self._blocks[first : first + len(blocks)] = blocks


class WeightBlocks:
    """Some weights as blocks: each begins a block of its own, filled up with zeros.

    Args:
        names: of the weights.
        sizes: their elements on this rank.
    """

    def __init__(self, names: Sequence[str], sizes: Sequence[int]) -> None:
        self.names, self.sizes = tuple(names), tuple(sizes)
        numbers = [int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little") for name in names]
        # A block is named by its weight and its place there, wherever it travels.
        self._ids = np.concatenate(
            [np.zeros(0, np.int64)]
            + [(number << 31) + np.arange(count_blocks(size)) for number, size in zip(numbers, sizes, strict=True)]
        )
        self._first_blocks = [0, *accumulate(count_blocks(size) for size in sizes)]

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self._ids)

    def count_elements(self, first: int, count: int) -> int:
        """Returns the weights' elements in ``count`` blocks from ``first`` on, without what fills blocks up."""
        return sum(stop - start for _, start, stop, _ in self._runs(first, count))

    def read(self, tensors: Sequence[torch.Tensor], first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns blocks of the weights' elements, (count, 256) of ``dtype``, which nobody may write to.

        Args:
            tensors: the weights' elements, contiguous and of any shapes.
            first: number of the first block.
            count: blocks; zeros fill those up that end a weight, and follow the last weight.
            dtype: in which values are rounded.
        """
        runs = list(self._runs(first, count))
        if len(runs) == 1:
            position, start, stop, _ = runs[0]
            # Most of a large weight: read where it lies.
            if stop - start == count * BLOCK_VALUES and tensors[position].dtype == dtype:
                return tensors[position].reshape(-1)[start:stop].view(count, BLOCK_VALUES)
        flat = tensors[0].new_zeros(count * BLOCK_VALUES, dtype=dtype)
        for position, start, stop, offset in runs:
            flat[offset : offset + stop - start] = tensors[position].reshape(-1)[start:stop]
        return flat.view(count, BLOCK_VALUES)

    def write(self, tensors: Sequence[torch.Tensor], first: int, blocks: torch.Tensor) -> None:
        """Writes the elements of blocks from ``first`` on, (N, 256), to the weights, contiguous and of any shape."""
        flat = blocks.reshape(-1)
        for position, start, stop, offset in self._runs(first, len(blocks)):
            tensors[position].view(-1)[start:stop] = flat[offset : offset + stop - start]

    def fractions(self, draw: str, first: int, count: int, device: torch.device) -> torch.Tensor:
        """Returns random numbers, (count, 256) float32 in [0, 1), of the blocks from ``first`` on.

        Args:
            draw: names the draw.
            first: number of the first block; those after the last weight's stay 0, as they hold zeros.
            count: blocks.
            device: where they are used.
        """
        keys = row_keys(f"compress,{draw}", self._ids[first : first + count])
        drawn = random_fractions(keys, _BLOCK_BOX, device).view(-1, BLOCK_VALUES)
        if len(drawn) == count:
            return drawn
        return torch.cat([drawn, drawn.new_zeros(count - len(drawn), BLOCK_VALUES)])

    def _runs(self, first: int, count: int) -> Iterator[tuple[int, int, int, int]]:
        """Yields (weight, first element, one past the last, offset there) of each weight in a run of blocks."""
        position = max(0, bisect_right(self._first_blocks, first) - 1)
        while position < len(self.sizes) and (begin := self._first_blocks[position]) < first + count:
            start = max(0, first - begin) * BLOCK_VALUES
            stop = min(self.sizes[position], (first + count - begin) * BLOCK_VALUES)
            if start < stop:
                yield position, start, stop, (begin - first) * BLOCK_VALUES + start
            position += 1


class WeightStore:
    """Weights' elements as a store of blocks: packed and unpacked a slice at a time, never as a whole.

    Args:
        weights: how they lie in blocks.
        tensors: their elements, contiguous and of any shapes.
        dtype: in which values are rounded.
    """

    def __init__(self, weights: WeightBlocks, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        self._weights, self._tensors, self.dtype, self.device = weights, tensors, dtype, tensors[0].device

    def read(self, first: int, count: int) -> torch.Tensor:
        """Returns blocks from ``first`` on, (count, 256)."""
        return self._weights.read(self._tensors, first, count, self.dtype)

    def write(self, first: int, blocks: torch.Tensor) -> None:
        """Writes blocks, (N, 256), from ``first`` on."""
        self._weights.write(self._tensors, first, blocks)


def slices(blocks: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Yields (first, count) of runs of at most `SLICE_BLOCKS` blocks, or of `CORE_SLICE_SHARE` of them on a core."""
    size = max(1, SLICE_BLOCKS // CORE_SLICE_SHARE) if device.type == "cpu" else SLICE_BLOCKS
    for first in range(0, blocks, size):
        yield first, min(size, blocks - first)


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor, of any shape, in another type, also inside `Float64Ops`, where `to` narrows nothing."""
    return torch.empty(tensor.shape, dtype=dtype, device=tensor.device).copy_(tensor)


def widen_into(target: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Writes ``values``, of any shape and of a number format, to ``target`` of a wider type, and returns it."""
    if values.dtype != torch.float8_e4m3fn or values.device.type != "cpu":
        return target.copy_(values)
    # Torch converts float8 one value at a time on a core; looking them up takes a fifth of that.
    table = torch.arange(256, dtype=torch.uint8).view(values.dtype).to(target.dtype)
    return target.copy_(table.index_select(0, values.reshape(-1).view(torch.uint8).int()).view(values.shape))
