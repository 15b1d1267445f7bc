"""AdamW and the gradient's norm on a GPU: values against float64, bytes a second, and by how large programs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from meshwright.parallel.triton_kernels import load_kernels
from meshwright.parallel.weights import Weight, named_weights
from meshwright.train.config import OptimizerConfig
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.step import squared_norm
from tests.gpu.parts import kernel_witness as witness
from tests.gpu.parts.kernel_witness import Bench, draw, relative

BYTES = 28
"""A weight's: weight, gradient and moments are read, all but the gradient written; in bf16 the gradient has 2 less, and
the weight's copy 2."""
PROGRAMS = ((1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8))
"""Elements of a program of our kernel, and its warps."""


def weights_of(module: nn.Module, dtype: torch.dtype) -> list[Weight]:
    """Returns the weights of a module, with copies that compute where the type isn't float32."""
    weights = named_weights(module, {}, 1)
    if dtype != torch.float32:
        for weight in weights:
            weight.compute = nn.Parameter(weight.local.to(dtype))
            weight.parameter.grad_dtype = None
    return weights


def values(bench: Bench) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for name, on_host in (("fused", False), ("foreach", False), ("single", False), ("fused", True)):
            one_kind(bench, dtype, name, on_host)


def one_kind(bench: Bench, dtype: torch.dtype, name: str, on_host: bool) -> None:
    rates, steps = (1e-2, 3e-3, 1e-3), 3
    config = OptimizerConfig(implementation=name)  # type: ignore[arg-type]
    # 300,300 and 1,001 elements: the last program of each has fewer than the others.
    module = nn.Linear(300, 1001).to(bench.device)
    before, weights = [x.detach().clone() for x in module.parameters()], weights_of(module, dtype)
    optimizer = LocalAdamW(weights, config, on_host)
    factor = torch.tensor(0.25, dtype=torch.float64, device=bench.device)
    all_grads: list[list[torch.Tensor]] = [[], []]
    for step in range(steps):
        for index, weight in enumerate(weights):
            x = weight.parameter
            (x.grad,) = draw(x.shape, dtype=dtype, device=bench.device, seed=10 * step + index)
            all_grads[index].append(0.25 * x.grad.float())
        optimizer.step(rates[step], factor)
        # A step that isn't finite changes nothing.
        for weight in weights:
            weight.parameter.grad = torch.full_like(weight.local, math.inf)
        optimizer.step(rates[step], factor * math.nan)
    errors = []
    for weight, old, grads, decay in zip(weights, before, all_grads, (config.weight_decay, 0.0)):
        new = witness.adamw(old, grads, rates, decay, (config.beta1, config.beta2))
        # Of the change, not of the weight.
        errors.append(relative((weight.local.double() - old).view(1, -1), (new - old).view(1, -1)))
        if weight.compute is not None and bench.has_values and not torch.equal(weight.compute, weight.local.to(dtype)):
            errors.append(math.inf)
    bench.line(f"adamw {name}{' on the host' * on_host}", max(errors), 1e-4, dtype=dtype, shape="1001x300")
    assert optimizer.steps == steps or not bench.has_values, optimizer.steps


def speed(bench: Bench) -> None:
    width = 128 if bench.small else 4096
    for on_host, count in ((False, 16), (True, 2)):
        update_speed(bench, "adamw on the host" if on_host else "adamw", width, count, torch.float32, on_host)
    for dtype in (torch.float32, torch.bfloat16):
        update_speed(bench, "adamw by torch", width, 16, dtype, ours=False)
    if (kernels := load_kernels("adamw") if bench.device.type == "cuda" else None) is not None:
        usual = kernels.CHUNK, kernels.WARPS
        for kernels.CHUNK, kernels.WARPS in PROGRAMS:
            name = f"adamw, {kernels.CHUNK} elements and {kernels.WARPS} warps a program"
            update_speed(bench, name, width, 16, torch.bfloat16)
        kernels.CHUNK, kernels.WARPS = usual


def update_speed(
    bench: Bench, name: str, width: int, count: int, dtype: torch.dtype, on_host: bool = False, ours: bool = True
) -> None:
    module = nn.Sequential(*(nn.Linear(width, width, False, bench.device) for _ in range(count)))
    weights = weights_of(module, dtype)
    optimizer = LocalAdamW(weights, OptimizerConfig(), on_host)
    if not ours:
        optimizer._kernels = None
    factor = torch.ones((), dtype=torch.float64, device=bench.device)
    grads = [torch.randn_like(weight.local).to(dtype) for weight in weights]

    def run() -> None:
        # A path that wants float32 makes it of bf16 each time.
        for weight, grad in zip(weights, grads):
            weight.parameter.grad = grad
        optimizer.step(1e-4, factor)

    numbers = width * width * count
    ms = bench.ms(run, 5)
    rate = round(BYTES * numbers / max(ms, 1e-9) / 1e6, 1)
    bench.line(name, dtype=dtype, shape=f"{numbers} weights", ms=ms, gb_s=rate)
    if ours and not on_host and name == "adamw":
        norm_speed(bench, list(zip(weights, grads)), numbers)


def norm_speed(bench: Bench, shards: Sequence[tuple[Weight, torch.Tensor]], numbers: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        typed = [(weight, grad.to(dtype)) for weight, grad in shards]
        norm = squared_norm(typed, bench.device)
        exact = sum(grad.double().square().sum() for _, grad in typed)
        ms = bench.ms(lambda: squared_norm(typed, bench.device), 5)  # noqa: B023 - called before the loop goes on
        error = abs(float(norm / exact) - 1) if bench.has_values else 0.0
        rate = round(dtype.itemsize * numbers / max(ms, 1e-9) / 1e6, 1)
        bench.line("gradient norm", error, 1e-5, dtype=dtype, shape=f"{numbers}", ms=ms, gb_s=rate)
