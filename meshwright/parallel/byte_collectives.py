"""Collectives of plain bytes: messages between ranks are JSON rather than pickles, so that nothing is unpickled."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

HEAD_BYTES = 512
"""Of the first collective: a message's length and its first bytes. Most messages end in it, and need no second."""
_LENGTH_BYTES = 8


def all_gather_bytes(data: bytes, group: ProcessGroup | None = None) -> list[bytes]:
    """Returns every rank's bytes, in order of rank; on the CPU, so the group must be able to (gloo).

    Raises:
        RuntimeError: when a rank doesn't answer within the group's limit.
    """
    room = HEAD_BYTES - _LENGTH_BYTES
    heads = _all_gather(len(data).to_bytes(_LENGTH_BYTES, "little") + data[:room], HEAD_BYTES, group)
    lengths = [int.from_bytes(head[:_LENGTH_BYTES], "little") for head in heads]
    begun = [head[_LENGTH_BYTES:] for head in heads]
    longest = max(lengths)
    if longest > room:
        rests = _all_gather(data[room:], longest - room, group)
        begun = [first + rest for first, rest in zip(begun, rests)]
    return [message[:length] for message, length in zip(begun, lengths)]


def _all_gather(data: bytes, length: int, group: ProcessGroup | None) -> list[bytes]:
    """Returns ``length`` bytes of every rank: its own data, and zeros behind it."""
    # Equal lengths: (length,) uint8 of each rank.
    padded_data = torch.zeros(length, dtype=torch.uint8)
    padded_data[: len(data)] = _tensor(data)
    padded_of_rank = [torch.empty(length, dtype=torch.uint8) for _ in range(dist.get_world_size(group))]
    dist.all_gather(padded_of_rank, padded_data, group=group)
    return [padded.numpy().tobytes() for padded in padded_of_rank]


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
