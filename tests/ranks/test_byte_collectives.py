"""Messages of any length arrive whole on every rank, short ones by one collective."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from meshwright.parallel.byte_collectives import HEAD_BYTES, all_gather_bytes, broadcast_bytes
from tests.ranks.group import run_ranks

LENGTHS = [(0, 0, 0), (0, 5, 1), (504, 0, 3), (505, 504, 0), (1, 7000, 506), (HEAD_BYTES, 2 * HEAD_BYTES, 3000)]
"""Of the message of each of three ranks."""


def message(rank: int, length: int) -> bytes:
    return bytes((7 * rank + place) % 256 for place in range(length))


def gathered(rank: int) -> tuple[list[list[bytes]], list[int], list[bytes]]:
    """Returns what all ranks said, the collectives that each took, and what rank 1 said to all."""
    calls, found, all_gather = [0], [], dist.all_gather

    def counted(*args: object, **more: object) -> object:
        calls[-1] += 1
        return all_gather(*args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather", counted)
        for lengths in LENGTHS:
            found.append(all_gather_bytes(message(rank, lengths[rank])))
            calls.append(0)
    return found, calls[:-1], [broadcast_bytes(message(rank, lengths[1]), 1) for lengths in LENGTHS]


def test_messages_of_any_length_arrive_whole_and_short_ones_by_one_collective() -> None:
    said = [[message(rank, length) for rank, length in enumerate(lengths)] for lengths in LENGTHS]
    for found, calls, sent in run_ranks(3, gathered):
        assert found == said and calls == [1, 1, 1, 2, 2, 2]
        assert sent == [messages[1] for messages in said]
