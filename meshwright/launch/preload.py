"""What must be true of a process before it forks ranks, and how to make it so."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from pathlib import Path

_OMP_PAUSE_HARD = 2
"""Source: OpenMP 5.0, omp_pause_resource_t."""


def prepare_environment() -> None:
    """Sets what must stand before torch, transformers and tokenizers are imported; what the user set stays."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def fork_obstacle() -> str | None:
    """Returns why this process can't fork ranks, or None when it can."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        return "CUDA is initialised in this process, and a forked rank can't use it again"
    if _holds_device("/dev/nvidia-uvm"):
        return "this process has the GPU driver open, and a forked rank can't use it again"
    others = [t.name for t in threading.enumerate() if t is not threading.current_thread() and not t.daemon]
    if others:
        return f"other threads run in this process ({', '.join(others)}), and a lock that they hold would stay locked"
    return None


def release_threads() -> None:
    """Ends GNU OpenMP's pool of this thread: a forked rank would wait for ever for workers that it didn't inherit.

    The pool comes back with the next parallel operation. Other OpenMP libraries look after themselves at a fork.
    Source: OpenMP 5.0, omp_pause_resource_all.
    """
    if "torch" not in sys.modules:
        return
    for path in _loaded_libraries("libgomp"):
        library = ctypes.CDLL(path)
        if hasattr(library, "omp_pause_resource_all"):
            library.omp_pause_resource_all(_OMP_PAUSE_HARD)


def _loaded_libraries(name: str) -> set[str]:
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return {line.split(maxsplit=5)[5] for line in lines if name in line.rpartition("/")[2]}


def _holds_device(device: str) -> bool:
    folder = Path("/proc/self/fd")
    numbers = os.listdir(folder) if folder.is_dir() else []
    return any(_target(folder / number) == device for number in numbers)


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""
