"""The `replicate` axis: every rank holds a copy and reads other rows; gradients are summed in buckets under backward."""

from __future__ import annotations

from meshwright.axes.axis import Axis, Holds, Reads

AXIS = Axis(
    name="replicate",
    reads=Reads.ROWS,
    holds=Holds.COPY,
    order=20,
    purpose="data parallel copies: gradients are all-reduced",
)
