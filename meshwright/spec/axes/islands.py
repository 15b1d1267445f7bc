"""The `islands` axis: groups of ranks that train on other rows by themselves and join once in a round of many steps."""

from __future__ import annotations

from meshwright.spec.axis import Axis, Holds, Joins, Reads

AXIS = Axis(
    name="islands",
    reads=Reads.ROWS,
    holds=Holds.COPY,
    order=5,
    joins=Joins.ROUND,
    purpose="local updates over slow links: each island trains its copy and joins the others every outer.every steps",
    aliases=("island",),
)
