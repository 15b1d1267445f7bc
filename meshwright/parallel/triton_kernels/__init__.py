"""Kernels in Triton, an optional package: each is imported where there is a GPU, and has a way without it."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import subprocess
from functools import cache
from typing import Any


@cache
def load_kernels(name: str) -> Any:
    """Returns a module of this folder whose `probe` has run on the GPU; None where Triton doesn't run, with a warning.

    Args:
        name: of the module, ``dropout`` or ``cross_entropy``.
    """
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        kernels = importlib.import_module(f"{__name__}.{name}")
        # Triton makes its launcher by a C compiler, which not every machine has.
        kernels.probe()
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        logging.getLogger(__name__).warning("torch computes %s, since Triton doesn't run here: %s", name, error)
        return None
    return kernels
