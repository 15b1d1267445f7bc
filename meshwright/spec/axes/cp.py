"""The `cp` axis: ranks compute other tokens of the same rows and exchange what attention needs."""

from __future__ import annotations

from meshwright.spec.axis import Axis, Holds, Mechanics, Reads

AXIS = Axis(
    name="cp",
    reads=Reads.TOKENS,
    holds=Holds.COPY,
    order=40,
    mechanics=Mechanics.TOKENS,
    purpose="context: ranks compute other tokens of the same rows",
    aliases=("context",),
)
