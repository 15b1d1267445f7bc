"""The `shard` axis: ranks read other rows and hold parts of the state; ZeRO 1, 2 and 3 by FSDP2."""

from __future__ import annotations

from meshwright.spec.axis import Axis, Holds, Reads

AXIS = Axis(
    name="shard",
    reads=Reads.ROWS,
    holds=Holds.SHARD,
    order=30,
    purpose="data parallel shards: ZeRO 1-3 over optimizer state, gradients and parameters",
    aliases=(
        "fsdp",
        "dp_shard",
    ),
)
