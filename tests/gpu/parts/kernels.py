"""Every computation that takes another path on a GPU than on the CPU: its values against float64, and its time.

    python -m tests.gpu.parts.kernels --out FOLDER [--limit-s 70] [--small] [--no-values] [--only codec,loss]

A line a case; ``error`` is the largest distance of a token (or a row) from `kernel_witness`'s formulas, by its length.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator

import torch

from tests.gpu.parts import kernel_update as update
from tests.gpu.parts import kernel_witness as witness
from tests.gpu.parts import kernels_attention as attention
from tests.gpu.parts import kernels_loss as loss
from tests.gpu.parts import kernels_products as products
from tests.gpu.parts import kernels_random as random
from tests.gpu.parts.kernel_witness import Bench

CASES: dict[str, tuple[Callable[[Bench], None], float]] = {
    "dropout": (random.dropout, 4),
    "varlen_values": (attention.varlen_values, 5),
    "ring_values": (attention.ring_values, 5),
    "gather_values": (attention.gather_values, 3),
    "models": (attention.models, 10),
    "loss_values": (loss.loss_values, 4),
    "optimizer_values": (update.values, 2),
    "host_copy": (products.host_copy, 1),
    "codec": (random.codec, 2),
    "attention_speed": (attention.attention_speed, 4),
    "loss_speed": (loss.loss_speed, 3),
    "optimizer_speed": (update.speed, 6),
    "mixture": (products.mixture, 5),
    "float8": (products.float8, 6),
    "compiled_layer": (products.compiled_layer, 12),
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
