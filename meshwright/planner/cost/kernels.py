"""Seconds of kernels: matrix products by size, attention, and memory-bound kernels by bytes.

Arguments named ``Values`` are scalars or arrays that broadcast, (N,) or (N, P) float64; the result has their shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.array_types import Values
from meshwright.cluster.device import Device
from meshwright.planner.cost.element_bytes import ELEMENT_BYTES
from meshwright.planner.cost.layout_batch import Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Shares of its peak rates that a generation of devices reaches in training."""

    quantum: float
    """Share of the idle time of a partly filled last wave that a product pays; 1 where tiles are never divided."""
    flash_forward: float
    """Share of the peak that fused attention reaches in forward."""
    flash_backward: float
    """The same in backward."""
    batched: float
    """Share of the peak that the batched products of unfused attention reach."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductRates:
    """What slows products on the GPUs of every generation alike."""

    picojoules: float
    """Energy of a FLOP in 16 bits at full clock, memory and idle units included; see `sustained_share`."""
    ramp: float
    """Millions of multiply-adds on each unit of a product in 16 bits that reaches half of the best rate: tiles fill and
    drain a unit's pipeline, whatever it can compute meanwhile."""


TILES = ((256.0, 128.0, 1.0), (128.0, 256.0, 1.0), (128.0, 128.0, 1.08), (128.0, 64.0, 1.25), (64.0, 64.0, 1.6))
"""Rows and columns of the result that one block of a product computes, and its time over that of the largest for the
same work. The library takes what is fastest. Source: tile shapes by the names of cuBLAS's kernels; times, CUTLASS's
profiler as published."""
NARROW = min(columns for _, columns, _ in TILES)
"""Rows or columns below which idle parts of a tile, times the ramp, would cost more than a tile that is filled."""
MISALIGNED_FACTOR = 8.0
"""Time of batched products over an aligned one's where the head size is no multiple of 8, which tensor cores need.
Source: NVIDIA, Matrix Multiplication Background (2023); the factor calibrated on BLOOM's runs of 128 heads at 13824."""
FP4_RATE = 0.8
"""Rate of products in 4 bits over the share that wider ones reach of their peak. Calibrated: NVFP4 rows on GB200."""
PRODUCTS = ProductRates(picojoules=1.37, ramp=45.0)
"""Calibrated on A100, H100, B200 and GB200 together: fitted by themselves they had shares of 0.98, 0.80, 0.68 and 0.68,
where this gives 0.98, 0.80, 0.69 and 0.71, and ramps of 64, 43 and 41. One H100 by itself said 0.9 to 1.7 picojoules
(599 to 729 of 794 TFLOP/s within two seconds at its limit of 700 W) and 55 to 75 million (products of 4096 against 8192
rows): `benchmarks/h100.jsonl`."""
CORE_START_S = 4.4e-5
"""Seconds that a product on a processor core takes more than its work does. An estimate that no core gave: the ramp
that Ampere GPUs were fitted with, 2.2 billion multiply-adds at 100 TFLOP/s, as a time. On one core of an AMD EPYC
a product of 8 x 8 in float32 took 1e-6 (``python -m timeit -s "import torch; torch.set_num_threads(1); a =
torch.randn(8, 8)" "a @ a"``, 2026-11-27), so that small ones are priced too slow where no calibration has measured
them."""
RATES = {
    "volta": Rates(quantum=0.46, flash_forward=0.4, flash_backward=0.35, batched=0.4),
    "ampere": Rates(quantum=0.46, flash_forward=0.6, flash_backward=0.5, batched=0.41),
    "hopper": Rates(quantum=0.43, flash_forward=0.45, flash_backward=0.36, batched=0.3),
    "blackwell": Rates(quantum=0.5, flash_forward=0.224, flash_backward=0.272, batched=0.3),
}


def generation(device: Device) -> str:
    """Returns a device's generation, a key of `RATES`: its own, else one of like data types and best peak."""
    peak = max(device.peak_flops.values())
    if "fp4" in device.peak_flops:
        return "blackwell"
    # Other makers' devices (MI300X, Gaudi 3) have Hopper's rates by their peak: a guess, as no run of theirs is known.
    if device.is_hopper or ("fp8" in device.peak_flops and peak > 1e15):
        return "hopper"
    return "ampere" if "bf16" in device.peak_flops else "volta"


def rates(device: Device) -> Rates:
    """Returns the rates of a device's generation."""
    return RATES[generation(device)]


def wide_peak(device: Device) -> float:
    """Returns FLOP/s of products in 16 bits; the best rate of a device without units for them."""
    known = [device.peak_flops[dtype] for dtype in ("bf16", "fp16") if dtype in device.peak_flops]
    return max(known or device.peak_flops.values())


def sustained_share(device: Device) -> float:
    """Returns the share of the best product's rate that lasts for hours at the power limit.

    Power rises as clock x voltage^2, and voltage with the clock, so as clock^3: a limit of a share of the power at full
    clock leaves the cube root of that share. Units take as much power in narrow types, in which they have more FLOP.
    Source: Mudge, Power: a first-class architectural design constraint (IEEE Computer, 2001).

    Args:
        device: with its limit in watts; 1 where it is unknown.
    """
    full_watts = PRODUCTS.picojoules * 1e-12 * wide_peak(device)
    return float(min(1.0, device.watts / full_watts) ** (1.0 / 3.0)) if device.watts else 1.0


def _ramp_work(device: Device, dtype: str) -> float:
    """Returns multiply-adds of a product that reaches half of the best rate: a time, the same in each data type."""
    if not device.units:
        return CORE_START_S * device.peak(dtype) / 2.0
    return PRODUCTS.ramp * 1e6 * device.units * device.peak(dtype) / wide_peak(device)


def matmul_s(m: Values, n: Values, k: Values, device: Device, dtype: str, share: float = 1.0) -> Array:
    """Returns seconds of a matrix product (m, k) x (k, n), without its launch.

    The device's best measured rate, slowed by the idle units of the last wave of tiles and by a ramp for small
    products; never faster than its bytes move.

    Args:
        m: rows of the result, scalar or (N,).
        n: columns of the result, scalar or (N,).
        k: contracted size, scalar or (N,).
        device: that runs it.
        dtype: of the product.
        share: of the device's rate that the framework's kernels reach.
    """
    reached_share = device.share(dtype) * sustained_share(device) * share * (FP4_RATE if dtype == "fp4" else 1.0)
    # Roofline: compute time with its two losses (wave quantization, ramp), or the time of the operands' bytes.
    seconds = _tiled_s(m, n, k, device, dtype) / reached_share
    if np.any(m < NARROW) or np.any(n < NARROW):
        # A router's or a gate's result takes no longer than one that fills a tile's width.
        padded_s = _tiled_s(np.maximum(m, NARROW), np.maximum(n, NARROW), k, device, dtype) / reached_share
        seconds = np.minimum(seconds, padded_s)
    moved_bytes = ELEMENT_BYTES[dtype] * (m * k + k * n) + 2.0 * m * n
    return np.maximum(seconds, move_s(moved_bytes, device))


def _tiled_s(m: Values, n: Values, k: Values, device: Device, dtype: str) -> Array:
    """Returns seconds of a product whose best rate is the peak: with idle units of the last wave, and the ramp."""
    seconds = 2.0 * m * n * k / device.peak(dtype)
    seconds = seconds * (1.0 + rates(device).quantum * (_tile_overhead(m, n, max(1, device.units)) - 1.0))
    return np.asarray(seconds * (1.0 + _ramp_work(device, dtype) / np.maximum(m * n * k, 1.0)))


def _tile_overhead(m: Values, n: Values, units: int) -> Array:
    """Returns the time of the fastest tiling over an infinite product's: idle units of the last wave, cut tiles."""
    lowest: Values = np.inf
    for rows, columns, tile_time in TILES:
        tiles = np.ceil(m / rows) * np.ceil(n / columns)
        computed = np.ceil(tiles / units) * units * rows * columns
        lowest = np.minimum(lowest, tile_time * computed / np.maximum(m * n, 1.0))
    return np.asarray(lowest)


def move_s(size: Values, device: Device) -> Array:
    """Returns seconds of an element-wise kernel that moves ``size`` bytes."""
    return np.asarray(size / (device.bandwidth_bytes_per_s * device.memory_share))


def attention_s(
    scores: Values, head_size: float, value_size: float, device: Device, dtype: str, is_backward: bool
) -> Array:
    """Returns seconds of fused attention.

    Args:
        scores: pairs of query and key that are computed, over all heads, scalar or (N,).
        head_size: of queries and keys.
        value_size: of values.
        device: that runs it.
        dtype: of the kernel.
        is_backward: backward, 2.5 times the work, because it recomputes the scores.

    Source: Dao, FlashAttention-2 (2023), section 4.1 (backward counted as 2.5 forwards).
    """
    rate = rates(device)
    flops = 2.0 * scores * (head_size + value_size) * (2.5 if is_backward else 1.0)
    share = rate.flash_backward if is_backward else rate.flash_forward
    return np.asarray(flops / (device.peak(dtype) * share))


def plain_attention_s(
    scores: Values, head_size: float, device: Device, dtype: str, passes: float, is_backward: bool
) -> Array:
    """Returns seconds of unfused attention: two batched products, and ``passes`` bytes moved per score between them."""
    rate = rates(device)
    product_s = 4.0 * scores * head_size * (2.0 if is_backward else 1.0) / (device.peak(dtype) * rate.batched)
    product_s = product_s * (MISALIGNED_FACTOR if head_size % 8 else 1.0)
    return product_s + move_s(scores * passes * (1.3 if is_backward else 1.0), device)
