"""The most memory that this rank has used."""

from __future__ import annotations

import resource

import torch


def peak_bytes() -> int:
    """Returns the most memory this rank has used: allocated on its GPU, or resident on the host."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget_peak() -> None:
    """Counts a GPU's peak from now on, and gives back what was freed there; what a process had on the host it keeps."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
