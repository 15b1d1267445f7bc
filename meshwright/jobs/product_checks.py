"""Checks products in float8 and TF32, where a layout asks for them, and counts the modules that compute in float8."""

from __future__ import annotations

from torch import nn

from meshwright.errors import ConfigError
from meshwright.launch.devices import Devices, least_compute_capability
from meshwright.models.build import BuiltModel
from meshwright.parallel.float8 import ALIGNMENT, check_torchao, float8_linears
from meshwright.spec.axis import Mechanics
from meshwright.spec.compression import FLOAT8_CAPABILITY
from meshwright.spec.layout import Layout
from meshwright.spec.layout_fields import FLOAT8_RECIPES
from meshwright.train.model_analysis import ModelAnalysis

_LEAST_CAPABILITY = {"tf32": 8.0, "fp8": FLOAT8_CAPABILITY, "fp8_rowwise": 9.0}
"""Ampere; Ada; and Hopper for a scale for each row. Source: torch, CUDA semantics, and `aten::_scaled_mm` on CUDA."""


def check_products(layout: Layout, devices: Devices) -> None:
    """Refuses products in TF32 or float8 on devices without them, and float8 without torchao; cores emulate float8.

    Raises:
        ConfigError, PlanError: with what works instead.
    """
    check_torchao(layout)
    precision = layout.precision
    if precision not in _LEAST_CAPABILITY:
        return
    nearest_precision = "float32" if precision == "tf32" else "bf16"
    if devices.kind != "cuda":
        if precision == "tf32":
            raise ConfigError(
                "precision=tf32: tensor cores of GPUs round to TF32, and the ranks compute on processor cores; nearest "
                "that works: precision=float32"
            )
        return
    least, capability = _LEAST_CAPABILITY[precision], least_compute_capability()
    if capability is not None and capability < least:
        raise ConfigError(
            f"precision={precision} needs GPUs of compute capability {least}, here is one of {capability}; "
            f"nearest that works: precision={nearest_precision}"
        )


def float8_header_row(built: BuiltModel, layout: Layout, analysis: ModelAnalysis, kind: str) -> dict[str, str]:
    """Returns the header's row of a run whose products are in float8, under the layout that it has now.

    Args:
        built: the model.
        layout: of the run.
        analysis: of the model for the layout.
        kind: of the devices, ``cpu`` or ``cuda``.
    """
    if layout.precision not in FLOAT8_RECIPES:
        return {}
    used, left_out = count_float8_linears(built, layout, analysis)
    row = f"in {used} of {used + len(left_out)} linear modules of the layers"
    if left_out:
        row += (
            f"; in bf16, since a rank's part has dims that are no multiples of {ALIGNMENT}: {', '.join(left_out[:3])}"
        )
        row += ", ..." if len(left_out) > 3 else ""
    if kind == "cpu":
        row += "; emulated on processor cores, which is slower than bf16"
    elif not layout.compile:
        row += "; without compile=true its casts are kernels of their own, which is slower than bf16"
    return {"float8": row}


def count_float8_linears(built: BuiltModel, layout: Layout, analysis: ModelAnalysis) -> tuple[int, list[str]]:
    """Returns how many linear modules of the layers compute in float8 on rank 0, and the names of the others."""
    degree = layout.degree(Mechanics.MATRICES)
    local_sizes: dict[str, dict[int, int]] = {}
    for layer, split, shares, group in analysis.table.splits(degree) if analysis.table and degree > 1 else ():
        spans = split.spans(*shares[0], group.units)
        local_sizes.setdefault(f"{layer}.{split.name}", {})[split.dim] = sum(stop - start for start, stop in spans)
    used, left_out = 0, []
    for layer_name in built.structure.layers:
        layer = built.module.get_submodule(layer_name)
        whole = float8_linears(layer)
        for name, module in layer.named_modules():
            if not isinstance(module, nn.Linear):
                continue
            sizes = local_sizes.get(f"{layer_name}.{name}.weight", {})
            if name in whole and all(size % ALIGNMENT == 0 for size in sizes.values()):
                used += 1
            else:
                left_out.append(f"{layer_name}.{name}")
    return used, left_out
