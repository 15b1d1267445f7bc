"""The `replicate` axis: every rank holds a copy and reads other rows; gradients are summed under backward."""

from __future__ import annotations

from meshwright.spec.axis import Axis, Holds, Reads

AXIS = Axis(
    name="replicate",
    reads=Reads.ROWS,
    holds=Holds.COPY,
    order=20,
    purpose="data parallel copies: gradients are all-reduced",
    aliases=(
        "dp",
        "data",
        "data_parallel",
        "ddp",
        "dp_replicate",
    ),
)
