"""Dropout's kernel makes the bits of the CPU's numbers, and a draw is one launch.

Triton's interpreter runs the kernel for its values; what the simulated GPU launches was compiled for a real one.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright.parallel.keyed_random import RowBox, drop_in_one_kernel, dropout_mask, row_keys
from meshwright.parallel.random_ops import apply_dropout
from tests.ghost.runs import has_ghost

pytestmark = [pytest.mark.skipif(not has_ghost(), reason="runs under the simulated GPU: make ghost")]
CPU = torch.device("cpu")
BOXES = (
    (np.arange(2, 6), np.arange(7, 600, 3), np.arange(64), 0.25),
    (np.arange(3), np.arange(5), np.arange(3, 1500), 0.1),
    (np.array([2**33]), np.arange(37) * 2**20, np.arange(1), 0.9),
    (np.arange(2), np.arange(3), np.arange(40), 2.0**-32),
)
"""Rows, lines and columns of a tensor, and the probability: more than a tile of each, and tiles that aren't full."""


def run_alone(function: str, module: str = __name__, **environment: str) -> None:
    """Calls a function in a process of its own: Triton reads the environment once, and a GPU forbids forks."""
    # Without the interpreter's end, at which threads of the simulated GPU now and then abort.
    words = [sys.executable, "-c", f"import os; from {module} import {function}; {function}(); os._exit(0)"]
    done = subprocess.run(
        words, cwd=Path(__file__).parents[2], env=os.environ | environment, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_kernel_drops_what_the_cpu_drops() -> None:
    run_alone("check_values", TRITON_INTERPRET="1")


def test_a_draw_is_one_launch_and_so_is_its_backward() -> None:
    run_alone("check_launches")


def check_values() -> None:
    from meshwright.parallel.triton_kernels import dropout as dropout_kernel

    for rows, lines, columns, p in BOXES:
        keys, box = row_keys("3,1,layer:0,0", rows), RowBox(lines, columns)
        expected = dropout_mask(keys, box, p, CPU)
        places = torch.from_numpy(keys.view(np.int32)), *box.on_device(CPU)
        assert torch.equal(dropout_kernel.mask(*places, round(p * 2**32)), expected)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            x, upstream = (torch.randn(expected.shape).to(dtype) for _ in range(2))
            x.view(-1)[0] = float("nan")
            x.requires_grad_()
            pairs = [
                (y.detach(), *torch.autograd.grad(y, x, upstream))
                for y in (
                    apply_dropout(x, expected, p),
                    dropout_kernel.drop(x, *places, round(p * 2**32), 1 / (1 - p)),
                )
            ]
            # The interpreter cuts to bf16 where a GPU rounds.
            tolerance = 2.0**-7 if dtype == torch.bfloat16 else 0.0
            for wanted, found in zip(*pairs):
                torch.testing.assert_close(found, wanted, rtol=tolerance, atol=0.0, equal_nan=True)


def check_launches() -> None:
    ghost = ctypes.CDLL(None)
    ghost.ghost_count.restype = ctypes.c_long
    keys, box = row_keys("3,1,layer:0,0", np.arange(4)), RowBox(np.arange(32), np.arange(64))
    x = torch.zeros(4, 32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        before = ghost.ghost_count(0), ghost.ghost_count(1)
        y = drop_in_one_kernel(x, keys, box, 0.1)
        assert y is not None
        middle = ghost.ghost_count(0)
        (grad,) = torch.autograd.grad(y, x, y.detach())
        after = ghost.ghost_count(0), ghost.ghost_count(1)
    assert grad.shape == x.shape
    # Launches of forward, of backward, and waits for the device.
    assert (middle - before[0], after[0] - middle, after[1] - before[1]) == (1, 1, 0)
    # A probability of 1 keeps nothing, and float64 has more digits than the kernel.
    assert drop_in_one_kernel(x, keys, box, 1.0) is None
    assert drop_in_one_kernel(x.double(), keys, box, 0.1) is None
