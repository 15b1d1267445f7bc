"""Where a mixture's experts are: what the expert axis must know of a model to give each rank its own."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.spec.placement import Span


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertRows:
    """One module that holds all experts of a layer as rows: dim 0 of each of its parameters counts the experts.

    Its forward takes hidden states (T, D), the experts of each token (T, k) and their weights (T, k), and returns the
    weighted sum of the experts' outputs (T, D).
    """

    module: str
    """Dotted name of the module."""
    experts: int
    """Number of experts, X."""
    parameters: tuple[str, ...]
    """Attribute names of its parameters, each (X, ...)."""
    counts: tuple[str, ...]
    """Attributes of the module that hold X; on a rank that holds some experts they hold their number."""
    arguments: tuple[str, str, str]
    """Names of forward's arguments for hidden states, experts and weights, in this order."""

    def span(self, index: int, ranks: int) -> Span:
        """Returns the experts [start, stop) of rank ``index`` of ``ranks``; sizes differ by one at most."""
        return self.experts * index // ranks, self.experts * (index + 1) // ranks
