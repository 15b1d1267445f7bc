"""Environment variables that must be set before torch is imported."""

from __future__ import annotations

import os


def prepare_environment() -> None:
    """Sets variables that torch and tokenizers read on import; the user's values are kept."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
