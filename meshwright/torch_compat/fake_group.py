"""A process group without other processes, which torch has for its own tests alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.torch_compat import PrivateName

PRIVATE_NAMES = (
    PrivateName(
        "torch.testing._internal.distributed.fake_pg:FakeStore",
        "registers the backend `fake`: what one rank of a layout is made of can be shown without the others",
    ),
)


@contextlib.contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Makes this process rank ``rank`` of ``world_size`` that aren't there; collectives return at once, unsent.

    Raises:
        RuntimeError: this process is in a group already.
    """
    if dist.is_initialized():
        raise RuntimeError("this process is a rank of a group already")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
