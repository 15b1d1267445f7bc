# ruff: noqa: B023  each function inside of a loop is called before the loop goes on
"""Experts, products in 8 bits, compiled layers, and copies to the host: values and speed on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from meshwright.models.attention import use_varlen
from meshwright.parallel.compiled_layers import _compiled
from meshwright.parallel.document_attention import document_bounds, pack_mask
from meshwright.parallel.float8 import Float8Product
from meshwright.parallel.host_copy import HostCopy
from meshwright.parallel.token_dispatch import Dispatch, ExpertGroups
from meshwright.spec.experts import LayerExperts
from meshwright.torch_compat.torchao_import import has_torchao
from tests.gpu.parts import kernel_witness as witness
from tests.gpu.parts.kernel_witness import (
    BF16,
    DOCUMENTS,
    SMALL,
    Bench,
    draw,
    positions_of,
    relative,
)


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
        rows = LayerExperts(
            module="x", experts=experts, parameters=("gate_up_proj", "down_proj"), counts=("num_experts",),
            arguments=("hidden_states", "top_k_index", "top_k_weights"),
        )  # fmt: skip
        alone = SimpleNamespace(size=1, index=0, all_to_all_rows=_to_itself)
        dispatch = Dispatch(module, rows, ExpertGroups(axis_group=alone), module.forward)  # type: ignore[arg-type]
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
