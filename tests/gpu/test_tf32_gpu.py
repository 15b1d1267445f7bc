"""Products in TF32 on a real GPU: rounded where they should be, and rotary angles exact beyond position 2,048."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.parallel.tf32 import exact_modules, use_tf32

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs a GPU with TF32"
)
POSITIONS = 16384


@pytest.fixture(autouse=True)
def _setting() -> Iterator[None]:
    yield
    torch.backends.cuda.matmul.allow_tf32 = False


def test_products_round_their_inputs_to_ten_bits() -> None:
    linear = nn.Linear(1024, 512, bias=False).cuda()
    x = torch.randn(256, 1024, device="cuda")
    exact = x.double() @ linear.weight.double().T
    plain = linear(x).double()
    use_tf32(linear)
    rounded = linear(x).double()
    scale = float(exact.abs().max())
    assert float((plain - exact).abs().max()) < 1e-6 * scale
    assert 1e-5 * scale < float((rounded - exact).abs().max()) < 2.0**-10 * scale


def test_rotary_angles_are_those_of_float32() -> None:
    module = build_meta(ModelConfig(name="llama", layers=1, width=128, heads=2, context=POSITIONS)).module
    (rotary,) = exact_modules(module)
    rotary = type(rotary)(module.config)
    positions, x = torch.arange(POSITIONS)[None], torch.zeros(1, POSITIONS, 128)
    expected = rotary(x, positions)
    rotary.cuda()
    use_tf32(nn.ModuleDict({"linear": nn.Linear(1, 1), "rotary": rotary}))
    found = rotary(x.cuda(), positions.cuda())
    for got, want in zip(found, expected):
        # An angle of 16,384 radians in float32 is itself off by 2^-10; rounded to 10 bits it would be off by 8.
        assert float((got.cpu() - want).abs().max()) < 4e-3
