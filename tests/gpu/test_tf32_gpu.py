"""Products in TF32 on a real GPU: rounded where they should be, and rotary angles exact beyond position 2,048."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.launch.devices import count_gpus
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.parallel.tf32 import exact_modules, use_tf32

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not count_gpus(), reason="no GPU")]
POSITIONS = 16384


def test_products_are_rounded_and_rotary_angles_are_not() -> None:
    # In a process of its own: one that has used a GPU can't fork ranks for the tests after it.
    words = [sys.executable, "-c", f"from {__name__} import products, angles; products(); angles()"]
    root = Path(__file__).parents[2]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def products() -> None:
    """Ten bits of the inputs count, and no fewer."""
    linear = nn.Linear(1024, 512, bias=False).cuda()
    x = torch.randn(256, 1024, device="cuda")
    exact = x.double() @ linear.weight.double().T
    plain = linear(x).double()
    use_tf32(linear)
    rounded = linear(x).double()
    scale = float(exact.abs().max())
    assert float((plain - exact).abs().max()) < 1e-6 * scale
    assert 1e-5 * scale < float((rounded - exact).abs().max()) < 2.0**-10 * scale


def angles() -> None:
    """Cosines and sines are the CPU's at each position."""
    module = build_meta(ModelConfig(name="llama", layers=1, width=128, heads=2, context=POSITIONS)).module
    (found,) = exact_modules(module)
    rotary = type(found)(module.config)
    positions, x = torch.arange(POSITIONS)[None], torch.zeros(1, POSITIONS, 128)
    expected = rotary(x, positions)
    rotary.cuda()
    use_tf32(nn.ModuleDict({"linear": nn.Linear(1, 1), "rotary": rotary}))
    for got, want in zip(rotary(x.cuda(), positions.cuda()), expected):
        # An angle of 16,384 radians in float32 is itself off by 2^-10; rounded to 10 bits it would be off by 8.
        assert float((got.cpu() - want).abs().max()) < 4e-3
