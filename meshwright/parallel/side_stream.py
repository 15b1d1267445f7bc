"""Copies between a device and host memory on a stream of their own, beside what the device computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A stream of a GPU beside the current one; on the CPU, where work is done at once, nothing.

    Args:
        device: of the stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def behind(self) -> Iterator[None]:
        """Queues the body's work here, behind what is queued on the current stream."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """Returns an event at the end of what is queued here; None on the CPU."""
        return self._stream.record_event() if self._stream is not None else None

    def keep(self, tensor: torch.Tensor) -> None:
        """Has a tensor of any shape keep its memory, although it is dropped, until what is queued here has read it."""
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def join(self) -> None:
        """Makes what is queued next on the current stream wait for what is queued here."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def wait(self) -> None:
        """Waits on the host for what is queued here."""
        if self._stream is not None:
            self._stream.synchronize()


def host_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns an empty host tensor of the same shape and dtype, pinned where it is copied from or to a GPU."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=device.type == "cuda")
