"""Counts the tensors that layers save for backward, and when: what recompute must reach, and so what it sends again."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from meshwright.spec.sharding_table import LayerSharding

SavedCounts = dict[str, int]
"""Tensors that a model has saved when each module of a layer ends, by name in the layer; "" is the layer itself."""


def count_saved_tensors(layers: Mapping[str, nn.Module], run: Callable[[], object]) -> dict[str, SavedCounts]:
    """Returns the counts of each layer that a forward calls.

    Args:
        layers: by name.
        run: calls the model, whose random numbers are restored behind it.
    """
    saved, counts = 0, {name: SavedCounts() for name in layers}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal saved
        saved += 1
        return tensor

    def note(counts_of_layer: SavedCounts, name: str) -> Callable[..., None]:
        return lambda *_: counts_of_layer.__setitem__(name, saved)

    handles = [
        module.register_forward_hook(note(counts[layer], name))
        for layer, root in layers.items()
        for name, module in root.named_modules()
    ]
    try:
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), hooks:
            run()
    finally:
        for handle in handles:
            handle.remove()
    return counts


def saves_after_sums(counts: SavedCounts, sharding: LayerSharding) -> bool:
    """Whether a layer saves a tensor after its last row-parallel linear, such as the input of a norm behind it."""
    rows = [name for group in sharding.groups for name in group.row_linears]
    # Experts whose rows are parameters of one module aren't looked at.
    return bool(rows) and all(row in counts for row in rows) and counts[""] > max(counts[row] for row in rows)
