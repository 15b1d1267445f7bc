"""The `cp` axis: ranks compute other tokens of the same rows and exchange what attention needs."""

from __future__ import annotations

from meshwright.spec.axis import Axis, Holds, Reads

AXIS = Axis(
    name="cp",
    reads=Reads.TOKENS,
    holds=Holds.COPY,
    order=40,
    purpose="context: ranks compute other tokens of the same rows",
)
