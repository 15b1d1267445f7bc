"""The `replicate` axis: every rank holds a copy and reads other rows; gradients are summed under backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.axes.axis import Axis, Holds, Reads

if TYPE_CHECKING:
    from torch import nn

    from meshwright.axes.comm.reducer import GradientReducer
    from meshwright.axes.comm.wire import Wire

AXIS = Axis(
    name="replicate",
    reads=Reads.ROWS,
    holds=Holds.COPY,
    order=20,
    purpose="data parallel copies: gradients are all-reduced",
)


def wrap(module: nn.Module, wire: Wire) -> GradientReducer:
    """Makes every gradient of ``module`` a sum over the axis, communicated while backward still runs.

    Args:
        module: a module with plain parameters; it stays as it is, hooks are added.
        wire: the axis's collectives.

    Returns:
        The reducer: call ``begin(last)`` before each micro-batch and ``finish()`` after the last backward.
    """
    from meshwright.axes.comm.reducer import GradientReducer

    return GradientReducer(module, wire)
