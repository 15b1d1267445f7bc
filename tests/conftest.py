"""What holds for every test: no network, one torch thread, no warning of a tokenizer that sees a fork, cheap forks."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

QUICK_FOLDERS = ("unit", "house")
HUGE_PAGE_BYTES = 2**21
COLLAPSE = 25
"""MADV_COLLAPSE. Source: Linux 6.1, include/uapi/asm-generic/mman-common.h."""


def _own_folder(name: str) -> str:
    """Makes a folder that goes when the session ends."""
    folder = tempfile.mkdtemp(prefix=f"meshwright-{name}-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["XDG_CACHE_HOME"] = _own_folder("cache")
"""No calibration and no earlier runs of this machine have a say in a test, and none is left behind by one."""
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
if sys.dont_write_bytecode:
    # Each process that a test starts would compile torch and transformers anew; nothing is written beside the sources.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = _own_folder("bytecode")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts files of a folder between those of others, and quick ones last.

    Tests of faults wait where others compute, and two processes that take file after file end at about the same time.
    """
    files_by_folder: dict[str, dict[Path, None]] = {}
    for item in items:
        files_by_folder.setdefault(item.path.parent.name, {})[item.path] = None
    turns = {
        path: (folder in QUICK_FOLDERS, place / len(files))
        for folder, files in files_by_folder.items()
        for place, path in enumerate(files)
    }
    items.sort(key=lambda item: turns[item.path])


def _use_huge_pages() -> None:
    """Moves what the imports left in memory into huge pages, of which a fork copies one entry instead of 512.

    Ranks and helpers are forks of this process: 30 ms of a processor each, 15 ms so. A kernel that can't refuses.
    """
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return  # not Linux
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
    for line in maps.read_text(encoding="utf-8").splitlines():
        bounds, access, _, _, inode, *name = line.split(maxsplit=5)
        start, stop = (int(bound, 16) for bound in bounds.split("-"))
        first, last = -(-start // HUGE_PAGE_BYTES), stop // HUGE_PAGE_BYTES
        # Private memory of no file: Python's objects and the heap.
        if access == "rw-p" and inode == "0" and name in ([], ["[heap]"]) and first < last:
            madvise(first * HUGE_PAGE_BYTES, (last - first) * HUGE_PAGE_BYTES, COLLAPSE)


def pytest_collection_finish() -> None:
    """Freezes what the tests' imports made: each start of ranks collects first, half a second of so many objects."""
    gc.collect()
    gc.freeze()
    _use_huge_pages()
    gc.unfreeze = lambda: None  # a launcher that isn't disposable thaws what it froze, and this too
