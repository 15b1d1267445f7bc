"""Whether a model's forward may draw random numbers while it trains."""

from __future__ import annotations

from torch import nn

from meshwright.models.build import BuiltModel

_WORDS = ("drop", "jitter")


def drawing_parts(built: BuiltModel) -> list[str]:
    """Returns the names of the modules that have a probability of dropout, or a width of noise, above zero."""
    return [name or "the model" for name, module in built.module.named_modules() if _draws(module)]


def _draws(module: nn.Module) -> bool:
    for key, value in vars(module).items():
        told = type(module).__name__ if key == "p" else key
        if type(value) is float and value > 0 and any(word in told.lower() for word in _WORDS):
            return True
    return False


def may_draw(built: BuiltModel) -> bool:
    """Whether forward may draw: of a model that isn't a transformers one nobody knows before it has run."""
    return not built.structure.transformers or bool(drawing_parts(built))
