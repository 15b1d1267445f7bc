"""Private names of torch.compile."""

from __future__ import annotations

import importlib.util
import shutil
from typing import Any

from torch._library.effects import EffectType

from meshwright.torch_compat import PrivateName

PRIVATE_NAMES = (
    PrivateName(
        "torch._library.effects:EffectType.ORDERED",
        "collectives in a compiled graph must keep their order; the kinds of effects are public under no other name",
    ),
)


def can_compile() -> bool:
    """Returns whether torch.compile finds what it needs for a GPU: Triton, and a C compiler for its launchers."""
    return importlib.util.find_spec("triton") is not None and any(map(shutil.which, ("cc", "gcc", "clang")))


def keep_in_order(operator: Any) -> None:
    """Keeps calls of an operator of `torch.library.custom_op` in the traced order, and none left out or repeated."""
    operator.register_effect(EffectType.ORDERED)
