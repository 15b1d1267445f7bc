"""Random numbers by place: which number an element gets depends on where it lies in its row, not on who computes it.

A draw is named by a text (seed, step, layer, call, number). Its element at place ``last`` of line ``line`` of row
``row`` gets 32 bits from a hash of all these, so a rank makes the numbers of its own box of the tensor and no others:

    a, b  = low and high half of splitmix64(base + (row + 1) x 0x9E3779B97F4A7C15), base = blake2b(text), 8 bytes
    u, v  = mix(line x 0x9E3779B9 + a), mix(line x 0x85EBCA6B + b)
    x     = last x 0x9E3779B9 + u;  x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x += v;  x *= 0x846CA68B;
            x ^= x >> 16

all modulo 2^32, with mix(x) the same three shifts and two products without v. On the CPU numpy runs this in runs that
fit the cache, faster than a generator of torch makes its numbers; on a GPU one kernel drops elements as it hashes them
(`parallel.triton_kernels.dropout`), and torch computes numbers that aren't for dropout, and all where Triton is absent.
Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011), for numbers by counter; Wellons,
Prospecting for hash functions (2018), for shifts and factors; Steele et al., Fast splittable pseudorandom number
generators (OOPSLA 2014), for splitmix64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.parallel.triton_kernels import load_kernels

_SPLITMIX_STEP = 0x9E3779B97F4A7C15
GOLDEN, MURMUR, FACTOR_1, FACTOR_2 = 0x9E3779B9, 0x85EBCA6B, 0x7FEB352D, 0x846CA68B
_ELEMENTS_AT_ONCE = 1 << 15
"""Elements that are hashed at once: 128 KiB of integers and as much of their shifts stay in a core's cache."""
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Words = NDArray[np.uint32]


def seed_all(seed: int) -> None:
    """Seeds the generators that are in use, as `torch.manual_seed` does, which costs a millisecond on every call."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def generator_states() -> list[torch.Tensor]:
    """Returns the states, (bytes,) uint8 each, of the generators that `seed_all` seeds; every draw changes them."""
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


class DrawnStates:
    """The generators that `seed_all` seeds, as what each of two forwards keeps (`parallel.turns`)."""

    OF_FORWARD = ("states",)
    """What belongs to a forward that runs."""

    @property
    def states(self) -> list[torch.Tensor]:
        """Their states, (bytes,) uint8 each."""
        return generator_states()

    @states.setter
    def states(self, states: list[torch.Tensor]) -> None:
        """Sets them, (bytes,) uint8 each."""
        torch.default_generator.set_state(states[0])
        for state in states[1:]:
            torch.cuda.set_rng_state(state)


@dataclass(frozen=True, slots=True)
class RowBox:
    """Which elements of each row's tensor a rank has: all lines x all places."""

    lines: NDArray[np.int64]
    """(L,) numbers of the lines: places in all dims of a row but the last, counted over the whole row."""
    columns: NDArray[np.int64]
    """(J,) places in the last dim of the whole row."""
    device_copies: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, compare=False)
    """Lines and places on devices that asked for them, int32."""

    def on_device(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the lines, (L,), and the columns, (J,), on a device, int32."""
        if device not in self.device_copies:
            self.device_copies[device] = _on_device(self.lines, device), _on_device(self.columns, device)
        return self.device_copies[device]


def row_keys(text: str, rows: NDArray[np.int64]) -> Words:
    """Returns (B, 2): the two keys of each row of a draw."""
    base = np.uint64(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))
    # splitmix64 with the row as its counter.
    z = (rows.astype(np.uint64) + np.uint64(1)) * np.uint64(_SPLITMIX_STEP) + base
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return np.stack([z & np.uint64(0xFFFFFFFF), z >> np.uint64(32)], axis=1).astype(np.uint32)


def dropout_mask(keys: Words, box: RowBox, p: float, device: torch.device) -> torch.Tensor:
    """Returns (B, L, J) bool: True where dropout of probability ``p`` keeps an element."""
    shape, bound = (len(keys), len(box.lines), len(box.columns)), _bound(p)
    # p = 1 keeps nothing, and its bound doesn't fit 32 bits.
    if bound == 2**32:
        return torch.zeros(shape, dtype=torch.bool, device=device)
    if (kernel := device_kernel(device)) is not None:
        drawn: torch.Tensor = kernel.mask(_on_device(keys, device), *box.on_device(device), bound)
        return drawn
    if device.type != "cpu":
        # The device's bits are shifted by 2^31 (`_bits_on`), and so is the bound.
        return _bits_on(keys, box, device) >= bound - 2**31
    mask = np.empty((shape[0] * shape[1], shape[2]), dtype=np.bool_)
    # P(bits < p x 2^32) = p, so an element is kept with probability 1 - p.
    threshold = np.uint32(bound)
    _hash(keys, box, lambda rows, bits: np.greater_equal(bits, threshold, out=mask[rows]))
    return torch.from_numpy(mask.reshape(shape))


def drop_in_one_kernel(x: torch.Tensor, keys: Words, box: RowBox, p: float) -> torch.Tensor | None:
    """Returns ``x / (1 - p)`` where dropout keeps an element, else 0; None where no kernel does it at once.

    Args:
        x: B L J elements in any shape.
        keys: (B, 2), of its rows.
        box: of each row.
        p: probability.
    """
    bound = _bound(p)
    if x.dtype not in _KERNEL_DTYPES or bound == 2**32 or (kernel := device_kernel(x.device)) is None:
        return None
    places = _on_device(keys, x.device), *box.on_device(x.device)
    kept: torch.Tensor = kernel.drop(x, *places, bound, 1.0 / (1.0 - p))
    return kept


def device_kernel(device: torch.device) -> Any:
    """Returns `parallel.triton_kernels.dropout`; None on a CPU, or where Triton or its C compiler is absent."""
    return load_kernels("dropout") if device.type == "cuda" else None


def _bound(p: float) -> int:
    """Returns the bits from which on an element is kept: P(bits < p x 2^32) = p."""
    return min(round(p * 2**32), 2**32)


def uniform(keys: Words, box: RowBox, device: torch.device) -> torch.Tensor:
    """Returns (B, L, J) float64 numbers between 0 and 1, neither of which is one of them."""
    shape = (len(keys), len(box.lines), len(box.columns))
    if device.type != "cpu":
        return (_bits_on(keys, box, device).to(torch.float64) + (2**31 + 0.5)) / 2**32
    out = np.empty((shape[0] * shape[1], shape[2]), dtype=np.float64)
    _hash(keys, box, lambda rows, bits: np.add(bits, 0.5, out=out[rows]))
    return torch.from_numpy(out.reshape(shape)).div_(2**32)


def random_fractions(keys: Words, box: RowBox, device: torch.device) -> torch.Tensor:
    """Returns (B, L, J) float32 numbers in [0, 1): the upper 24 bits of each element's, which float32 holds exactly."""
    shape = (len(keys), len(box.lines), len(box.columns))
    if device.type != "cpu":
        # The device's bits are shifted by 2^31 (`_bits_on`): half of the range, added back after the division.
        return (_bits_on(keys, box, device) >> 8).to(torch.float32).mul_(2.0**-24).add_(0.5)
    out = np.empty((shape[0] * shape[1], shape[2]), dtype=np.float32)

    def fill(rows: slice, bits: Words) -> None:
        np.right_shift(bits, np.uint32(8), out=bits)
        out[rows] = bits

    _hash(keys, box, fill)
    out *= np.float32(2.0**-24)
    return torch.from_numpy(out.reshape(shape))


def _mix(x: Words) -> Words:
    x ^= x >> np.uint32(16)
    x *= np.uint32(FACTOR_1)
    x ^= x >> np.uint32(15)
    x *= np.uint32(FACTOR_2)
    x ^= x >> np.uint32(16)
    return x


def _hash(keys: Words, box: RowBox, consume: Callable[[slice, Words], object]) -> None:
    """Hands over the bits of all elements, some of the (B x L) lines at a time."""
    lines, columns = box.lines.astype(np.uint32), box.columns.astype(np.uint32) * np.uint32(GOLDEN)
    u = _mix(lines * np.uint32(GOLDEN) + keys[:, :1]).reshape(-1, 1)
    v = _mix(lines * np.uint32(MURMUR) + keys[:, 1:]).reshape(-1, 1)
    lines_at_once = max(1, _ELEMENTS_AT_ONCE // max(1, len(columns)))
    for start in range(0, len(u), lines_at_once):
        rows = slice(start, start + lines_at_once)
        # In place, two buffers: `x` and `shifted` stay in the cache.
        x = columns + u[rows]
        shifted = x >> np.uint32(16)
        x ^= shifted
        x *= np.uint32(FACTOR_1)
        np.right_shift(x, np.uint32(15), out=shifted)
        x ^= shifted
        x += v[rows]
        x *= np.uint32(FACTOR_2)
        np.right_shift(x, np.uint32(16), out=shifted)
        x ^= shifted
        consume(rows, x)


def _bits_on(keys: Words, box: RowBox, device: torch.device) -> torch.Tensor:
    """Returns (B, L, J) int32 on a device: the same bits, read as signed numbers 2^31 lower."""

    # int32 sums and products wrap as those of uint32 do; a right shift copies the sign bit, which `fold` clears.
    def signed(factor: int) -> int:
        return factor - 2**32 if factor >= 2**31 else factor

    def fold(x: torch.Tensor, by: int) -> torch.Tensor:
        return x.bitwise_xor_((x >> by).bitwise_and_((1 << (32 - by)) - 1))

    def mix(x: torch.Tensor, addend: torch.Tensor | None = None) -> torch.Tensor:
        x = fold(fold(x, 16).mul_(FACTOR_1), 15)
        return fold((x if addend is None else x.add_(addend)).mul_(signed(FACTOR_2)), 16)

    row_keys, (lines, columns) = _on_device(keys, device), box.on_device(device)
    u = mix(lines * signed(GOLDEN) + row_keys[:, :1]).unsqueeze(-1)
    v = mix(lines * signed(MURMUR) + row_keys[:, 1:]).unsqueeze(-1)
    bits = mix(columns * signed(GOLDEN) + u, v)
    return bits.bitwise_xor_(-(2**31))


def _on_device(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.uint32).view(np.int32)).to(device, non_blocking=True)
