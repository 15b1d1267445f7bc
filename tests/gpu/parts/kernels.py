# ruff: noqa: B023  each function inside of a loop is called before the loop goes on
"""Every computation that takes another path on a GPU than on the CPU: its values against float64, and its time.

    python -m tests.gpu.parts.kernels --out FOLDER [--limit-s 70] [--small] [--no-values] [--only codec,loss]

A line a case; ``error`` is the largest distance of a token (or a row) from `kernel_witness`'s formulas, by its length.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from meshwright.models.analysis.logit_map import LogitMap
from meshwright.models.analysis.thread_group import ThreadGroup, run_in_threads
from meshwright.models.attention import announce_rows, skip_packing_check, use_varlen
from meshwright.parallel import gathered_attention
from meshwright.parallel.balanced_runs import local_runs
from meshwright.parallel.block_attention import Segments, attend, attend_backward
from meshwright.parallel.block_codec import BlockCodec
from meshwright.parallel.compiled_layers import _compiled
from meshwright.parallel.document_attention import document_attention, document_bounds, pack_mask, row_bounds
from meshwright.parallel.float8 import Float8Product
from meshwright.parallel.head_cut import HeadInput
from meshwright.parallel.host_copy import HostCopy
from meshwright.parallel.keyed_random import (
    RowBox,
    _bits_on,
    device_kernel,
    drop_in_one_kernel,
    dropout_mask,
    random_fractions,
    row_keys,
    uniform,
)
from meshwright.parallel.random_ops import apply_dropout
from meshwright.parallel.ring_attention import RingCall
from meshwright.parallel.token_dispatch import Dispatch
from meshwright.parallel.vocab_shard import VocabShard
from meshwright.spec.compression import FORMATS
from meshwright.spec.experts import ExpertRows
from meshwright.spec.key_ring import KeyRing
from meshwright.spec.layout_choices import LossChunk
from meshwright.torch_compat.torchao_import import has_torchao
from meshwright.train.chunked_loss import head_cross_entropy_sums
from meshwright.train.loss import cross_entropy_sums
from tests.gpu.parts import kernel_update
from tests.gpu.parts import kernel_witness as witness
from tests.gpu.parts.kernel_witness import Bench, by_token, draw, relative

BF16, FP16 = torch.bfloat16, torch.float16
BOUNDS = {BF16: 0.02, FP16: 0.004, torch.float32: 1e-4}
"""A few roundings of each type: 2^-8, 2^-11; of float32 what a sum of some thousand terms loses."""
DOCUMENTS = {
    "documents": [[1, 4095], [2000, 1, 37, 2058]],
    "many": [[1] * 7 + [97] * 42 + [15], [512] * 8],
    "odd": [[4095], [1, 1, 4093]],
    "whole": [[4096], [4096]],
}
SMALL = {"documents": [[1, 63], [30, 1, 5, 28]], "many": [[1] * 7 + [9] * 6 + [3], [16] * 4], "odd": [[63], [1, 1, 61]],
         "whole": [[64], [64]]}  # fmt: skip


def positions_of(documents: list[list[int]]) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in documents])


# ------------------------------------------------------------------------------------------------ attention


def varlen_values(bench: Bench) -> None:
    # Heads, key heads, sizes of head and of value, window; the last sizes are padded, and as DeepSeek's.
    cases: list[tuple[torch.dtype, str, int, int, int, int, int]] = [
        (BF16, "documents", 8, 8, 64, 64, 0), (FP16, "documents", 8, 2, 128, 128, 0), (BF16, "many", 8, 2, 128, 128, 0),
        (BF16, "documents", 8, 4, 96, 96, 1000), (BF16, "many", 4, 1, 256, 256, 512), (BF16, "odd", 8, 2, 128, 128, 0),
        (FP16, "odd", 4, 4, 64, 64, 4000), (BF16, "documents", 4, 4, 128, 128, 1), (FP16, "many", 4, 4, 64, 64, 2),
        (BF16, "documents", 4, 4, 192, 128, 0), (FP16, "many", 4, 2, 100, 100, 0),
        (BF16, "whole", 8, 2, 128, 128, 1024),
    ]  # fmt: skip
    for dtype, name, heads, key_heads, size, value_size, window in cases:
        documents = (SMALL if bench.small else DOCUMENTS)[name]
        window = min(window, 20) if bench.small else window
        rows, tokens, scale = len(documents), sum(documents[0]), 1 / math.sqrt(size)
        shapes = ((heads, size), (key_heads, size), (key_heads, value_size), (heads, value_size))
        inputs = draw(*((rows, n, tokens, e) for n, e in shapes), dtype=dtype, device=bench.device)
        bounds = document_bounds(positions_of(documents)).to(bench.device)
        leaves = [x.requires_grad_() for x in inputs[:3]]
        found = document_attention(*leaves, pack_mask(bounds, window)).transpose(1, 2)
        found = [found, *torch.autograd.grad(found, leaves, inputs[3])]
        expected = witness.attention(*inputs, witness.visible(documents, window, bench.device), scale)
        # A query that sees one key alone has no gradient, but for rounding: by half of a token's upstream gradient.
        least = 0.5 * math.sqrt(heads * value_size)
        errors = [by_token(*pair, least if window == 1 else 1e-300) for pair in zip(found, expected)]
        shape = f"{name} B={rows} S={tokens} H={heads} K={key_heads} E={size},{value_size} window={window}"
        bench.line(f"varlen {name}", max(errors), BOUNDS[dtype], dtype=dtype, shape=shape, errors=errors)


def ring_values(bench: Bench) -> None:
    cases = [(BF16, 2, "whole", 0), (BF16, 4, "documents", 0), (FP16, 4, "many", 0), (BF16, 2, "documents", 1000),
             (BF16, 4, "whole", 700), (FP16, 2, "many", 3), (BF16, 1, "documents", 0)]  # fmt: skip
    for dtype, ranks, name, window in cases:
        documents = (SMALL if bench.small else DOCUMENTS)[name]
        window = min(window, 20) if bench.small else window
        rows, tokens, heads, key_heads, size = len(documents), sum(documents[0]), 8, 2, 128
        shapes = ((heads, size), (key_heads, size), (key_heads, size), (heads, size))
        inputs = draw(*((rows, n, tokens, e) for n, e in shapes), dtype=dtype, device=bench.device)
        flat = list(itertools.accumulate(itertools.chain.from_iterable(documents), initial=0))
        starts, ring = (None if name == "whole" else tuple(flat)), KeyRing(ranks, tokens // (2 * ranks), window)

        def work(group: ThreadGroup) -> list[torch.Tensor]:
            query, key, value, upstream = (local_runs(x.transpose(1, 2), group.index, ranks) for x in inputs)
            call = RingCall(group, ring, 1 / math.sqrt(size), starts)  # type: ignore[arg-type]
            output, log_sums = call.forward(query, key, value)
            return [output, *call.backward(upstream, query, key, value, output, log_sums)]

        expected = witness.attention(*inputs, witness.visible(documents, window, bench.device), 1 / math.sqrt(size))
        errors = []
        for rank, found in enumerate(run_in_threads(ranks, work)):
            for whole, part in zip(expected, found):
                wanted = local_runs(whole.transpose(1, 2), rank, ranks)
                # By the whole tensor's mean length: a rank of late tokens has small gradients.
                errors.append(relative(part.flatten(2), wanted.flatten(2)))
        shape = f"{name} B={rows} S={tokens} H={heads} K={key_heads} E={size} window={window}"
        bench.line(f"ring of {ranks} {name}", max(errors), BOUNDS[dtype], dtype=dtype, shape=shape)


def gather_values(bench: Bench) -> None:
    """``attention=gather``: SDPA with a mask that is cut for a rank's early and late run."""
    tokens, ranks, (heads, key_heads, size) = 64 if bench.small else 4096, 2, (8, 2, 128)
    shapes = ((heads, size), (key_heads, size), (key_heads, size), (heads, size))
    inputs = draw(*((2, n, tokens, e) for n, e in shapes), dtype=BF16, device=bench.device)
    documents = (SMALL if bench.small else DOCUMENTS)["documents"]
    mask = witness.visible(documents, 0, bench.device)
    plain = gathered_attention.all_gather_tokens, gathered_attention.restore_token_order
    # What is gathered lies here already, in the order of the row.
    gathered_attention.all_gather_tokens = lambda x, *_: x  # type: ignore[assignment]
    gathered_attention.restore_token_order = lambda x, *_: x
    try:
        for kind, options in (("causal", {"is_causal": True}), ("mask", {"attn_mask": mask[:, None]})):
            seen = witness.visible([[tokens]] * 2, 0, bench.device) if kind == "causal" else mask
            expected, errors, names = witness.attention(*inputs, seen, 1 / math.sqrt(size)), [], []
            for index in range(ranks):
                query, upstream = (local_runs(x.transpose(1, 2), index, ranks).transpose(1, 2) for x in inputs[::3])
                group = SimpleNamespace(index=index, size=ranks)
                with gathered_attention.GatheredAttention(group):  # type: ignore[arg-type]
                    leaf = query.detach().requires_grad_()

                    def run(leaf: torch.Tensor = leaf, options: dict[str, Any] = options) -> torch.Tensor:
                        attend = functional.scaled_dot_product_attention
                        return attend(leaf, inputs[1], inputs[2], enable_gqa=True, **options)

                    found = run()
                    names = bench.kernels(run)
                pair = found, torch.autograd.grad(found, leaf, upstream)[0]
                wholes = (local_runs(x.transpose(1, 2), index, ranks).transpose(1, 2) for x in expected[:2])
                errors += [by_token(*both) for both in zip(pair, wholes)]
            shape = f"B=2 S={tokens} H={heads} K={key_heads} E={size} ranks=2"
            bench.line(f"gather {kind}", max(errors), BOUNDS[BF16], dtype=BF16, shape=shape, kernels=names)
    finally:
        gathered_attention.all_gather_tokens, gathered_attention.restore_token_order = plain


def attention_speed(bench: Bench) -> None:
    heads, key_heads, size = (4, 2, 64) if bench.small else (32, 8, 128)
    for rows, tokens in ((1, 256),) if bench.small else ((4, 4096), (4, 8192)):
        shapes = ((heads, size), (key_heads, size), (key_heads, size), (heads, size))
        # As models hold them: (B, S, H, E) in memory.
        *leaves, upstream = (
            x.transpose(1, 2) for x in draw(*((rows, tokens, n, e) for n, e in shapes), dtype=BF16, device=bench.device)
        )
        for leaf in leaves:
            leaf.requires_grad_()
        average = tokens // 8
        masks = {
            "varlen whole rows": pack_mask(row_bounds(rows, tokens, bench.device), 0),
            "varlen documents": pack_mask(
                document_bounds(torch.arange(average).repeat(rows, tokens // average)).to(bench.device), 0
            ),
            "varlen window": pack_mask(row_bounds(rows, tokens, bench.device), tokens // 4),
        }
        dense = witness.visible([[average] * (tokens // average)] * rows, 0, bench.device)[:, None]
        attend_plainly = functional.scaled_dot_product_attention

        def plain() -> torch.Tensor:
            return attend_plainly(*leaves, is_causal=True, enable_gqa=True).transpose(1, 2)

        def masked() -> torch.Tensor:
            repeated = (x.repeat_interleave(heads // key_heads, dim=1) for x in leaves[1:])
            return attend_plainly(leaves[0], *repeated, attn_mask=dense).transpose(1, 2)

        runs: dict[str, Callable[[], torch.Tensor]] = {"sdpa causal": plain, "sdpa with a dense mask": masked}
        runs |= {name: (lambda mask=mask: document_attention(*leaves, mask)) for name, mask in masks.items()}
        shape, reference = f"B={rows} S={tokens} H={heads} K={key_heads} E={size}", None
        for name, run in runs.items():

            def both(run: Callable[[], torch.Tensor] = run) -> None:
                torch.autograd.grad(run(), leaves, upstream.transpose(1, 2))

            # Of a causal pass 4 B H S^2 E / 2, backward 2.5 times that.
            forward_ms, ms = bench.ms(run, 5), bench.ms(both, 5)
            flops = 3.5 * 2 * rows * heads * tokens**2 * size
            reference = reference or (forward_ms, ms)
            bench.line(
                f"attention: {name}", dtype=BF16, shape=shape, ms=ms, forward_ms=forward_ms, reference_ms=reference[1],
                causal_tflops=round(flops / max(ms, 1e-9) / 1e9, 1), kernels=bench.kernels(both),
            )  # fmt: skip
        ring_block_speed(bench, [x.transpose(1, 2).flatten(0, 1).detach() for x in (*leaves, upstream)], rows, shape)


def ring_block_speed(bench: Bench, inputs: list[torch.Tensor], rows: int, shape: str) -> None:
    """One block of a ring, whole and causal; inputs (B S, heads, E)."""
    tokens = len(inputs[0]) // rows
    for name, right in (("causal", 0), ("whole", -1)):
        segments = Segments((tokens,) * rows, (tokens,) * rows, (-1, right))
        scale = 1 / math.sqrt(inputs[0].shape[-1])
        output, log_sums = attend(*inputs[:3], segments, scale)
        forward_ms = bench.ms(lambda: attend(*inputs[:3], segments, scale), 5)
        words = (inputs[3], *inputs[:3], output, log_sums, segments, scale)
        backward_ms = bench.ms(lambda: attend_backward(*words), 5)
        ms = round(forward_ms + backward_ms, 4)
        bench.line(f"attention: ring block {name}", dtype=BF16, shape=shape, ms=ms, forward_ms=forward_ms)


def models(bench: Bench) -> None:
    """Models by documents, against each document run alone by their author's plain attention in float64."""
    from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, LlamaConfig, Qwen3Config

    sizes: dict[str, Any] = {
        "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 512, "vocab_size": 512, "head_dim": 64, "use_cache": False,
    }  # fmt: skip
    windowed = {"sliding_window": 16 if bench.small else 128, "layer_types": ["sliding_attention", "full_attention"]}
    families: list[tuple[str, Any, bool]] = [
        ("llama", LlamaConfig(**sizes), True), ("qwen3", Qwen3Config(**sizes), True),
        ("gemma3_text", Gemma3TextConfig(**sizes, **windowed), True),
        ("gemma2", Gemma2Config(**sizes, **windowed, attn_logit_softcapping=2.0), False),
    ]  # fmt: skip
    documents = [[1, 40, 23]] if bench.small else [[1, 700, 323], [1024]]
    for name, config, by_varlen in families:
        torch.manual_seed(0)
        plain = copy.deepcopy(config)
        with bench.device:
            exact = AutoModelForCausalLM.from_config(plain, attn_implementation="eager").double()
            model = AutoModelForCausalLM.from_config(config).to(BF16)
        # Rounded first, so that both have the same weights.
        exact.load_state_dict({key: x.to(BF16).double() for key, x in exact.state_dict().items()})
        model.load_state_dict(exact.state_dict())
        tokens = torch.randint(0, 512, (len(documents), sum(documents[0])), device=bench.device)
        positions = positions_of(documents).to(bench.device)
        if by_varlen:
            use_varlen(model)
        bounds = document_bounds(positions.cpu()).to(bench.device)
        with announce_rows(bounds), skip_packing_check(True):
            found = model(tokens, position_ids=positions).logits
        expected = []
        for row, lengths in zip(tokens, documents):
            expected.append(torch.cat([exact(part[None]).logits[0] for part in row.split(lengths)]))
        grads = [
            torch.autograd.grad(logits.square().mean(), m.get_input_embeddings().weight)[0]
            for logits, m in ((found.double(), model), (torch.stack(expected), exact))
        ]
        error, grad_error = relative(found, torch.stack(expected)), relative(grads[0].view(1, -1), grads[1].view(1, -1))
        attention = model.config._attn_implementation
        shape = f"{name} {attention} {documents}"
        # Two layers of some ten roundings each.
        bench.line(f"model {name}", max(error, grad_error), 0.05, dtype=BF16, shape=shape, errors=[error, grad_error])


# ------------------------------------------------------------------------------------------------ loss


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


# ------------------------------------------------------------------------------------------------ random numbers


def dropout(bench: Bench) -> None:
    device, cpu = bench.device, torch.device("cpu")
    kernel = device_kernel(device)
    for rows, lines, columns, p in (
        (np.arange(2, 6), np.arange(7, 600, 3), np.arange(64), 0.25),
        (np.arange(3), np.arange(5), np.arange(3, 1500), 0.1),
        (np.array([2**33]), np.arange(37) * 2**20, np.arange(1), 0.9),
    ):
        keys, box = row_keys("3,1,layer:0,0", rows), RowBox(lines, columns)
        keep = dropout_mask(keys, box, p, cpu)
        differing = {
            "mask": int((dropout_mask(keys, box, p, device).cpu() != keep).sum()),
            "mask by torch": int(((_bits_on(keys, box, device) >= round(p * 2**32) - 2**31).cpu() != keep).sum()),
            "uniform": int((uniform(keys, box, device).cpu() != uniform(keys, box, cpu)).sum()),
            "fractions": int((random_fractions(keys, box, device).cpu() != random_fractions(keys, box, cpu)).sum()),
        }
        for dtype in (torch.float32, BF16, FP16) if p != 0.9 else (BF16,):
            x, upstream = draw(keep.shape, keep.shape, dtype=dtype, device=device)
            x.requires_grad_()
            wanted = apply_dropout(x, keep.to(device), p)
            found = drop_in_one_kernel(x, keys, box, p)
            if found is not None:
                for which, pair in (
                    ("forward", (found, wanted)),
                    ("backward", [torch.autograd.grad(y, x, upstream)[0] for y in (found, wanted)]),
                ):
                    differing[f"{which} {dtype}"] = int((pair[0] != pair[1]).sum())
        shape = f"{tuple(keep.shape)} p={p}"
        bench.line("dropout's bits", sum(differing.values()), 0, shape=shape, kernel=str(kernel), differing=differing)
    shape_of = (2, 64, 128) if bench.small else (4, 4096, 2048)
    keys, box = row_keys("a", np.arange(shape_of[0])), RowBox(np.arange(shape_of[1]), np.arange(shape_of[2]))
    x, upstream = draw(shape_of, shape_of, dtype=BF16, device=device)
    x.requires_grad_()

    def unfused() -> torch.Tensor:
        # As before there was a kernel, and as it is without Triton.
        keep = dropout_mask(keys, box, 0.1, cpu) if device == cpu else _bits_on(keys, box, device) >= 0
        return apply_dropout(x, keep, 0.1)

    runs: dict[str, Callable[[], torch.Tensor | None]] = {
        "torch's own": lambda: functional.dropout(x, 0.1), "by place, unfused": unfused,
        "by place, one kernel": lambda: drop_in_one_kernel(x, keys, box, 0.1),
    }  # fmt: skip
    reference = None
    for name, run in runs.items():
        if run() is None:
            continue
        forward_ms = bench.ms(run)
        ms = bench.ms(lambda run=run: torch.autograd.grad(run(), x, upstream))
        reference, peak = reference or ms, bench.peak_mb(run)
        rate = round(4 * x.numel() / max(forward_ms, 1e-9) / 1e6, 1)
        bench.line(
            f"dropout: {name}", dtype=BF16, shape=shape_of, ms=ms, forward_ms=forward_ms, reference_ms=reference,
            gb_s=rate, peak_mb=peak,
        )  # fmt: skip
    mask_ms = bench.ms(lambda: dropout_mask(keys, box, 0.1, device))
    bench.line("dropout: a mask by place", shape=shape_of, ms=mask_ms)


def codec(bench: Bench) -> None:
    """Compression's rounding on the device, byte for byte the CPU's."""
    blocks = torch.randn(40 if bench.small else 4096, 256, generator=torch.Generator().manual_seed(0))
    blocks[3, 5], blocks[4, 6], blocks[5] = math.inf, math.nan, 0.0
    fractions = torch.rand(blocks.shape, generator=torch.Generator().manual_seed(1))
    for name, number_format in FORMATS.items():
        made, on_device = BlockCodec(name, number_format), (blocks.to(bench.device), fractions.to(bench.device))
        differing = 0
        for numbers, device_numbers in ((None, None), (fractions, on_device[1])):
            wanted, found = made.encode(blocks, numbers), made.encode(on_device[0], device_numbers)
            decoded = made.decode(wanted, torch.float32), made.decode(found, torch.float32).cpu()
            # Bytes, but for how a NaN is written.
            differing += int(((found.cpu() != wanted).any(1) & ~decoded[0].isnan().any(1)).sum())
            differing += int((decoded[0].isnan() != decoded[1].isnan()).sum())
        ms = bench.ms(lambda made=made, on_device=on_device: made.encode(*on_device))
        bench.line(f"codec {name}", differing, 0, dtype=torch.float32, shape=tuple(blocks.shape), ms=ms)


# ---------------------------------------------------------------------------------------------- experts, fp8, others


def _to_itself(output: torch.Tensor, rows: torch.Tensor, *_: object) -> SimpleNamespace:
    output.copy_(rows)
    return SimpleNamespace(wait=lambda: None)


def mixture(bench: Bench) -> None:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    tokens, width, ffn, experts, k = (40, 32, 48, 6, 2) if bench.small else (8192, 2048, 4096, 16, 2)
    config = MixtralConfig(hidden_size=width, intermediate_size=ffn, num_local_experts=experts, num_experts_per_tok=k)
    # The simulated GPU gives the loop of the author's own no token.
    for implementation in ("grouped_mm", "eager")[: 1 + bench.has_values]:
        config._experts_implementation = implementation
        with bench.device:
            module = MixtralExperts(config).to(BF16)
        for seed, parameter in enumerate(module.parameters()):
            (made,) = draw(parameter.shape, dtype=BF16, device=bench.device, seed=seed)
            parameter.data = made.mul_(parameter.shape[-1] ** -0.5)
        hidden, upstream = draw((tokens, width), (tokens, width), dtype=BF16, device=bench.device)
        hidden.requires_grad_()
        # Experts 0, 3 and the last get nothing.
        chosen = torch.tensor([e for e in range(experts) if e not in (0, 3, experts - 1)], device=bench.device)
        index = chosen[torch.rand(tokens, len(chosen), device=bench.device).argsort(dim=1)[:, :k]]
        weights = torch.rand(tokens, k, device=bench.device).softmax(-1).to(BF16)
        rows = ExpertRows(
            module="x", experts=experts, parameters=("gate_up_proj", "down_proj"), counts=("num_experts",),
            arguments=("hidden_states", "top_k_index", "top_k_weights"),
        )  # fmt: skip
        alone = SimpleNamespace(size=1, index=0, all_to_all_rows=_to_itself)
        dispatch = Dispatch(module, rows, alone, None, module.forward)  # type: ignore[arg-type]
        leaves = (hidden, module.gate_up_proj, module.down_proj)
        exact = [x.detach().double().requires_grad_() for x in leaves]
        wanted = witness.experts(*exact, index, weights.double())
        expected = [wanted, *torch.autograd.grad(wanted, exact, upstream.double())]
        flops = 3 * 2 * tokens * k * 3 * width * ffn
        shape = f"T={tokens} D={width} F={ffn} X={experts} k={k} {implementation}"
        for name, run in (("experts", module), ("experts behind dispatch", dispatch)):
            output = run(hidden, index, weights)
            found = [output, *torch.autograd.grad(output, leaves, upstream)]
            errors = [relative(*(x.reshape(-1, x.shape[-1]) for x in pair)) for pair in zip(found, expected)]

            def both(run: Any = run) -> None:
                torch.autograd.grad(run(hidden, index, weights), leaves, upstream)

            ms = bench.ms(both, 3)
            tflops, names = round(flops / max(ms, 1e-9) / 1e9, 1), bench.kernels(both)
            bench.line(
                name, max(errors), 0.04, dtype=BF16, shape=shape, errors=errors, ms=ms, tflops=tflops, kernels=names
            )


def float8(bench: Bench) -> None:
    if not has_torchao():
        bench.line("fp8", skipped="torchao isn't installed")
        return
    tokens, width, outputs = (32, 64, 96) if bench.small else (16384, 4096, 14336)
    linear = nn.Linear(width, outputs, bias=False, device=bench.device, dtype=BF16)
    (x, upstream) = draw((tokens, width), (tokens, outputs), dtype=BF16, device=bench.device)
    x.requires_grad_()
    leaves, flops = (x, linear.weight), 6 * tokens * width * outputs
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wanted = exact[0] @ exact[1].T
    expected = [wanted, *torch.autograd.grad(wanted, exact, upstream.double())]
    shape, reference = f"{tokens}x{width}x{outputs}", 0.0

    def product_of(name: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        if name == "bf16":
            return functional.linear
        return Float8Product(linear, name, emulate=bench.device.type == "cpu")

    # e4m3, 3 bits behind the point, is off by 2.6 % in the mean square, and e5m2, which tensorwise takes for gradients,
    # by 5.2 %; a sum over rounded pairs by the root of their squares: 3.7 % and 5.8 %. Bounds are 1.6 times that.
    recipes = (("bf16", 0.01), ("rowwise", 0.06), ("tensorwise", 0.095))
    # The simulated GPU has no kernel that is compiled at run time, which a scale for each row needs.
    for name, bound in recipes if bench.has_values else recipes[::2]:
        product = product_of(name)
        # Uncompiled, roundings take three times as long as a product in bf16 (seen on an H100 at 4096 tokens).
        for compiled in (name != "bf16",) if not bench.small else (False,):
            if compiled and time.monotonic() > bench.deadline - (12 if name == "rowwise" else 30):
                bench.line(f"fp8 {name} compiled", skipped="no time left")
                continue
            run = torch.compile(product) if compiled else product

            def both(run: Any = run) -> None:
                torch.autograd.grad(run(*leaves), leaves, upstream)

            output = run(*leaves)
            found = [output, *torch.autograd.grad(output, leaves, upstream)]
            errors = [relative(*(t.reshape(-1, t.shape[-1]) for t in pair)) for pair in zip(found, expected)]
            ms = bench.ms(both, 5)
            reference = reference or ms
            tflops, names = round(flops / max(ms, 1e-9) / 1e9, 1), [] if compiled else bench.kernels(both, 8)
            bench.line(
                f"product in {name}{' compiled' * compiled}", max(errors), bound, dtype=BF16, shape=shape, ms=ms,
                errors=errors, reference_ms=reference, tflops=tflops, kernels=names,
            )  # fmt: skip


def host_copy(bench: Bench) -> None:
    """A copy is right though the device is busy, and the host doesn't wait for it."""
    size = 64 if bench.small else 8192
    (a,) = draw((size, size), dtype=BF16, device=bench.device)
    wrong, begun_ms, behind = 0, [], []
    for step in range(1, 6):
        value = torch.zeros(1 << 20, device=bench.device)
        for _ in range(8):
            a = a @ a * (1 / size)
        value += step
        begin = time.perf_counter()
        copy = HostCopy(value)
        begun_ms.append(1e3 * (time.perf_counter() - begin))
        # Work behind the copy, for which nobody waits.
        for _ in range(8):
            a = a @ a * (1 / size)
        wrong += int((copy.read() != step).sum())
        if bench.device.type == "cuda":
            behind.append(not torch.cuda.current_stream().query())
    bench.line(
        "host copy", wrong, 0, dtype=torch.float32, shape=1 << 20, ms=sorted(begun_ms)[2], still_busy_when_read=behind
    )


def compiled_layer(bench: Bench) -> None:
    """A Llama layer (rotary angles, norms, attention by documents) compiled as ours are, against float64."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    tokens, width = (64, 64) if bench.small else (4096, 2048)
    config = LlamaConfig(hidden_size=width, intermediate_size=4 * width, num_attention_heads=width // 32 if bench.small
                         else 16, num_key_value_heads=2 if bench.small else 4, num_hidden_layers=1,
                         attn_implementation="sdpa")  # fmt: skip
    torch.manual_seed(0)
    with bench.device:
        layer, exact = LlamaDecoderLayer(config, 0).to(BF16), LlamaDecoderLayer(config, 0).double()
    exact.load_state_dict(layer.state_dict())
    holder = nn.ModuleDict({"layer": layer})
    holder.config = config  # type: ignore[assignment]
    x, upstream = draw((2, tokens, width), (2, tokens, width), dtype=BF16, device=bench.device)
    x.requires_grad_()
    documents = (SMALL if bench.small else DOCUMENTS)["documents"]
    positions = positions_of(documents).to(bench.device)
    angles = LlamaRotaryEmbedding(config).to(bench.device)
    mask = witness.visible(documents, 0, bench.device)[:, None]
    wide = x.detach().double().requires_grad_()
    wanted = exact(wide, attention_mask=mask, position_embeddings=[t.double() for t in angles(wide, positions)])
    expected = [wanted, *torch.autograd.grad(wanted, wide, upstream.double())]
    use_varlen(holder)
    packed = pack_mask(document_bounds(positions.cpu()).to(bench.device), 0)
    embeddings = angles(x, positions)
    reference = None
    for name in ("eager", "compiled"):
        if name == "compiled" and bench.small:
            break
        begin = time.monotonic()
        forward = layer.forward if name == "eager" else _compiled(layer.forward)

        def run(forward: Any = forward) -> torch.Tensor:
            return forward(x, attention_mask=packed, position_embeddings=embeddings)  # type: ignore[no-any-return]

        def both(run: Any = run) -> None:
            torch.autograd.grad(run(), [x, *layer.parameters()], upstream)

        output = run()
        found = [output, *torch.autograd.grad(output, x, upstream)]
        bench.synchronize()
        seconds = round(time.monotonic() - begin, 1)
        errors, ms = [relative(*pair) for pair in zip(found, expected)], bench.ms(both, 5)
        reference = reference or ms
        numbers = sum(p.numel() for p in layer.parameters())
        tflops = round(6 * 2 * tokens * numbers / max(ms, 1e-9) / 1e9, 1)
        bench.line(
            f"layer {name}", max(errors), 0.03, dtype=BF16, shape=f"B=2 S={tokens} D={width}", errors=errors, ms=ms,
            reference_ms=reference, first_s=seconds, tflops=tflops, kernels=bench.kernels(both, 6),
        )  # fmt: skip


CASES: dict[str, tuple[Callable[[Bench], None], float]] = {
    "dropout": (dropout, 4),
    "varlen_values": (varlen_values, 5),
    "ring_values": (ring_values, 5),
    "gather_values": (gather_values, 3),
    "models": (models, 10),
    "loss_values": (loss_values, 4),
    "optimizer_values": (kernel_update.values, 2),
    "host_copy": (host_copy, 1),
    "codec": (codec, 2),
    "attention_speed": (attention_speed, 4),
    "loss_speed": (loss_speed, 3),
    "optimizer_speed": (kernel_update.speed, 6),
    "mixture": (mixture, 5),
    "float8": (float8, 6),
    "compiled_layer": (compiled_layer, 12),
}
"""Function of each group of cases, and the seconds that it needs."""


def chosen_cases(bench: Bench, only: str) -> Iterator[tuple[str, Callable[[Bench], None]]]:
    """Yields the cases that still fit before the deadline."""
    for name, (run, seconds) in CASES.items():
        if not any(word in name for word in only.split(",")):
            continue
        if not bench.small and time.monotonic() + seconds > bench.deadline:
            bench.line(name, skipped=f"needs {seconds} s, {bench.deadline - time.monotonic():.0f} s are left")
            continue
        yield name, run


def main() -> int:
    """Runs the cases; returns 1 where one is wrong."""
    words = witness.arguments(__doc__)
    begin = time.monotonic()
    bench = Bench(words.small or not torch.cuda.is_available(), not words.no_values, begin + words.limit_s - 8)
    for name, run in chosen_cases(bench, words.only):
        case_begin = time.monotonic()
        try:
            run(bench)
        except Exception:
            text = traceback.format_exc()
            print(text, file=sys.stderr, flush=True)
            bench.failed = True
            bench.line(name, failure=text.splitlines()[-6:])
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
        bench.line(f"seconds of {name}", seconds=round(time.monotonic() - case_begin, 1))
    return int(bench.failed)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Without waiting for the compiler's workers.
    os._exit(status)
