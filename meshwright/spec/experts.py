"""Where a mixture's experts are: what the expert axis must know of a model to give each rank its own."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.spec.placement import Span


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerExperts:
    """One module that holds all experts of a layer.

    Either dim 0 of each of its parameters counts the experts, and its forward takes hidden states (T, D), the experts
    of each token (T, k) and their weights (T, k), and returns the weighted sum of the experts' outputs (T, D). Or it is
    a list of modules, each an expert, and its parent's forward calls these with rows (..., D).
    """

    module: str
    """Dotted name of the module."""
    experts: int
    """Number of experts, X."""
    parameters: tuple[str, ...]
    """Names of its parameters: attributes, each (X, ...), or those of the modules of a list, each an expert's."""
    counts: tuple[str, ...]
    """Attributes of the module that hold X; on a rank that holds some experts they hold their number."""
    arguments: tuple[str, str, str]
    """Names of forward's arguments for hidden states, experts and weights, in this order."""
    children: tuple[str, ...] = ()
    """Names of the modules of a list, in order; none where experts are rows of parameters."""

    @property
    def caller(self) -> str:
        """Dotted name of the module whose forward calls the experts."""
        return self.module.rpartition(".")[0]

    def expert_of(self, parameter: str) -> int:
        """Returns the expert that a parameter of a list belongs to."""
        return self.children.index(parameter.partition(".")[0])

    def local_size(self, parameter: str, size: int, span: Span) -> int:
        """Returns the size of dim 0 of a parameter on a rank with the experts ``span``, of ``size`` in the model."""
        start, stop = span
        if not self.children:
            return stop - start
        return size if start <= self.expert_of(parameter) < stop else 0

    def span(self, index: int, ranks: int) -> Span:
        """Returns the experts [start, stop) of rank ``index`` of ``ranks``; sizes differ by one at most."""
        return self.experts * index // ranks, self.experts * (index + 1) // ranks
