"""Words what layers hand on beside tensors: objects and numbers, which a stage without the layer doesn't have."""

from __future__ import annotations

import torch


class LayerStates:
    """Remembers the first object with tensors, and the first other value, that a layer hands on."""

    def __init__(self) -> None:
        self._object = self._value = ""

    def note_argument(self, layer: str, leaf: object) -> None:
        """Notes an argument of a layer that is no tensor: an object with tensors of a gradient may be changed in it."""
        if any(tensor.requires_grad for tensor in _tensors(leaf)):
            self._object = self._object or f"layer '{layer}' is called with a {type(leaf).__name__}"

    def note_result(self, layer: str, leaf: object) -> None:
        """Notes a result of a layer that is no tensor."""
        words = f"layer '{layer}' returns a value of type {type(leaf).__name__}"
        if _tensors(leaf):
            self._object = self._object or words
        elif leaf is not None:
            self._value = self._value or words

    def reason(self, with_values: bool) -> str:
        """Returns why a model of such layers can't be cut; "" where they hand on tensors alone.

        Args:
            with_values: whether a value without tensors may be the reason.
        """
        if self._object:
            return (
                f"{self._object}, whose tensors can't be sent to the next stage; nearest that works: layers that take "
                "and return tensors, alone or in a tuple, list or dict; or replicate, shard or tp in place of pp"
            )
        if self._value and with_values:
            return (
                f"{self._value}, and a stage without that layer doesn't have it; nearest that works: a tensor in its "
                "place, or a value that the model's own forward makes; or replicate, shard or tp in place of pp"
            )
        return ""


def _tensors(leaf: object) -> list[torch.Tensor]:
    """Returns the tensors that an object has as attributes."""
    return [value for value in getattr(leaf, "__dict__", {}).values() if isinstance(value, torch.Tensor)]
