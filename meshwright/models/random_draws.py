"""Decides whether a model's forward may draw random numbers in training."""

from __future__ import annotations

from torch import nn

from meshwright.models.build import BuiltModel

_WORDS = ("drop", "jitter")


def drawing_parts(built: BuiltModel) -> list[str]:
    """Returns the names of the modules that have a probability of dropout, or a width of noise, above zero."""
    return [name or "the model" for name, module in built.module.named_modules() if _has_random_attribute(module)]


def _has_random_attribute(module: nn.Module) -> bool:
    """Returns whether a module has a positive float named after dropout or jitter."""
    for key, value in vars(module).items():
        # nn.Dropout calls its probability p, so its class name decides
        attribute_name = type(module).__name__ if key == "p" else key
        if type(value) is float and value > 0 and any(marker in attribute_name.lower() for marker in _WORDS):
            return True
    return False


def may_draw(built: BuiltModel) -> bool:
    """Returns whether forward may draw: for a model outside transformers True, since only running it could tell."""
    return not built.structure.transformers or bool(drawing_parts(built))
