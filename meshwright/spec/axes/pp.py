"""The `pp` axis: ranks hold stages of the model; micro-batches pass through them in the order of a schedule."""

from __future__ import annotations

from meshwright.spec.axis import Axis, Holds, Mechanics, Reads

AXIS = Axis(
    name="pp",
    reads=Reads.SAME,
    holds=Holds.STAGE,
    order=10,
    mechanics=Mechanics.STAGES,
    purpose="pipeline: ranks hold stages, micro-batches pass through them",
    aliases=(
        "pipe",
        "pipeline",
        "pipeline_parallel",
    ),
)
