"""The cost of a layer, or an end of the model, on one micro-batch of N layouts: seconds by part, bytes, parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.array_types import Values


@dataclass(kw_only=True, slots=True)
class PassTime:
    """Seconds of a forward or a backward of one layer or end of the model, by part; each (N,) float64 or a scalar."""

    matmul: Values = 0.0
    attention: Values = 0.0
    elementwise: Values = 0.0
    recompute: Values = 0.0
    tp: Values = 0.0
    cp: Values = 0.0
    ep: Values = 0.0
    host: Values = 0.0
    """Seconds in which the host launches it; not added, but a lower bound on the pass."""
    inside: Values = 0.0
    """Seconds in which its traffic, hidden or not, fills the links inside nodes; not added."""
    outside: Values = 0.0
    """The same of the network between nodes."""

    @property
    def compute(self) -> Values:
        """Seconds of compute, (N,)."""
        return self.matmul + self.attention + self.elementwise + self.recompute

    @property
    def busy(self) -> Values:
        """Device seconds, (N,): compute and exposed traffic."""
        return self.compute + self.tp + self.cp + self.ep


@dataclass(kw_only=True, slots=True)
class LayerCost:
    """Cost of a layer, or an end of the model, on one micro-batch; figures are (N,) float64 or scalars."""

    forward: PassTime = field(default_factory=PassTime)
    backward: PassTime = field(default_factory=PassTime)
    saved: Values = 0.0
    """Bytes saved from forward to backward where nothing is recomputed."""
    spared: Values = 0.0
    """Of these, the bytes that a layer which recomputes doesn't save."""
    spared_rest: Values = 0.0
    """The same of the other layers, where these recompute in another way."""
    working: Values = 0.0
    """Bytes allocated only while the layer runs or recomputes."""
    parameters: Values = 0.0
    """Dense parameters of a rank before the data axes shard them."""
    experts: Values = 0.0
    """Parameters of a rank's routed experts before the data axes shard them."""
    first_gradient: Values = 0.0
    """Parameters of its last product, or of one weight of all a rank's experts where these are more: the gradient that
    is there when its backward has most."""
