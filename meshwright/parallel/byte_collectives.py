"""Collectives of plain bytes: messages between ranks are JSON rather than pickles, so that nothing is unpickled."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def all_gather_bytes(data: bytes, group: ProcessGroup | None = None) -> list[bytes]:
    """Returns every rank's bytes, in order of rank; on the CPU, so the group must be able to (gloo).

    Raises:
        RuntimeError: when a rank doesn't answer within the group's limit.
    """
    count = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(count)]
    dist.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64), group=group)
    # Equal lengths: (longest,) uint8 of each rank, of which its own length counts.
    longest = max(int(size) for size in sizes)
    if not longest:
        return [b""] * count
    padded_data = torch.zeros(longest, dtype=torch.uint8)
    padded_data[: len(data)] = _tensor(data)
    padded_of_rank = [torch.empty(longest, dtype=torch.uint8) for _ in range(count)]
    dist.all_gather(padded_of_rank, padded_data, group=group)
    return [bytes(padded[: int(size)].numpy().tobytes()) for padded, size in zip(padded_of_rank, sizes)]


def broadcast_bytes(data: bytes, source: int = 0, group: ProcessGroup | None = None) -> bytes:
    """Returns the bytes of the rank ``source``; the other ranks' ``data`` is ignored."""
    size = torch.tensor([len(data)], dtype=torch.int64)
    dist.broadcast(size, source, group=group)
    if not int(size):
        return b""
    buffer = _tensor(data) if dist.get_rank() == source else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(buffer, source, group=group)
    return buffer.numpy().tobytes()


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
