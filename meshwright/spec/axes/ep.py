"""The `ep` axis: ranks hold other experts of a mixture, and tokens travel to them."""

from __future__ import annotations

from meshwright.spec.axis import Axis, Holds, Mechanics, Reads

AXIS = Axis(
    name="ep",
    reads=Reads.SAME,
    holds=Holds.SHARD,
    order=50,
    mechanics=Mechanics.EXPERTS,
    purpose="expert: ranks hold other experts, tokens go to theirs",
    carves=("shard", "cp", "tp"),
    aliases=(
        "expert",
        "expert_parallel",
    ),
)
