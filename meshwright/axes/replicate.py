"""The `replicate` axis: every rank holds a copy and reads other rows; gradients are summed under backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from meshwright.axes.axis import Axis, Holds, Reads

if TYPE_CHECKING:
    from torch import nn

    from meshwright.axes.comm.axis_group import AxisGroup
    from meshwright.axes.comm.reducer import GradientReducer

AXIS = Axis(
    name="replicate",
    reads=Reads.ROWS,
    holds=Holds.COPY,
    order=20,
    purpose="data parallel copies: gradients are all-reduced",
)


def wrap(
    parameters: Iterable[nn.Parameter], axis_group: AxisGroup, layers: Mapping[nn.Parameter, int] | None = None
) -> GradientReducer:
    """Makes every gradient a sum over the axis, communicated while backward still runs.

    Args:
        parameters: plain ones, in the order in which forward uses them; they stay as they are, hooks are added.
        axis_group: collectives of the ranks that hold copies of them.
        layers: number of the layer that each belongs to, for messages.

    Returns:
        The reducer: call ``begin(last)`` before each micro-batch and ``finish()`` after the last backward.
    """
    from meshwright.axes.comm.reducer import GradientReducer

    return GradientReducer(parameters, axis_group, layers)
