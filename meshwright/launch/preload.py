"""What must stand in the environment before torch is imported."""

from __future__ import annotations

import os


def prepare_environment() -> None:
    """Sets what must stand before torch, transformers and tokenizers are imported; what the user set stays."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
