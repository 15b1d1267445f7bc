"""Checkpoints of made-up tensors, and what is done to them and to who writes them."""

from __future__ import annotations

import errno
import os
import signal

import torch

from meshwright.checkpoint.config import CheckpointConfig
from meshwright.checkpoint.manifest import Origin
from meshwright.checkpoint.store import CheckpointStore

PHASES = ["open", "write", "written", "manifest", "rename", "renamed", "collect", "saved"]


def tensors(step, n=3):
    return {f"weights/{index}": torch.full((4, index + 1), float(step)) for index in range(n)}


def filled(root, *steps, **config):
    store = CheckpointStore(root, CheckpointConfig(**config))
    for step in steps:
        store.save(step, tensors(step), {"step": step}, Origin(model="m"))
    return store


def load(root, **options):
    targets = tensors(-1)
    loaded = CheckpointStore(root).load(targets, **options)
    assert all(torch.equal(value, tensors(loaded.step)[name]) for name, value in targets.items())
    assert loaded.meta["step"] == loaded.step == loaded.manifest.step
    return loaded


def killed(work):
    """Runs ``work`` in a forked process and returns the signal that ended it, 0 when it ended by itself."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def flip(path, bit):
    with open(path, "r+b") as handle:
        handle.seek(bit // 8)
        byte = handle.read(1)[0]
        handle.seek(bit // 8)
        handle.write(bytes([byte ^ 1 << bit % 8]))


def full_disk(self, data, /):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
