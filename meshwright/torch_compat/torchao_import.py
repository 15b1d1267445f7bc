"""Imports torchao, an optional package, without a look at the GPUs.

The process that starts ranks reads models, and forks: once it has touched CUDA, no child can. transformers imports
torchao where that is installed, and torchao (0.18, `prototype/mx_formats/kernels.py`) registers kernels by the GPU's
compute capability, which touches it. These kernels, for Blackwell's own formats, aren't used here. Where CUDA is in use
already, they are registered as ever: torchao has no second time for it, so a process that wants them must begin so.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
import torch.utils._triton as triton_support

from meshwright.torch_compat import PrivateName
from meshwright.torch_compat.torchao_finder import TORCHAO

PRIVATE_NAMES = (
    PrivateName(
        "torch.utils._triton:has_triton.cache_clear",
        "torchao asks for Triton while no GPU is to be seen, and torch keeps the answer for good",
    ),
)
_IMPORTED_BY_TRANSFORMERS = ("torchao.quantization", "torchao.prototype.safetensors.safetensors_support")
"""Source: transformers 5.17 to 5.23, `quantizers/quantizer_torchao.py`."""


def has_torchao() -> bool:
    """Returns whether torchao is installed."""
    return importlib.util.find_spec(TORCHAO) is not None


def import_torchao(name: str) -> ModuleType:
    """Imports a module of torchao by its full name.

    Raises:
        ImportError: torchao, or this module of it, is absent.
    """
    with without_gpus(), _quiet():
        return importlib.import_module(name)


def import_before_transformers() -> None:
    """Imports what transformers would import of torchao, where it is installed."""
    if not has_torchao():
        return
    for name in _IMPORTED_BY_TRANSFORMERS:
        # Another version may have it elsewhere, or not for this torch; then transformers goes without it too.
        try:
            import_torchao(name)
        except (ImportError, AttributeError, RuntimeError):
            continue


@contextmanager
def without_gpus() -> Iterator[None]:
    """Has torch report no GPU, unless this process uses one already and can't fork ranks any more."""
    if torch.cuda.is_initialized():
        yield
        return
    is_available = torch.cuda.is_available
    torch.cuda.is_available = lambda: False
    try:
        yield
    finally:
        torch.cuda.is_available = is_available
        # Inductor asks the same functions later, in the ranks, where there are GPUs.
        for function in vars(triton_support).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides that torchao warns of its own strings, and of each kernel that is for another device or version."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
