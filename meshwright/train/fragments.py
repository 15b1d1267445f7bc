"""Fragments of the weights, which join the islands at staggered steps, and the transfers of their movements.

The layers are dealt strided: layer l belongs to fragment l mod F, and what lies outside of layers (embeddings, last
norm, head) to fragment F - 1. Fragment p starts its exchange after the steps t with

    t mod H = floor((p + 1) H / F) mod H          H = `outer.every`, F = `outer.fragments` <= H

so that at most one starts in a step, and takes the result `outer.delay` steps later.
Source: Douillard et al., Streaming DiLoCo with overlapping communication (2025), sections 2.2 and 2.3, algorithm 2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from meshwright.errors import ConfigError
from meshwright.parallel.axis_group import PendingCollective
from meshwright.parallel.sync.contract import PendingMean
from meshwright.parallel.weights import Weight

_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
"""The first number among the parts of a weight's name: that of its layer, which experts inside of it have none of."""


def fragment_index(name: str, fragments: int) -> int:
    """Returns the fragment of a weight.

    Args:
        name: of the weight in the whole model, so that every rank finds the same.
        fragments: number of fragments.
    """
    layer = _LAYER.search(name)
    return int(layer[1]) % fragments if layer else fragments - 1


def check_fragments(names: Iterable[str], fragments: int) -> None:
    """Refuses more fragments than a model has layers for.

    Args:
        names: of all trained weights.
        fragments: number of fragments.

    Raises:
        ConfigError: with the nearest number that works.
    """
    every_name = list(names)
    for count in range(fragments, 0, -1):
        if len({fragment_index(name, count) for name in every_name}) == count or count == 1:
            if count < fragments:
                raise ConfigError(
                    f"outer.fragments = {fragments}: the model's layers fill fewer fragments; nearest that works: "
                    f"--outer.fragments {count}"
                )
            return


@dataclass(slots=True)
class Transfer:
    """The exchange of a fragment's movement, from its start to the outer step."""

    step: int
    """Steps done when it started."""
    summary: torch.Tensor
    """(4 + 2 islands,) float64: votes, the stop count, then tokens and summed loss of each island."""
    sent_bytes: int
    """Bytes that this rank sends for it."""
    pending: tuple[PendingMean, PendingCollective] | None = None
    """The collectives under way; None once they are done."""
    movement: list[torch.Tensor] | None = None
    """This island's own movement, for its distance from the mean; None where its weights still show it."""
    mean: torch.Tensor | None = None
    """(n,) mean movement of the islands; None before it is received."""
    norm: float = 0.0
    """2-norm of the mean over all ranks of an island."""
    distance: float = 0.0
    """Root of the mean over islands of the squared distance of their movements from the mean."""
    wait_s: float = 0.0
    """Seconds that this rank stood still for it."""


@dataclass(slots=True)
class Fragment:
    """Weights of this rank that join together."""

    index: int
    weights: list[Weight]
    span: slice
    """Its run of the flat tensors."""
    offset: int
    """It starts after the steps t with t mod `outer.every` = offset."""
    tokens: float = 0.0
    """Target tokens of this island since the last exchange started."""
    loss: float = 0.0
    """Sum of the loss over them."""
    joins: int = 0
    """Exchanges that started before."""
    transfer: Transfer | None = None
    """The exchange under way; None without one."""

    def count(self, tokens: float, loss: float) -> None:
        """Counts a step of this island: its target tokens, 0 for a skipped one, and the mean loss over them."""
        if tokens:
            self.tokens, self.loss = self.tokens + tokens, self.loss + tokens * loss

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns a view of ``flat: (n,)`` for each of the fragment's weights, of the shape of its local part."""
        sizes = [weight.local.numel() for weight in self.weights]
        return [view.view_as(weight.local) for view, weight in zip(flat.split(sizes), self.weights)]


def make_fragments(weights: Iterable[Weight], fragments: int, every: int) -> list[Fragment]:
    """Returns the fragments of this rank's weights, each a run of the flat tensors; one may hold no weight here.

    Args:
        weights: of this rank.
        fragments: number of fragments.
        every: steps between two joins of a fragment.
    """
    every_weight, made, start = list(weights), list[Fragment](), 0
    for index in range(fragments):
        members = [weight for weight in every_weight if fragment_index(weight.name, fragments) == index]
        stop = start + sum(weight.local.numel() for weight in members)
        offset = (index + 1) * every // fragments % every
        made.append(Fragment(index=index, weights=members, span=slice(start, stop), offset=offset))
        start = stop
    return made
