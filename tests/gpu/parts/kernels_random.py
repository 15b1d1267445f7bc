"""Random numbers by place on a GPU: dropout's bits and speed, and the rounding of compression."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional

from meshwright.parallel.block_codec import BlockCodec
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
from meshwright.spec.compression import FORMATS
from tests.gpu.parts.kernel_witness import (
    BF16,
    FP16,
    Bench,
    draw,
)


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
