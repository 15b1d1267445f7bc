"""`precision=fp8`: products of the layers' linear modules in float8, the rest of the compute in bf16.

Each product of forward and backward casts its two operands to 8 bits, with a scale for each tensor (``fp8``) or each
row (``fp8_rowwise``), and sums in float32. Weights, their gradients, what travels between ranks and what is saved for
backward stay as under ``bf16``. The casts, scales and kernels are torchao's, called at the module's own product, so
that a weight may be gathered, split by ``tp`` or tied as under any other precision.
Source: Micikevicius et al., FP8 Formats for Deep Learning (2022), section 3; torchao, float8/README.md.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import torch
from torch import nn

from meshwright.errors import PlanError
from meshwright.parallel.forward_stack import Forward, ForwardLayer, wrap_forward
from meshwright.parallel.tensor_hooks import is_plain_product, set_product
from meshwright.parallel.transform import Transform, TransformContext
from meshwright.spec.layout import Layout
from meshwright.spec.layout_fields import FLOAT8_RECIPES
from meshwright.torch_compat.torchao_import import has_torchao, import_torchao

ALIGNMENT = 16
"""Both dims of a rank's part of a weight are multiples of it, else its module computes in bf16. Source: cuBLAS, "Using
the cublasLt API": dims of float8 matrices divide by 16 bytes."""


class Float8Product:
    """The product x W of one linear module in float8.

    Args:
        linear: on any device; its shape alone is read.
        recipe: of torchao, ``tensorwise`` or ``rowwise``.
        emulate: compute in float32 with operands that were rounded to float8, for devices without such kernels.
    """

    def __init__(self, linear: nn.Linear, recipe: str, emulate: bool) -> None:
        float8_linear = import_torchao("torchao.float8.float8_linear")
        self._config = make_config(recipe, emulate)
        # What torchao's own module would multiply with: the settings of its three products.
        with torch.device("meta"):
            module = float8_linear.Float8Linear(linear.in_features, linear.out_features, config=self._config)
        self._products, self._multiply = module.linear_mm_config, float8_linear.matmul_with_hp_or_float8_args.apply

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Returns x W^T.

        Args:
            x: (..., K) bf16.
            weight: (N, K) bf16, this rank's part of the module's.

        Returns:
            (..., N) bf16.
        """
        if not x.numel():
            # An expert without tokens: nothing that a scale could be found from.
            return nn.functional.linear(x, weight)
        product: torch.Tensor = self._multiply(x, weight.t(), self._products, self._config)
        return product


@cache
def make_config(recipe: str, emulate: bool) -> Any:
    """Returns torchao's `Float8LinearConfig` of a recipe.

    The number of tokens may be any: it is the inner dim of the weight's gradient, which is padded to 16.
    """
    made = import_torchao("torchao.float8").Float8LinearConfig.from_recipe_name(recipe)
    return dataclasses.replace(made, emulate=emulate, pad_inner_dim=True)


def check(layout: Layout, layers: int) -> None:
    """Refuses products in float8 without torchao, or without repeated layers, whose linear modules compute in it.

    Raises:
        PlanError: with what works instead.
    """
    if layout.precision not in FLOAT8_RECIPES:
        return
    if layers == 0:
        raise PlanError(
            f"precision={layout.precision} computes the linear modules of repeated layers in float8, but none were "
            "found in the model; nearest that works: precision=bf16"
        )
    check_torchao(layout)


def check_torchao(layout: Layout) -> None:
    """Refuses products in float8 without torchao.

    Raises:
        PlanError: with how it is installed, and what works without it.
    """
    if layout.precision in FLOAT8_RECIPES and not has_torchao():
        raise PlanError(
            f"precision={layout.precision} computes by torchao, which isn't installed: pip install 'meshwright[fp8]' "
            "installs it; nearest that works without it: precision=bf16"
        )


def _apply(context: TransformContext) -> None:
    recipe = FLOAT8_RECIPES[context.layout.precision]
    emulate = context.required_mesh.device_type == "cpu"
    linears = [
        linear for stage in context.stages for layer in stage.layers for linear in float8_linears(layer).values()
    ]
    if not linears:
        raise PlanError(
            f"{context.layout}: products in float8 need linear modules in the layers whose weights have dims that are "
            f"multiples of {ALIGNMENT} on each rank, and here are none; nearest that works: precision=bf16"
        )
    for linear in linears:
        _use_float8(linear, Float8Product(linear, recipe, emulate))


def float8_linears(layer: nn.Module) -> dict[str, nn.Linear]:
    """Returns the linear modules of a layer whose products can be in float8, by name: both dims divide by `ALIGNMENT`.

    Those with a forward of their own (an `nn.Linear` that somebody extended) compute as their author wrote it.
    """
    return {
        name: module
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
        and is_plain_product(module)
        and all(size % ALIGNMENT == 0 for size in module.weight.shape)
    }


def _use_float8(linear: nn.Linear, product: Float8Product) -> None:
    set_product(linear, product)

    def wrap(_plain: Forward) -> Forward:
        def forward(input: torch.Tensor) -> torch.Tensor:
            y = product(input, linear.weight)
            return y if linear.bias is None else y + linear.bias

        return forward

    wrap_forward(linear, ForwardLayer.PRODUCT, "its products are computed in float8", wrap)


TRANSFORM = Transform(
    # Its wrappers lie innermost, but which weights they can multiply with is known once `tp` has sliced them.
    layer=ForwardLayer.EXPERT,
    applies=lambda layout, _source: layout.precision in FLOAT8_RECIPES,
    apply=_apply,
    check=check,
)
