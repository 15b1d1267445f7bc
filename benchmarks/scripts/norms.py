"""Clipping by hand where torch's ``clip_grad_norm_`` can't: weights of several meshes, or on several ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def squared_norm(gradients: Iterable[torch.Tensor], ranks: int) -> torch.Tensor:
    """Returns this rank's share of the squared norm of gradients that ``ranks`` ranks hold, as shards or alike."""
    by_copies: dict[int, list[torch.Tensor]] = {}
    for gradient in gradients:
        shards = 1
        if isinstance(gradient, DTensor):
            sizes = zip(gradient.device_mesh.shape, gradient.placements)
            # Not is_shard(): a weight that two axes split has a _StridedShard, which says no to it.
            shards = math.prod(size for size, place in sizes if not place.is_replicate())
            gradient = gradient.to_local()
        by_copies.setdefault(ranks // shards, []).append(gradient)
    total = torch.zeros(())
    for copies, held in by_copies.items():
        total += torch.stack(torch._foreach_norm(held)).square().sum() / copies
    return total


def clip_shards(model: torch.nn.Module, most: float) -> None:
    """Clips gradients that all ranks hold, as shards or alike, by their norm."""
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    total = squared_norm(gradients, dist.get_world_size())
    dist.all_reduce(total)
    scale(gradients, total.sqrt(), most)


def scale(gradients: Iterable[torch.Tensor], norm: torch.Tensor, most: float) -> None:
    """Multiplies gradients so that a norm comes down to at most ``most``."""
    factor = torch.clamp(most / (norm + 1e-6), max=1.0)
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    torch._foreach_mul_(local, factor)
