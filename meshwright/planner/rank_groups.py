"""The groups of ranks that collectives run over, as a layout makes them for one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.spec.axes import known_axes
from meshwright.spec.groups import carved_groups, members
from meshwright.spec.layout import Layout


@dataclass(frozen=True, slots=True)
class CollectiveGroup:
    """The ranks of a collective."""

    axis: str
    """Name under which the runtime counts it."""
    ranks: tuple[int, ...]
    """Global, in order."""


class RankGroups:
    """The collective groups of one rank.

    Args:
        layout: its axes.
        rank: which rank.
    """

    def __init__(self, layout: Layout, rank: int) -> None:
        self._layout, self._rank = layout, rank
        self._carved: dict[str, CollectiveGroup] = {}
        for name in (name for name, axis in known_axes().items() if axis.carves and layout.degree(name) > 1):
            for suffix, groups in zip(("", "_shard", "_copies"), carved_groups(name, layout.degrees)):
                ranks = next(group for group in groups if rank in group)
                self._carved[name + suffix] = CollectiveGroup(name + suffix, tuple(ranks))

    def across(self, names: Sequence[str]) -> CollectiveGroup:
        """Returns the group over the product of some axes."""
        used = [name for name in names if self._layout.degree(name) > 1]
        return CollectiveGroup("+".join(used), members(self._rank, used, self._layout.degrees))

    def carved(self, name: str) -> CollectiveGroup:
        """Returns a group of an axis that divides the ranks of others: ``ep``, ``ep_shard``, ``ep_copies``."""
        return self._carved.get(name) or CollectiveGroup(name, (self._rank,))

    def neighbours(self, name: str, size: int) -> CollectiveGroup:
        """Returns the run of ``size`` neighbours along an axis."""
        ranks = self.across((name,)).ranks
        start = ranks.index(self._rank) // size * size
        return CollectiveGroup(name, ranks[start : start + size])
