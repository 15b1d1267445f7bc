"""The GPU's AdamW by Triton's interpreter against float64 and torch: values, copies that compute, skipped steps, state.

Run where Triton is installed, by `make ghost`; without `TRITON_INTERPRET=1` a kernel needs a GPU.
"""

from __future__ import annotations

import importlib
import math
import os

import pytest
import torch
from torch import nn

from meshwright.parallel.weights import Weight, named_weights
from meshwright.train.config import OptimizerConfig
from meshwright.train.optimizer import LocalAdamW

pytest.importorskip("triton")
kernels = importlib.import_module("meshwright.parallel.triton_kernels.adamw")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels aren't interpreted here")

SHAPES = ((33, 129), (kernels.CHUNK,), (3, 5, 7), (1,), (2 * kernels.CHUNK + 3,))
"""More and less than a program has, and exactly as much."""
FACTORS = (0.5, math.nan, 3.0, math.inf, 1.0)
CONFIG = OptimizerConfig(beta1=0.8, beta2=0.999, eps=1e-6, weight_decay=0.3)


def make_weights(dtype: torch.dtype, offset: int = 0) -> list[Weight]:
    """Returns weights that begin ``offset`` elements behind a multiple of 16 bytes; with copies unless float32."""
    draw, module = torch.Generator().manual_seed(0), nn.Module()
    for number, shape in enumerate(SHAPES):
        memory = torch.cat([torch.zeros(offset), torch.randn(math.prod(shape), generator=draw)])
        module.register_parameter(f"p{number}", nn.Parameter(memory[offset:].view(shape)))
    weights = named_weights(module, {}, 1)
    if dtype != torch.float32:
        for weight in weights:
            weight.parameter.grad_dtype = None
            weight.compute = nn.Parameter(weight.local.to(dtype))
    return weights


def gradients(step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(100 + step)
    grads = [torch.randn(shape, generator=draw).to(dtype) for shape in SHAPES]
    # A weight that no forward reached has zeros of float32.
    grads[2] = torch.zeros(SHAPES[2]) if step == 2 else grads[2]
    return grads


def update(weights: list[Weight], optimizer: LocalAdamW, dtype: torch.dtype, steps: range) -> None:
    for step in steps:
        for weight, grad in zip(weights, gradients(step, dtype)):
            weight.parameter.grad = grad
        optimizer.step(1e-2 * (step + 1), torch.tensor(FACTORS[step], dtype=torch.float64))


def by_hand(dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns the weights after the steps in float64, from the paper's formulas."""
    found = []
    for index, weight in enumerate(make_weights(torch.float32)):
        x, first, second, count = weight.local.double(), 0.0, 0.0, 0
        decay = CONFIG.weight_decay if x.dim() >= 2 else 0.0
        for step, factor in enumerate(FACTORS):
            if not math.isfinite(factor):
                continue
            count, lr = count + 1, 1e-2 * (step + 1)
            grad = gradients(step, dtype)[index].double() * factor
            first = CONFIG.beta1 * first + (1 - CONFIG.beta1) * grad
            second = CONFIG.beta2 * second + (1 - CONFIG.beta2) * grad**2
            mean, spread = first / (1 - CONFIG.beta1**count), second / (1 - CONFIG.beta2**count)
            x = x - lr * decay * x - lr * mean / (spread.sqrt() + CONFIG.eps)
        found.append(x)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("offset", [0, 1])
def test_equals_float64(dtype: torch.dtype, offset: int) -> None:
    weights = make_weights(dtype, offset)
    before = [weight.local.clone() for weight in weights]
    optimizer = LocalAdamW(weights, CONFIG)
    optimizer._kernels = kernels
    update(weights, optimizer, dtype, range(len(FACTORS)))
    for weight, old, expected in zip(weights, before, by_hand(dtype)):
        # Of the change, not of the weight: some roundings of float32.
        assert float((weight.local - expected).abs().max()) <= 1e-6 * float((expected - old).abs().max() + 1.0)
        if weight.compute is not None:
            # The interpreter cuts the digits that bf16 lacks off; a GPU rounds them (`tests/gpu`).
            error = (weight.compute.float() - weight.local).abs() / weight.local.abs()
            assert bool((error < (2.0**-7 if dtype == torch.bfloat16 else 2.0**-11 + 1e-9)).all())
    assert optimizer.steps == sum(map(math.isfinite, FACTORS)) == 3
    assert optimizer.bytes() == 2 * sum(weight.local.nbytes for weight in weights)


def test_a_step_that_is_not_finite_changes_no_bit() -> None:
    weights = make_weights(torch.bfloat16)
    optimizer = LocalAdamW(weights, CONFIG)
    optimizer._kernels = kernels
    update(weights, optimizer, torch.bfloat16, range(1))
    state = [weight.local for weight in weights] + optimizer.moments() + [weight.compute for weight in weights]
    before = [item.detach().clone() for item in state]  # type: ignore[union-attr]
    for weight in weights:
        weight.parameter.grad = torch.full_like(weight.local, math.nan)
    optimizer.step(1e-2, torch.tensor(math.nan, dtype=torch.float64))
    assert all(torch.equal(item, old) for item, old in zip(state, before))  # type: ignore[arg-type]
    assert optimizer.steps == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_goes_on_with_torchs_kernel_and_back(dtype: torch.dtype) -> None:
    """A checkpoint of a GPU is continued on a CPU, and the other way round."""
    ours, theirs = make_weights(dtype), make_weights(dtype)
    one, two = LocalAdamW(ours, CONFIG), LocalAdamW(theirs, CONFIG)
    one._kernels = kernels
    for steps in (range(1), range(2, 3)):
        update(ours, one, dtype, steps)
        update(theirs, two, dtype, steps)
        first, second = ([item.clone() for _, item in optimizer.state()] for optimizer in (one, two))
        assert len(first) == 2 * len(SHAPES) and all(item.abs().sum() > 0 for item in first)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(first, second, strict=True))
        # New ones, whose moments are 0, go on from each other's state.
        updates, one, two = one.steps, LocalAdamW(ours, CONFIG), LocalAdamW(theirs, CONFIG)
        one._kernels = kernels
        for optimizer, state in ((one, second), (two, first)):
            for (_, item), saved in zip(optimizer.state(), state, strict=True):
                item.copy_(saved)
            optimizer.restored(updates)
    for weight, other in zip(ours, theirs):
        assert torch.allclose(weight.local, other.local, atol=1e-6)
        assert weight.compute is None or torch.allclose(weight.compute, other.compute, rtol=2.0**-7)  # type: ignore[arg-type]
    assert one.steps == two.steps == 2
