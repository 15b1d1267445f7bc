"""Draws random numbers by address: (seed, name, operation, block) gives the same block of values on every machine.

NumPy draws rather than torch: torch's CPU generator uses 32 bits of a seed and its vectorised normal differs between
instruction sets, while ranks on unlike machines must get the same bits.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch

BLOCK = 1 << 16
"""Elements drawn from one generator; changing it changes every initial weight."""

Address = tuple[int, str, int, int]
"""Seed, name of the tensor, number of the operation, number of the block."""


def generator_at(address: tuple[int | str, ...]) -> np.random.Generator:
    """Returns a generator whose 128-bit seed is a hash of the address."""
    digest = hashlib.blake2b(repr(address).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.SFC64(int.from_bytes(digest, "little")))


def draw(kind: str, values: tuple[float, ...], count: int, dtype: torch.dtype, address: Address) -> torch.Tensor:
    """Draws one block.

    Args:
        kind: ``normal`` (values: mean, std), ``uniform`` (low, high) or ``truncated`` (mean, std, low, high).
        values: parameters of the distribution.
        count: number of values, at most `BLOCK`.
        dtype: float64 is drawn in float64, anything else in float32.
        address: which block.

    Returns:
        (count,) in float64 or float32.
    """
    # bf16 and fp16 weights are rounded from float32 draws
    real = np.float64 if dtype == torch.float64 else np.float32
    generator = generator_at(address)
    if kind == "truncated":
        return torch.from_numpy(_truncated(generator, count, *values).astype(real))
    location, scale = real(values[0]), real(values[1])
    if kind == "normal":
        return torch.from_numpy(np.asarray(generator.standard_normal(count, dtype=real) * scale + location))
    return torch.from_numpy(np.asarray(generator.random(count, dtype=real) * (scale - location) + location))


def _truncated(generator: np.random.Generator, count: int, mean: float, std: float, a: float, b: float) -> np.ndarray:
    """Returns (count,) float64 normal values within [a, b], by the inverse of the distribution function.

    Source: torch.nn.init.trunc_normal_ of torch <= 2.11, method from
    people.sc.fsu.edu/~jburkardt/presentations/truncated_normal.pdf.
    """
    # the distribution function at the edges; uniform numbers between them map back into [a, b]
    low, high = ((1.0 + math.erf((edge - mean) / (std * math.sqrt(2.0)))) / 2.0 for edge in (a, b))
    uniform = torch.from_numpy(generator.random(count) * (high - low) + low)
    return np.clip(torch.special.ndtri(uniform).numpy() * std + mean, a, b)
