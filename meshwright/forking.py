"""Preconditions of a fork, their preparation, and forked processes that die with their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

_OMP_PAUSE_HARD = 2
"""Source: OpenMP 5.0, omp_pause_resource_t."""
_PR_SET_PDEATHSIG = 1
"""Source: linux/prctl.h."""
_CUDA_NOT_INITIALIZED = 3
"""Source: cuda.h, CUresult."""
_ENGINE_THREAD = "pt_autograd"
"""Prefix of the names of the autograd engine's device threads. Source: torch/csrc/autograd/engine.cpp."""


def fork_obstacle() -> str | None:
    """Returns why this process can't fork ranks, or None when it can."""
    torch = sys.modules.get("torch")
    # Only if torch is imported: this check must not import it.
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        # transformers imports torchao where it is installed, and torchao asks for the GPU's capability.
        cure = (
            " (import meshwright before transformers, whose torchao may have done it)"
            if "torchao" in sys.modules
            else ""
        )
        return f"CUDA is initialised in this process{cure}, and a forked rank can't use it again"
    if _uses_cuda_driver():
        return "this process has used the GPU driver, and a forked rank can't use it again"
    if _has_engine_threads():
        return (
            "torch's autograd engine has run in this process and started a thread for each GPU, which a forked rank "
            "doesn't inherit, so that its first backward would fail"
        )
    threads = [t.name for t in threading.enumerate() if t is not threading.current_thread() and not t.daemon]
    if threads:
        return f"other threads run in this process ({', '.join(threads)}), and a lock that they hold would stay locked"
    return None


def release_threads() -> None:
    """Ends GNU OpenMP's pool of this thread: a forked rank would wait for ever for workers that it didn't inherit.

    The next parallel operation recreates the pool. Other OpenMP libraries handle forks themselves.
    Source: OpenMP 5.0, omp_pause_resource_all.
    """
    if "torch" not in sys.modules:
        return
    for library in filter(None, _loaded_libraries("libgomp")):
        if hasattr(library, "omp_pause_resource_all"):
            library.omp_pause_resource_all(_OMP_PAUSE_HARD)


def die_with_parent(parent: int | None = None) -> None:
    """Makes the kernel kill this process when the thread that started it ends for any reason (Linux only).

    Args:
        parent: process id that must be alive; the parent's now when None.
    """
    expected = os.getppid() if parent is None else parent
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # The parent may have ended before prctl took effect: then this process already has another parent.
        if os.getppid() != expected:
            os._exit(1)


def tied_command(*words: str) -> list[str]:
    """Returns a command that runs another one, which the kernel kills when the thread that started it ends.

    It needs no ``preexec_fn``, whose Python between fork and exec can wait for ever where other threads run.
    """
    return [sys.executable, "-m", "meshwright.forking", str(os.getpid()), *words]


def _loaded_libraries(name: str) -> Iterator[ctypes.CDLL | None]:
    """Yields the instances of a library that are loaded here, of which there may be several; loads none itself.

    None stands for one that the loader no longer finds.
    """
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    paths = {line.split(maxsplit=5)[5] for line in lines if name in line.rpartition("/")[2]}
    for path in sorted(paths):
        # Of a file that was replaced meanwhile the loader still knows path and name; opening it would be another one.
        file = path.removesuffix(" (deleted)")
        soname = re.sub(r"(\.so\.\d+)\..*", r"\1", file.rpartition("/")[2])
        for candidate in (file, soname, f"{name}.1"):
            with contextlib.suppress(OSError):
                yield ctypes.CDLL(candidate, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
                break
        else:
            yield None


def _has_engine_threads() -> bool:
    """Whether the autograd engine has started its device threads here; a CPU build of torch has none."""
    return any(name.startswith(_ENGINE_THREAD) for name in _thread_names())


def _thread_names() -> list[str]:
    """Returns the kernel's names of this process's threads; none where there is no /proc."""
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        try:
            names.append(path.read_text(encoding="utf-8", errors="replace"))
        except OSError:  # the thread ended meanwhile
            continue
    return names


def _uses_cuda_driver() -> bool:
    """Whether anything has initialised CUDA's driver here, with torch or without.

    An open /dev/nvidia-uvm says less: NVML, by which torch counts GPUs, opens it too, and leaves CUDA to a forked rank.
    """
    for driver in _loaded_libraries("libcuda.so"):
        if driver is None:
            return True  # who can't be asked may have been
        # Asking for the count initialises nothing.
        count = ctypes.c_int()
        if driver.cuDeviceGetCount(ctypes.byref(count)) != _CUDA_NOT_INITIALIZED:
            return True
    return False


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
