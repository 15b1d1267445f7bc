"""The GPU's loss by Triton's interpreter against float64: loss, hits, gradient, shards of the vocabulary.

Run where Triton is installed, by `make ghost`; without `TRITON_INTERPRET=1` a kernel needs a GPU.
"""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from meshwright.train import loss

pytest.importorskip("triton")
kernels = importlib.import_module("meshwright.parallel.triton_kernels.cross_entropy")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels aren't interpreted here")

SIZES = [(5, 7), (33, 50), (3, 4096), (4, 9001)]


def rows_of_logits(size: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns logits with -inf among them and targets: a hit, an ignored one and others."""
    draw = torch.Generator().manual_seed(size[0])
    logits = (torch.randn(size, generator=draw) * 4).to(dtype)
    targets = torch.randint(0, size[1], (size[0],), generator=draw)
    targets[0], targets[1] = logits[0].argmax(), loss.IGNORED
    logits[2, (targets[2] + 1) % size[1]] = -torch.inf
    return logits, targets


def reference(logits: torch.Tensor, targets: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns torch's own loss and its gradient, in float64."""
    wide = logits.double().requires_grad_()
    total = functional.cross_entropy(wide, targets, reduction="sum", ignore_index=loss.IGNORED)
    return total.detach(), torch.autograd.grad(total * scale, wide)[0]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
@pytest.mark.parametrize("scale", [0.3, torch.tensor(0.3)], ids=["number", "tensor"])
def test_equals_float64(size: tuple[int, int], dtype: torch.dtype, bound: float, scale: float | torch.Tensor) -> None:
    logits, targets = rows_of_logits(size, dtype)
    expected, expected_gradient = reference(logits, targets, 0.3)
    hits = (logits.argmax(dim=1) == targets).sum()
    # In the logits' own memory, as in training.
    found, found_hits = loss._kernel_pass(kernels, logits, targets, scale, logits, None)
    assert float(found) == pytest.approx(float(expected), rel=1e-6)
    assert found_hits == hits >= 1
    assert not logits[1].any()
    error = (logits.double() - expected_gradient).abs()
    assert bool((error <= bound * expected_gradient.abs() + bound * 1e-2).all())


def test_without_a_gradient_logits_stay() -> None:
    logits, targets = rows_of_logits((33, 50), torch.float32)
    before = logits.clone()
    assert float(loss._kernel_pass(kernels, logits, targets, 1.0, None, None)[0]) == pytest.approx(
        float(reference(logits, targets, 1.0)[0]), rel=1e-6
    )
    assert torch.equal(logits, before)


def test_logits_that_are_no_numbers_are_seen() -> None:
    logits, targets = rows_of_logits((33, 50), torch.float32)
    logits[7, 3] = torch.nan
    assert not torch.isfinite(loss._kernel_pass(kernels, logits, targets, 1.0, None, None)[0])


class _Shards:
    """Two shards of the vocabulary that run one after the other: what was exchanged is given in a later run."""

    def __init__(self) -> None:
        self.given: dict[str, list[torch.Tensor]] = {"maximum": [], "sum": []}

    def shard(self, start: int, stop: int, known: dict[str, torch.Tensor]) -> SimpleNamespace:
        def exchange(name: str):
            def exchanged(values: torch.Tensor) -> torch.Tensor:
                self.given[name].append(values.clone())
                return known.get(name, values)

            return exchanged

        return SimpleNamespace(start=start, stop=stop, maximum=exchange("maximum"), sum=exchange("sum"))


@pytest.mark.parametrize("cut", [1, 20, 49])
def test_shards_of_the_vocabulary_give_the_whole(cut: int) -> None:
    logits, targets = rows_of_logits((33, 50), torch.float32)
    expected, expected_gradient = reference(logits, targets, 0.3)
    shards, known = _Shards(), {}
    bounds = [(0, cut), (cut, 50)]
    for name, joined in (("maximum", lambda a, b: torch.maximum(a, b)), ("sum", lambda a, b: a + b)):
        shards.given = {"maximum": [], "sum": []}
        for start, stop in bounds:
            vocab = shards.shard(start, stop, known)
            loss._kernel_pass(kernels, logits[:, start:stop].contiguous(), targets, 0.3, None, vocab)  # type: ignore[arg-type]
        known[name] = joined(*shards.given[name])
    for start, stop in bounds:
        part = logits[:, start:stop].contiguous()
        found, _ = loss._kernel_pass(kernels, part, targets, 0.3, part, shards.shard(start, stop, known))  # type: ignore[arg-type]
        assert float(found) == pytest.approx(float(expected), rel=1e-6)
        assert torch.allclose(part.double(), expected_gradient[:, start:stop], atol=1e-6)
