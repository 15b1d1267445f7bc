"""At 131,072 tokens a rank's attention in a ring holds its share of a row, and nothing of a row's length.

Forward and backward run on tensors without memory; every tensor that an operator makes is seen as it comes and goes.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from meshwright.parallel.ring_attention import RingCall
from meshwright.spec.key_ring import KeyRing
from meshwright.torch_compat.tensors import FakeTensorMode, TorchDispatchMode, tree_leaves

TOKENS, HEADS, KEY_HEADS, SIZE = 131_072, 8, 2, 64


class Done:
    def wait(self) -> bool:
        return True


class LoneRank:
    """A rank whose peers answer at once, and which counts what it sends."""

    def __init__(self, size: int, index: int) -> None:
        self.size, self.index, self.sent = size, index, 0

    def exchange(self, outputs: Mapping[int, torch.Tensor], chunks: Mapping[int, torch.Tensor]) -> Done:
        assert all(peer != self.index for peer in (*outputs, *chunks))
        self.sent += sum(chunk.nbytes for chunk in chunks.values())
        return Done()


class Meter(TorchDispatchMode):  # type: ignore[misc]
    """Bytes of all memory that operators have allocated and that some tensor still holds."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak, self.largest = 0, 0, 0
        self._holders: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._hold(tensor)
        return result

    def _hold(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if not self._holders[key]:
            self.live += size
            self.peak, self.largest = max(self.peak, self.live), max(self.largest, size)
        self._holders[key] += 1
        weakref.finalize(tensor, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            self.live -= size


def measured(ranks: int, index: int, window: int, starts: tuple[int, ...] | None) -> tuple[Meter, LoneRank]:
    """Runs forward and backward of a rank's attention in bf16."""
    group, tokens = LoneRank(ranks, index), TOKENS // ranks
    with FakeTensorMode():
        query, key, value, upstream = (
            torch.empty(1, tokens, heads, SIZE, dtype=torch.bfloat16) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
        )
        call = RingCall(group, KeyRing(ranks, tokens // 2, window), 0.125, starts)  # type: ignore[arg-type]
        with Meter() as meter:
            output, log_sums = call.forward(query, key, value)
            call.backward(upstream, query, key, value, output, log_sums)
    return meter, group


@pytest.mark.slow
def test_memory_falls_with_the_ranks() -> None:
    few, many = (measured(ranks, 3, 0, None)[0] for ranks in (4, 16))
    assert many.peak < few.peak / 3.5
    # The largest tensor of a rank: its own queries, or their gradient, in float32.
    assert many.largest == TOKENS // 16 * HEADS * SIZE * 4
    # At most as much as a few of these; keys and values of a row would be 8 of them, scores of a run 256.
    assert many.peak < 8 * many.largest


@pytest.mark.slow
def test_a_window_and_documents_make_no_tensor_larger() -> None:
    """A window's masks on the CPU are of 512 queries and the keys around them."""
    meter, _ = measured(16, 3, 1024, (0, 1000, 70_000, 70_001, TOKENS))
    assert meter.largest == TOKENS // 16 * HEADS * SIZE * 4
    assert meter.peak < 8 * meter.largest


@pytest.mark.slow
def test_a_window_sends_what_it_reaches() -> None:
    """1,023 tokens of a run to the next rank and of the other to the one before; all of them twice, then gradients."""
    token_bytes = 2 * KEY_HEADS * SIZE * 2
    assert measured(16, 3, 1024, None)[1].sent == 3 * 2 * 1023 * token_bytes
    whole = measured(16, 3, 0, None)[1].sent
    assert whole > 40 * 3 * 2 * 1023 * token_bytes
