# ruff: noqa: B023  each function inside of a loop is called before the loop goes on
"""Attention as it is computed on GPUs: by documents, by a ring's blocks, with gathered keys, and in whole models."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

from meshwright.models.analysis.thread_group import ThreadGroup, run_in_threads
from meshwright.models.attention import announce_rows, skip_packing_check, use_varlen
from meshwright.parallel import gathered_attention
from meshwright.parallel.balanced_runs import local_runs
from meshwright.parallel.block_attention import Segments, attend, attend_backward
from meshwright.parallel.document_attention import document_attention, document_bounds, pack_mask, row_bounds
from meshwright.parallel.ring_attention import RingCall
from meshwright.spec.key_ring import KeyRing
from tests.gpu.parts import kernel_witness as witness
from tests.gpu.parts.kernel_witness import (
    BF16,
    BOUNDS,
    DOCUMENTS,
    FP16,
    SMALL,
    Bench,
    by_token,
    draw,
    positions_of,
    relative,
)


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
