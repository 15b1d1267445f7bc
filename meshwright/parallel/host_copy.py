"""A device tensor's copy in host memory, which arrives while the host goes on."""

from __future__ import annotations

import torch


class HostCopy:
    """A copy on its way to the host, queued behind what computes the tensor; a tensor of the CPU is itself the copy.

    Args:
        tensor: of any shape and device; nobody changes it before `read`.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        # Into pinned memory, which torch takes where a copy from a GPU doesn't block: from any other it would.
        self._copy = tensor.detach().to("cpu", non_blocking=True)
        self._arrival: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._arrival = torch.cuda.Event()
            self._arrival.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> torch.Tensor:
        """Waits for the copy, not for what was queued behind it; returns it, on the CPU."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._copy
