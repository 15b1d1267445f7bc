"""Attention in a ring against a whole row's, computed by plain torch with a dense mask that the test makes itself."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch.nn import functional

from meshwright.models.analysis.thread_group import ThreadGroup, run_in_threads
from meshwright.parallel import block_attention
from meshwright.parallel.balanced_runs import local_runs
from meshwright.parallel.document_attention import document_attention, document_bounds, pack_mask
from meshwright.parallel.ring_attention import RingAttention, RingRefusal
from meshwright.spec.key_ring import KeyRing

ROWS, TOKENS, HEADS, KEY_HEADS, SIZE, VALUE_SIZE = 2, 48, 4, 2, 8, 6
DOCUMENTS = {
    "whole": [[48], [48]],
    "long": [[30, 18], [7, 41]],
    "short": [[1, 5, 6, 1, 11, 3, 21], [12, 12, 12, 12]],
}
Tensors = tuple[torch.Tensor, ...]


def visible(documents: list[list[int]], window: int) -> torch.Tensor:
    """(B, S, S): a query sees the tokens of its document up to itself, the last `window` of them."""
    mask = torch.zeros(len(documents), TOKENS, TOKENS, dtype=torch.bool)
    for row, lengths in enumerate(documents):
        starts = [sum(lengths[:count]) for count in range(len(lengths) + 1)]
        for first, stop in pairwise(starts):
            for query in range(first, stop):
                mask[row, query, max(first, query - window + 1 if window else first) : query + 1] = True
    return mask


def inputs(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((HEADS, SIZE), (KEY_HEADS, SIZE), (KEY_HEADS, VALUE_SIZE), (HEADS, VALUE_SIZE))
    return [torch.randn(ROWS, heads, TOKENS, size, generator=generator, dtype=dtype) for heads, size in shapes]


def dense(mask: torch.Tensor, scale: float) -> Tensors:
    """Output (B, S, H, E') and the gradients of query, key and value, by products and a softmax."""
    query, key, value, upstream = inputs()
    leaves = [x.requires_grad_() for x in (query, key, value)]
    keys, values = (x.repeat_interleave(HEADS // KEY_HEADS, dim=1) for x in (key, value))
    scores = (query @ keys.mT * scale).masked_fill(~mask[:, None], -math.inf)
    output = scores.softmax(-1) @ values
    return output.detach(), *torch.autograd.grad(output, leaves, upstream)


def in_ring(ranks: int, documents: list[list[int]], window: int, scale: float | None) -> list[Tensors]:
    """What each rank computes of its own tokens."""
    positions = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in documents])
    mask = pack_mask(document_bounds(positions), window)

    def work(group: ThreadGroup) -> Tensors:
        query, key, value, upstream = (
            local_runs(x.transpose(1, 2), group.index, ranks).transpose(1, 2) for x in inputs()
        )
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        with RingAttention(group):  # type: ignore[arg-type]
            output = document_attention(*leaves, mask, scale).transpose(1, 2)
        return output.detach(), *torch.autograd.grad(output, leaves, upstream)

    return run_in_threads(ranks, work)


@pytest.mark.parametrize("window", [0, 1, 3, 8, 13, 20, 47])
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_ring_is_a_whole_rows_attention(ranks: int, documents: str, window: int) -> None:
    expected = dense(visible(DOCUMENTS[documents], window), 0.3)
    for rank, found in enumerate(in_ring(ranks, DOCUMENTS[documents], window, 0.3)):
        for whole, part in zip(expected, found):
            torch.testing.assert_close(
                part, local_runs(whole.transpose(1, 2), rank, ranks).transpose(1, 2), rtol=1e-11, atol=1e-12
            )


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_plain_products_give_what_the_kernels_do(documents: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU, whose kernels have 16 bits, computes of float64."""
    monkeypatch.setattr(block_attention, "cpu_forward", block_attention._plain_forward)
    monkeypatch.setattr(block_attention, "cpu_backward", block_attention._plain_backward)
    test_the_ring_is_a_whole_rows_attention(3, documents, window)


@pytest.mark.parametrize("grouped", [True, False])
def test_torchs_own_call_goes_round_the_ring(grouped: bool) -> None:
    """As a custom module calls it, without a document mask: fewer key heads with ``enable_gqa``, or repeated ones."""
    expected = dense(visible(DOCUMENTS["whole"], 0), 1 / math.sqrt(SIZE))[0]

    def work(group: ThreadGroup) -> torch.Tensor:
        query, key, value, _ = (local_runs(x.transpose(1, 2), group.index, 2).transpose(1, 2) for x in inputs())
        if not grouped:
            key, value = (x.repeat_interleave(HEADS // KEY_HEADS, dim=1) for x in (key, value))
        with RingAttention(group):  # type: ignore[arg-type]
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)

    for rank, found in enumerate(run_in_threads(2, work)):
        torch.testing.assert_close(found, local_runs(expected.transpose(1, 2), rank, 2).transpose(1, 2))


def test_partial_outputs_are_merged_in_float32() -> None:
    """Eight partial outputs in bf16 are as near as one kernel's: their sums aren't rounded in between."""
    dtype = torch.bfloat16
    query, key, _, _ = inputs(dtype)
    exact, whole = (
        functional.scaled_dot_product_attention(
            *(x.to(kind) for x in (query, key, key)), is_causal=True, enable_gqa=True
        )
        for kind in (torch.float64, dtype)
    )

    def work(group: ThreadGroup) -> torch.Tensor:
        parts = (local_runs(x.transpose(1, 2), group.index, 4).transpose(1, 2) for x in (query, key, key))
        with RingAttention(group):  # type: ignore[arg-type]
            return functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)

    error = max(
        (found - local_runs(exact.transpose(1, 2), rank, 4).transpose(1, 2)).abs().max()
        for rank, found in enumerate(run_in_threads(4, work))
    )
    assert error <= 2 * (whole - exact).abs().max()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attn_mask": torch.ones(TOKENS, TOKENS, dtype=torch.bool)}, "no mask that a model's own code makes"),
        ({}, "is causal, and some of the model's attention isn't"),
        ({"is_causal": True, "dropout_p": 0.1}, "drops no attention weights, here with p = 0.1"),
    ],
    ids=["mask", "not causal", "dropout"],
)
def test_what_it_cannot_do_is_refused(options: dict[str, object], reason: str) -> None:
    (group,) = ThreadGroup.group(1)
    query = inputs()[0]
    with pytest.raises(RingRefusal, match=reason), RingAttention(group):  # type: ignore[arg-type]
        functional.scaled_dot_product_attention(query, query, query, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [0, 1, 2, 5, 6, 7, 30])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_is_sent_is_what_some_query_sees(ranks: int, window: int) -> None:
    """The rule in closed form against a mask, token by token."""
    size = TOKENS // (2 * ranks)
    ring, mask = KeyRing(ranks, size, window), visible(DOCUMENTS["whole"], window)[0]
    for reader in range(ranks):
        queries = torch.cat([torch.arange(*span) for span in ring.spans(reader)])
        for owner in set(range(ranks)) - {reader}:
            needed = [bool(mask[queries, key].any()) for span in ring.spans(owner) for key in range(*span)]
            sent = [place >= first for first in ring.first_sent(owner, reader) for place in range(size)]
            assert sent == needed
            assert ring.tokens_sent(owner, reader) == sum(needed)
