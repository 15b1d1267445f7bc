"""Environment variables that must be set before torch is imported."""

from __future__ import annotations

import os


def prepare_environment() -> None:
    """Sets variables that torch and tokenizers read on import; the user's values are kept."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # Segments of the GPU's allocator that grow: sizes that change from step to step leave no holes that nothing fits.
    # Source: CUDA semantics, Optimizing memory usage, torch's documentation; torchtitan sets it for every run.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # its earlier name, which torch still reads
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
