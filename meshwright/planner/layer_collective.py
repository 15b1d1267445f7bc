"""One collective of a layer, and what recompute does with it."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.planner.rank_groups import CollectiveGroup


@dataclass(frozen=True, slots=True)
class LayerCollective:
    """One collective of a layer on one micro-batch."""

    group: CollectiveGroup
    kind: str
    size: float
    """Bytes, as `Collectives` counts them."""
    is_backward: bool = False
    """Whether it belongs to backward, not forward."""
    skipped_by_recompute: bool = False
    """Whether no tensor that backward reads follows it, so that recompute stops before it."""
    kept_by_selective: bool = False
    """Whether ``selective`` recompute keeps the result of the operator that it is part of."""
    kept_by_ep_keep: bool = False
    """Whether `Layout.ep_keep` keeps what it brings."""


def sum_of_products(group: CollectiveGroup, kind: str, size: float, is_last: bool = False) -> LayerCollective:
    """Returns the sum over ranks of row-parallel products, which selective recompute keeps (`parallel.selective`)."""
    return LayerCollective(group, kind, size, skipped_by_recompute=is_last, kept_by_selective=True)
