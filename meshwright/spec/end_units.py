"""Which modules outside the layers ZeRO gathers by themselves, so that they needn't stay gathered all step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class EndUnits:
    """Modules of a model whose weights nothing but their own forward reads, each called once in a forward."""

    embedding: str = ""
    """Called before the layers; its backward doesn't read its weights. Empty where the rest's unit holds them."""
    head: tuple[str, ...] = ()
    """Called after the layers, in this order: the last norm, where it is one, and the head."""

    def by_unit(self, names: Sequence[str]) -> Mapping[str, list[str]]:
        """Returns the names of weights outside the layers in ``embedding``, in ``head`` and in the ``rest``."""
        units: dict[str, list[str]] = {"embedding": [], "head": [], "rest": []}
        for name in names:
            if self.embedding and name.startswith(f"{self.embedding}."):
                units["embedding"].append(name)
            elif any(name.startswith(f"{module}.") for module in self.head):
                units["head"].append(name)
            else:
                units["rest"].append(name)
        return units
