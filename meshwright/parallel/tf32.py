"""`precision=tf32`: float32, with products of matrices whose inputs tensor cores round to 10 bits of mantissa.

Weights, activations, gradients and what travels between ranks are those of ``float32``. Rotary angles must not be
rounded so: they are products of positions and frequencies, and 10 bits don't hold each position beyond 2,048. Modules
that have buffers and no weights compute them, and their products stay exact; a model that multiplies such numbers
elsewhere is refused (`models.analysis.unweighted_products`).
Source: NVIDIA, Accelerating AI Training with NVIDIA TF32 Tensor Cores (2021); torch, CUDA semantics, TensorFloat-32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshwright.parallel.forward_stack import Forward, ForwardLayer, wrap_forward
from meshwright.parallel.transform import Transform, TransformContext


@contextmanager
def float32_products(rounded: bool) -> Iterator[None]:
    """Says within a block whether this process' GPU products of float32 round their inputs to TF32."""
    # By its older name, which both of torch's ways to read the setting understand.
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.allow_tf32 = rounded
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before == "tf32"


def use_tf32(module: nn.Module) -> None:
    """Lets this process' GPU products of float32 round their inputs to TF32, but for those of a module's angles.

    Args:
        module: whose modules with buffers and without weights keep exact products.
    """
    torch.backends.cuda.matmul.allow_tf32 = True
    for child in exact_modules(module):
        wrap_forward(child, ForwardLayer.PRODUCT, "its products are exact", _exact)


def exact_modules(module: nn.Module) -> list[nn.Module]:
    """Returns the outermost modules with floating-point buffers and without weights, as rotary embeddings are."""
    if next(module.parameters(), None) is None:
        return [module] if any(buffer.is_floating_point() for buffer in module.buffers()) else []
    return [found for child in module.children() for found in exact_modules(child)]


def _exact(plain: Forward) -> Forward:
    # Not traced: a compiled graph keeps the setting under which it was made.
    @torch.compiler.disable
    def forward(*args: Any, **kwargs: Any) -> Any:
        with float32_products(rounded=False):
            return plain(*args, **kwargs)

    return forward


def _apply(context: TransformContext) -> None:
    for stage in context.stages:
        use_tf32(stage.module)


TRANSFORM = Transform(
    layer=ForwardLayer.PRODUCT, applies=lambda layout, _source: layout.precision == "tf32", apply=_apply
)
