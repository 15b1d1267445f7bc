# ruff: noqa: B023  each function inside of a loop is called before the loop goes on
"""The chunked loss on a GPU: values and speed."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from meshwright.models.analysis.logit_map import LogitMap
from meshwright.models.analysis.thread_group import ThreadGroup, run_in_threads
from meshwright.parallel.head_cut import HeadInput
from meshwright.parallel.vocab_shard import VocabShard
from meshwright.spec.layout_choices import LossChunk
from meshwright.train.chunked_loss import head_cross_entropy_sums
from meshwright.train.loss import cross_entropy_sums
from tests.gpu.parts import kernel_witness as witness
from tests.gpu.parts.kernel_witness import (
    BF16,
    BOUNDS,
    FP16,
    Bench,
    draw,
    relative,
)


def loss_values(bench: Bench) -> None:
    tokens, width, vocab = (64, 32, 200) if bench.small else (4096, 1024, 32000)
    for dtype, limit, chunk in ((BF16, 0.0, 0), (BF16, 30.0, 1000), (FP16, 0.0, 1000), (torch.float32, 30.0, 1000)):
        hidden, weight = draw((tokens, width), (vocab, width), dtype=dtype, device=bench.device)
        weight = weight.mul_(1 / math.sqrt(width)).requires_grad_()
        hidden.requires_grad_()
        targets = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(1)).to(bench.device)
        targets[::7] = -100
        scale = 1.0 if dtype == FP16 else 1 / tokens
        size = min(chunk, 20) if bench.small and chunk else chunk
        size = size or LossChunk().size(tokens, vocab, bench.device.type == "cpu")
        found, _ = head_cross_entropy_sums(HeadInput(hidden, weight, None), targets, scale, size, LogitMap(1.0, limit))
        grads = torch.autograd.grad(found, (hidden, weight))
        expected = witness.head_loss(hidden, weight, targets, scale, limit)
        errors = [abs(float(found.detach() / expected[0]) - 1), *map(relative, grads, expected[1:])]
        shape = f"N={tokens} D={width} V={vocab} limit={limit} chunk={size}"
        bound = 2 * BOUNDS[dtype]
        bench.line("loss chunked", max(errors), bound, dtype=dtype, shape=shape, errors=errors)
        if limit:
            continue

        # By columns of four ranks, whole logits and in chunks.
        def work(group: ThreadGroup) -> tuple[torch.Tensor, ...]:
            rows = slice(group.index * vocab // 4, (group.index + 1) * vocab // 4)
            part, own = weight.detach()[rows].clone().requires_grad_(), hidden.detach().clone().requires_grad_()
            shard = VocabShard(group, rows.start, rows.stop)  # type: ignore[arg-type]
            loss, _ = head_cross_entropy_sums(HeadInput(own, part, None), targets, scale, size, LogitMap(), shard)
            logits = (own @ part.T).unsqueeze(0)
            whole, _ = cross_entropy_sums(logits, targets.unsqueeze(0), scale, shard)
            chunked = torch.autograd.grad(loss, (own, part))
            return loss, whole, *chunked, *torch.autograd.grad(whole, (own, part))

        ranks = run_in_threads(4, work)
        errors = [abs(float(x.detach() / expected[0]) - 1) for rank in ranks for x in rank[:2]]
        for first in (2, 4):
            total = sum(rank[first].double() for rank in ranks)
            errors.append(relative(total, expected[1]))  # type: ignore[arg-type]
            errors.append(relative(torch.cat([rank[first + 1] for rank in ranks]), expected[2]))
        bench.line("loss of four vocabulary shards", max(errors), bound, dtype=dtype, shape=shape, errors=errors[-4:])


def loss_speed(bench: Bench) -> None:
    tokens, width, vocab = (64, 32, 200) if bench.small else (8192, 4096, 128256)
    hidden, weight = (
        x.requires_grad_() for x in draw((tokens, width), (vocab, width), dtype=BF16, device=bench.device)
    )
    targets = torch.randint(0, vocab, (tokens,), device=bench.device)
    sizes = (20,) if bench.small else (1024, 2048, 4096)

    def ours(size: int) -> torch.Tensor:
        return head_cross_entropy_sums(HeadInput(hidden, weight, None), targets, 1 / tokens, size, LogitMap())[0]

    def whole() -> torch.Tensor:
        return cross_entropy_sums((hidden @ weight.T).unsqueeze(0), targets.unsqueeze(0), 1 / tokens)[0]

    def naive() -> torch.Tensor:
        return functional.cross_entropy((hidden @ weight.T).float(), targets)

    runs: dict[str, Callable[[], torch.Tensor]] = {"naive": naive, "whole logits": whole}
    runs |= {f"chunks of {size}": partial(ours, size) for size in sizes}
    if hasattr(functional, "linear_cross_entropy"):
        runs["torch's"] = lambda: functional.linear_cross_entropy(hidden, weight, targets)
    shape, reference = f"N={tokens} D={width} V={vocab}", None
    for name, run in runs.items():

        def both(run: Callable[[], torch.Tensor] = run) -> None:
            torch.autograd.grad(run(), (hidden, weight))

        ms, peak = bench.ms(both, 3), bench.peak_mb(both)
        reference = reference or ms
        tflops = round(6 * tokens * width * vocab / max(ms, 1e-9) / 1e9, 1)
        bench.line(f"loss: {name}", dtype=BF16, shape=shape, ms=ms, reference_ms=reference, peak_mb=peak, tflops=tflops)
