"""The `tp` axis: ranks hold parts of each matrix and compute parts of each layer; tokens may be split in between."""

from __future__ import annotations

from meshwright.spec.axis import Axis, Holds, Mechanics, Reads

AXIS = Axis(
    name="tp",
    reads=Reads.SAME,
    holds=Holds.SHARD,
    order=60,
    mechanics=Mechanics.MATRICES,
    purpose="tensor: ranks hold parts of each weight and compute parts of each layer",
    aliases=(
        "model",
        "tensor",
        "tensor_parallel",
    ),
)
