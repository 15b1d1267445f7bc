"""Bytes of buffers that live beside a rank's state: counted as tensors are made and freed."""

from __future__ import annotations

import weakref

import torch


class LiveBytes:
    """Counts the bytes of tensors by kind while they live, and the most of each kind."""

    def __init__(self) -> None:
        self._live: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        """Most bytes that lived at once, by kind."""

    def track(self, kind: str, tensor: torch.Tensor) -> torch.Tensor:
        """Counts a tensor with memory of its own, of any shape, until it is freed, and returns it."""
        self._add(kind, tensor.nbytes)
        weakref.finalize(tensor, self._add, kind, -tensor.nbytes).atexit = False
        return tensor

    @property
    def total_peak(self) -> int:
        """Sum of the kinds' peaks, which need not come at one time."""
        return sum(self.peak.values())

    def _add(self, kind: str, size: int) -> None:
        self._live[kind] = self._live.get(kind, 0) + size
        self.peak[kind] = max(self.peak.get(kind, 0), self._live[kind])
