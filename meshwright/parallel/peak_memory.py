"""The most memory that this rank has used."""

from __future__ import annotations

import resource

import torch


def peak_bytes() -> int:
    """Returns the most memory this rank has used: allocated on its GPU, or resident on the host."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
