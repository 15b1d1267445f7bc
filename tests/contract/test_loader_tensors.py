"""Batches as tensors: same shapes, same values, through the thread or not."""

from __future__ import annotations

import numpy as np
import torch

from meshwright.data.loader import IGNORED, Loader
from meshwright.data.prefetch import Prefetcher, tensors
from meshwright.data.tokens import TokenStream


def test_tensors_hold_what_the_arrays_hold() -> None:
    split = TokenStream(
        name="train",
        tokens=np.arange(400, dtype="<u2"),
        ends=np.array([50, 51, 200, 400]),
        text_bytes=400,
        fingerprint="f",
    )
    loader = Loader(split, rows=4, sequence=8, seed=0)
    expected = loader.batch(2)
    with Prefetcher(loader, start_step=2) as reader:
        threaded = next(reader)
    for batch in (tensors(expected), threaded):
        for field in ("tokens", "targets", "positions", "row_ids"):
            tensor = getattr(batch, field)
            assert tensor.dtype == torch.int64
            assert np.array_equal(tensor.numpy(), getattr(expected, field))
        assert (batch.step, batch.targets_count) == (2, expected.targets_count)


def test_ignored_is_what_cross_entropy_ignores() -> None:
    logits = torch.randn(3, 5, dtype=torch.float64)
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor([1, IGNORED, 2]), reduction="sum")
    kept = torch.nn.functional.cross_entropy(logits[[0, 2]], torch.tensor([1, 2]), reduction="sum")
    assert torch.equal(loss, kept)
