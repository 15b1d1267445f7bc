"""A device (an accelerator or a processor core): the figures that predict time and memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.errors import ClusterError, nearest

FALLBACKS: Mapping[str, tuple[str, ...]] = {
    "float64": (),
    "float32": (),
    "tf32": ("float32",),
    "bf16": ("float32",),
    "fp16": ("bf16", "float32"),
    "fp8": ("fp16", "bf16", "float32"),
    "fp4": ("fp8", "fp16", "bf16", "float32"),
    "int8": ("fp8", "fp16", "bf16", "float32"),
}
"""Data types in which a device without units for a type computes it instead, best first.

bf16 never falls back to fp16: a device that has fp16 units alone (V100, T4) emulates bf16 in float32.
"""
ALIASES: Mapping[str, str] = {
    "fp64": "float64",
    "fp32": "float32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float8": "fp8",
    "mxfp8": "fp8",
    "float4": "fp4",
    "nvfp4": "fp4",
    "mxfp4": "fp4",
}
DEFAULT_SHARE = 0.8
"""Share of the peak that the best matrix product reaches where it isn't measured; the table of the machine-learning
engineering book gives 0.73-0.87 for NVIDIA's data-centre devices. Source: ml-engineering, MAMF table (2025)."""


def canonical_dtype(dtype: str) -> str:
    """Returns the canonical name of a data type: ``fp32`` becomes ``float32``.

    Raises:
        ClusterError: for a type that no device has figures for.
    """
    name = ALIASES.get(dtype.lower(), dtype.lower())
    if name not in FALLBACKS:
        raise ClusterError(f"unknown data type '{dtype}'{nearest(dtype.lower(), FALLBACKS)}")
    return name


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One device; all figures are for one rank's share of it."""

    name: str
    """Name in the catalogue: ``h100``, ``a100-40``."""
    memory_bytes: int
    """Memory that the driver gives a process; the planner subtracts its reserve."""
    bandwidth_bytes_per_s: float
    """Nominal bandwidth of the device's memory."""
    peak_flops: Mapping[str, float] = field(hash=False)
    """FLOP/s by data type for dense matrix products, without sparsity."""
    matmul_share: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Share of the peak that the best measured matrix product reaches, by data type."""
    units: int = 0
    """Multiprocessors or compute units, over which tiles of a matrix product are spread; 0 for a processor core."""
    is_hopper: bool = False
    """Whether it is of NVIDIA's Hopper generation, whose kernels no other device runs."""
    cache_bytes: int = 0
    """Bytes of the last-level cache."""
    launch_s: float = 5e-6
    """Time between two kernel launches when the host does nothing else."""
    memory_share: float = 0.85
    """Share of the nominal bandwidth that a long element-wise operation reaches."""
    watts: float = 0.0
    """Power under load; 0 where unknown."""
    price_per_hour: float | None = None
    """Dollars an hour; None where unknown."""
    source: str = ""
    """Source of the figures."""

    def __post_init__(self) -> None:
        """Refuses invalid figures and canonicalises names of data types."""
        for name in ("memory_bytes", "bandwidth_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ClusterError(f"device {self.name}: {name} = {getattr(self, name)} must be above 0")
        # Users write fp32 or float32; figures are kept under one name.
        peaks = {canonical_dtype(dtype): float(value) for dtype, value in self.peak_flops.items()}
        shares = {canonical_dtype(dtype): float(value) for dtype, value in self.matmul_share.items()}
        if not peaks or min(peaks.values()) <= 0:
            raise ClusterError(f"device {self.name}: peak_flops needs a rate above 0 for one data type at least")
        for dtype, share in shares.items():
            if not 0 < share <= 1:
                raise ClusterError(f"device {self.name}: matmul_share.{dtype} = {share} is not within 0 and 1")
        if not 0 < self.memory_share <= 1 or self.launch_s < 0 or self.watts < 0 or (self.price_per_hour or 0) < 0:
            raise ClusterError(
                f"device {self.name}: memory_share must be within 0 and 1; launch_s, watts and price_per_hour not "
                "below 0"
            )
        object.__setattr__(self, "peak_flops", peaks)
        object.__setattr__(self, "matmul_share", shares)

    def computes_in(self, dtype: str) -> str:
        """Returns the data type whose units compute ``dtype`` on this device: itself or its fallback.

        Raises:
            ClusterError: for an unknown type, or one without a fallback on this device.
        """
        canonical = canonical_dtype(dtype)
        for name in (canonical, *FALLBACKS[canonical]):
            if name in self.peak_flops:
                return name
        raise ClusterError(
            f"device {self.name} has no rate for {canonical}; it has {', '.join(sorted(self.peak_flops))}: "
            f"give peak_flops.{canonical} in the cluster's file"
        )

    def peak(self, dtype: str) -> float:
        """Returns FLOP/s of dense matrix products in a data type, or in its fallback.

        Raises:
            ClusterError: for an unknown type, or one without a fallback on this device.
        """
        return self.peak_flops[self.computes_in(dtype)]

    def share(self, dtype: str) -> float:
        """Returns the share of `peak` that the best matrix product reaches."""
        compute_dtype = self.computes_in(dtype)
        return self.matmul_share.get(compute_dtype, self.matmul_share.get("bf16", DEFAULT_SHARE))

    def scaled(self, factor: float, memory_bytes: int) -> Device:
        """Returns the device at ``factor`` of its speed and with other memory: a rank on part of a processor."""
        return dataclasses.replace(
            self,
            memory_bytes=memory_bytes,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s * factor,
            peak_flops={dtype: value * factor for dtype, value in self.peak_flops.items()},
            watts=self.watts * factor,
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, without fields that are None."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}
