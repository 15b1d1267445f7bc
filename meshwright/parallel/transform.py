"""What an axis or a choice of the layout does to the model: a `Transform` in its own file, found by `transforms`.

`build` runs every transform that applies, in the order of `ForwardLayer`; it names none of them. A new axis that
changes modules adds ``parallel/<name>.py`` with a ``TRANSFORM``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch

from meshwright.parallel.compression import RoundingKey
from meshwright.parallel.dropout_rng import DropoutRng
from meshwright.parallel.forward_stack import ForwardLayer
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.model_source import ModelSource
from meshwright.parallel.program import Program
from meshwright.parallel.progress_hooks import LayerProgressHooks
from meshwright.parallel.stage_module import LossView, StageModule
from meshwright.parallel.step_timer import StepTimer
from meshwright.spec.layout import Layout
from meshwright.spec.layout_fields import FLOAT8_RECIPES

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    **dict.fromkeys(FLOAT8_RECIPES, torch.bfloat16),
}
"""Dtype of gathered weights and activations by a layout's precision."""


@dataclass(slots=True)
class TransformContext:
    """What the transforms read and change, in their order."""

    source: ModelSource
    layout: Layout
    mesh: Mesh | None
    """Ranks and groups; None for one rank without a process group."""
    stages: list[StageModule]
    """This rank's stages of the model; one, the whole model, without a pipeline."""
    view: LossView = field(default_factory=LossView)
    """What the loss must know of the layout."""
    dropout_rng: DropoutRng | None = None
    """Random numbers of forward, where it may draw some."""
    rounding_key: RoundingKey = field(default_factory=RoundingKey)
    """Of the random roundings of compressed sums."""
    progress_hooks: LayerProgressHooks = field(default_factory=LayerProgressHooks)
    """Report which layer runs."""
    make_program: Callable[[TransformContext, StepTimer], Program] | None = None
    """Makes the `Program` of a layout whose stages a schedule runs; None where the rank has the whole model."""

    @property
    def required_mesh(self) -> Mesh:
        """The mesh, of a layout that has one."""
        if self.mesh is None:
            raise RuntimeError(f"layout {self.layout} needs process groups, and none were made")
        return self.mesh


def no_rule(layout: Layout, layers: int) -> None:
    """Refuses nothing: the check of a transform that runs under every layout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transform:
    """One step of making a layout true."""

    layer: ForwardLayer
    """Where its wrappers lie, and when it runs: lower layers first."""
    applies: Callable[[Layout, ModelSource], bool]
    """Whether a layout asks for it."""
    apply: Callable[[TransformContext], None]
    """Changes the context's modules, which are on the meta device."""
    axis: str = ""
    """The axis whose mechanics it has; "" for a choice of the layout, and for axes that follow from their facts."""
    check: Callable[[Layout, int], None] = no_rule
    """(layout, number of repeated layers): raises PlanError with the rule and the nearest layout that works."""


def uses_axis(name: str) -> Callable[[Layout, ModelSource], bool]:
    """Returns the ``applies`` of an axis: its degree is above 1."""
    return lambda layout, _source: layout.degree(name) > 1


@cache
def transforms() -> tuple[Transform, ...]:
    """Returns the `TRANSFORM` of every file of this folder that has one, in the order in which they run."""
    folder = importlib.import_module("meshwright.parallel")
    modules = [
        importlib.import_module(f"{folder.__name__}.{entry.name}") for entry in pkgutil.iter_modules(folder.__path__)
    ]
    collected = [module.TRANSFORM for module in modules if isinstance(getattr(module, "TRANSFORM", None), Transform)]
    return tuple(sorted(collected, key=lambda transform: transform.layer))
