"""Train and eval modes of submodules: user code sets them one by one, so whoever changes them puts each one back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

from torch import nn


def training_modes(module: nn.Module) -> dict[str, bool]:
    """Returns whether each submodule trains, by its dotted name; "" is the module itself."""
    return {name: submodule.training for name, submodule in module.named_modules()}


def set_training_modes(module: nn.Module, modes: Mapping[str, bool]) -> None:
    """Puts submodules into the modes that `training_modes` returned for this module, or for one it is a copy of."""
    # First by `train`, which a class may override to change more than the flag.
    module.train(modes[""])
    for name, submodule in module.named_modules():
        submodule.training = modes.get(name, submodule.training)


@contextlib.contextmanager
def evaluation_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Evaluates modules inside of the context; each submodule then has its own mode again."""
    saved_modes = [(module, training_modes(module)) for module in modules]
    for module, _ in saved_modes:
        module.eval()
    try:
        yield
    finally:
        for module, modes in saved_modes:
            set_training_modes(module, modes)
