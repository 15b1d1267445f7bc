"""The loss of a linear head in chunks of tokens: plain torch's numbers, and no more memory than planned."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from meshwright.cluster.cluster import Cluster
from meshwright.errors import PlanError
from meshwright.models.analysis.logit_map import LogitMap
from meshwright.parallel import head_stages
from meshwright.parallel.head_cut import HeadInput
from meshwright.parallel.transform import DTYPES
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.cost.chunked_loss import ChunkedLoss
from meshwright.planner.cost.framework_profile import FrameworkProfile
from meshwright.planner.cost.groups import Machine
from meshwright.planner.cost.layout_batch import LayoutBatch, PricedJob
from meshwright.planner.cost.meshwright_profile import MESHWRIGHT
from meshwright.planner.cost.priced_model import PricedModel
from meshwright.spec.layout import Layout
from meshwright.spec.layout_choices import GPU_CHUNK_LOGITS, LossChunk
from meshwright.train.chunked_loss import head_cross_entropy_sums
from meshwright.train.loss import cross_entropy_sums

torch.set_num_threads(1)

VOCAB, WIDTH = 50, 16
MAPS = [LogitMap(), LogitMap(0.3), LogitMap(0.7, 2.0)]


def operands(dtype: torch.dtype = torch.float64, tokens: int = 21) -> tuple[torch.Tensor, ...]:
    """Returns a hidden state, weight, bias and targets, three of which are ignored."""
    draw = torch.Generator().manual_seed(3)
    shapes = ((tokens, WIDTH), (VOCAB, WIDTH), (VOCAB,))
    tensors = [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]
    targets = torch.randint(0, VOCAB, (tokens,), generator=draw)
    targets[:3] = -100
    return *tensors, targets


def plain_loss(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, logit_map: LogitMap
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (summed cross-entropy, logits) by torch's own functions."""
    logits = logit_map.factor * functional.linear(hidden, weight, bias)
    if logit_map.limit:
        logits = logit_map.limit * torch.tanh(logits / logit_map.limit)
    return functional.cross_entropy(logits, targets, reduction="sum", ignore_index=-100), logits


@pytest.mark.parametrize("logit_map", MAPS, ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_equals_plain_torch_for_every_size_of_chunk(logit_map: LogitMap, has_bias: bool) -> None:
    hidden, weight, bias, targets = operands()
    inputs = (hidden, weight, bias) if has_bias else (hidden, weight)
    head = HeadInput(hidden, weight, bias if has_bias else None)
    loss, logits = plain_loss(hidden, weight, head.bias, targets, logit_map)
    expected = torch.autograd.grad(0.37 * loss, inputs)
    hits = int(((logits.argmax(dim=1) == targets) & (targets != -100)).sum())
    for chunk in (1, 4, 20, 21, 100):
        found, sums = head_cross_entropy_sums(head, targets, 0.37, chunk, logit_map)
        assert found.item() == pytest.approx(0.37 * loss.item(), rel=1e-13)
        assert sums.tolist() == [pytest.approx(loss.item(), rel=1e-13), 18, hits]
        # Half of the gradient comes from upstream, which the loss knows nothing of.
        for gradient, wanted in zip(torch.autograd.grad(2.0 * found, inputs), expected):
            assert (gradient - 2.0 * wanted).abs().max() <= 1e-12 * wanted.abs().max()


def test_equals_the_function_of_torch() -> None:
    if not hasattr(functional, "linear_cross_entropy"):
        pytest.skip("torch 2.12 and older have no such function")
    hidden, weight, bias, targets = operands()
    options = nn.LinearCrossEntropyOptions(chunking_method=None, batch_chunk_size=4)
    theirs = functional.linear_cross_entropy(
        hidden, weight, targets, linear_bias=bias, reduction="sum", options=options
    )
    ours, _ = head_cross_entropy_sums(HeadInput(hidden, weight, bias), targets, 1.0, 4, LogitMap())
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    wanted = torch.autograd.grad(theirs, (hidden, weight, bias))
    for gradient, expected in zip(torch.autograd.grad(ours, (hidden, weight, bias)), wanted):
        assert (gradient - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_leaves_out_what_is_frozen_and_what_is_ignored() -> None:
    hidden, weight, bias, targets = operands()
    frozen = HeadInput(hidden, weight.detach(), None)
    loss, _ = head_cross_entropy_sums(frozen, targets, 1.0, 4, LogitMap())
    plain, _ = plain_loss(hidden, weight.detach(), None, targets, LogitMap())
    gradients = [torch.autograd.grad(value, hidden)[0] for value in (loss, plain)]
    assert torch.allclose(*gradients, rtol=1e-12)
    nothing = torch.full_like(targets, -100)
    loss, sums = head_cross_entropy_sums(HeadInput(hidden, weight, bias), nothing, 1.0, 4, LogitMap())
    loss.backward()
    assert loss.item() == 0 and sums.tolist() == [0, 0, 0] and not weight.grad.any()


def test_sums_of_many_chunks_lose_no_digits_in_bf16() -> None:
    hidden, weight, _, targets = operands(torch.bfloat16, 2048)
    exact = torch.autograd.grad(plain_loss(hidden.double(), weight.double(), None, targets, LogitMap())[0], weight)[
        0
    ].double()

    def error(chunk: int) -> float:
        loss, _ = head_cross_entropy_sums(HeadInput(hidden, weight, None), targets, 1.0, chunk, LogitMap())
        return float((torch.autograd.grad(loss, weight)[0].double() - exact).norm() / exact.norm())

    assert error(16) < 1.2 * error(2048)


def peak_bytes(compute: Callable[[], Any]) -> int:
    """Returns the most bytes that the CPU allocator gave out at once while ``compute`` ran, over those before it."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        compute()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


CORES = MESHWRIGHT.with_options(saved__chunk_logits=0.0, saved__chunk_tokens=512.0)


def planned_bytes(tokens: int, chunk: str, precision: str, engine: FrameworkProfile = CORES) -> float:
    """Returns the planner's bytes of the loss at its peak on one device."""
    shape = shape_from_sizes(TableSizes(name="small", layers=1, width=64, heads=4, vocab=1000))
    job = PricedJob(shape=shape, sequence=tokens, rows=1, precision=precision)
    layouts = LayoutBatch.from_layouts([Layout.parse(f"loss_chunk={chunk}")], 1)
    model = PricedModel(job, layouts, Machine.of(Cluster.parse("1xh100")), engine)
    assert ChunkedLoss(model).on.all()
    return float(ChunkedLoss(model).working_bytes[0])


@pytest.mark.parametrize("precision", ["float32", "float64", "bf16"])
def test_bytes_at_the_peak_are_those_planned_and_no_whole_logits(precision: str) -> None:
    tokens, vocab, width, chunk = 512, 1000, 64, 64
    draw, dtype = torch.Generator().manual_seed(4), DTYPES[precision]
    hidden = torch.randn(tokens, width, generator=draw).to(dtype).requires_grad_()
    weight = (0.02 * torch.randn(vocab, width, generator=draw)).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), generator=draw)

    def whole() -> None:
        cross_entropy_sums(functional.linear(hidden, weight).unsqueeze(0), targets.unsqueeze(0), 1.0)[0].backward()

    def chunked() -> None:
        head_cross_entropy_sums(HeadInput(hidden, weight, None), targets, 1.0, chunk, LogitMap())[0].backward()

    peaks = []
    for compute in (whole, chunked):
        hidden.grad = weight.grad = None
        peaks.append(peak_bytes(compute))
    assert peaks[0] > dtype.itemsize * tokens * vocab
    # A difference of two types copies the narrow operand on the CPU, for as many logits as its cache holds; on no GPU.
    copied = 4 * chunk * vocab if precision == "bf16" else 0
    assert peaks[1] == pytest.approx(planned_bytes(tokens, str(chunk), precision) + copied, rel=0.05)
    assert peaks[1] < 0.6 * peaks[0]
    # A GPU's kernels write the gradient over the logits; float64 has none. Sums end with the last chunk's logits gone.
    sums, logits = tokens * width * dtype.itemsize + vocab * width * max(4, dtype.itemsize), chunk * vocab
    largest = max(logits, vocab * width if precision == "bf16" else 0) * dtype.itemsize
    exponentials = 8 * logits if precision == "float64" else 0
    assert planned_bytes(tokens, str(chunk), precision, MESHWRIGHT) == sums + largest + exponentials


def test_the_choice_is_read_and_written() -> None:
    for text in ("off", "1024"):
        assert str(Layout.parse(f"loss_chunk={text}")) == f"loss_chunk={text}"
    assert str(Layout.parse("loss_chunk=auto")) == "replicate=1"
    for text in ("0", "-3", "half"):
        with pytest.raises(PlanError, match=f"loss_chunk={text}: write auto, off"):
            Layout.parse(f"loss_chunk={text}")


def test_chunks_have_equal_size() -> None:
    assert LossChunk(1000).size(1001, 8, on_cpu=False) == 501
    assert LossChunk(1000).size(10, 8, on_cpu=False) == 10
    assert LossChunk().size(10**6, GPU_CHUNK_LOGITS // 100, on_cpu=False) == 100
    assert LossChunk().size(4096, 128256, on_cpu=True) == 512


def test_an_older_torch_has_whole_logits_where_backward_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = [Layout.parse(f"pp=2,microbatches=4,schedule={name}") for name in ("1f1b", "zerobubble")]
    monkeypatch.setattr(head_stages, "splits_custom_functions", lambda: False)
    assert [bool(head_stages.whole_logits_reason(layout)) for layout in layouts] == [False, True]
    with pytest.raises(PlanError, match="take schedule=1f1b"):
        head_stages.check(Layout.parse("pp=2,microbatches=4,schedule=zerobubble,loss_chunk=64"), 4)
    monkeypatch.setattr(head_stages, "splits_custom_functions", lambda: True)
    assert not any(map(head_stages.whole_logits_reason, layouts))
