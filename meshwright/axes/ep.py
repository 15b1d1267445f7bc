"""The `ep` axis: ranks hold other experts of a mixture, and tokens travel to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshwright.axes.axis import Axis, Holds, Reads
from meshwright.axes.experts import ExpertRows
from meshwright.axes.placement import LocalShard
from meshwright.errors import PlanError

if TYPE_CHECKING:
    from torch import nn

    from meshwright.axes.comm.axis_group import AxisGroup

AXIS = Axis(
    name="ep",
    reads=Reads.SAME,
    holds=Holds.SHARD,
    order=50,
    purpose="expert: ranks hold other experts, tokens go to theirs",
    carves=("shard", "cp", "tp"),
)


def check(experts: Sequence[ExpertRows], degree: int) -> None:
    """Refuses a degree that the model's experts can't fill.

    Raises:
        PlanError: with the numbers and the nearest degree that works.
    """
    if degree == 1:
        return
    if not experts:
        raise PlanError(
            f"ep={degree} spreads the experts of mixture layers over ranks, but the model has none that can be spread; "
            "leave ep out, or split every layer with tp"
        )
    fewest = min(experts, key=lambda rows: rows.experts)
    if degree > fewest.experts:
        raise PlanError(
            f"ep={degree}: {fewest.module} has {fewest.experts} experts, and each rank holds one at least; "
            f"nearest that works: ep={fewest.experts}"
        )


def wrap(
    module: nn.Module, rows: ExpertRows, axis_group: AxisGroup, copies: int, same: AxisGroup | None = None
) -> dict[str, LocalShard]:
    """Leaves this rank its experts of one layer and lets tokens travel.

    Args:
        module: the layer's experts module, on the meta device or materialised; parameters, counts and forward are
            replaced.
        rows: what it is.
        axis_group: the axis's collectives.
        copies: ranks of the world that hold the same experts.
        same: ranks whose tokens are equal (they send a share each); None where all tokens differ.

    Returns:
        The place of each of its parameters, by dotted name in the model.
    """
    from torch import nn

    from meshwright.axes.comm.exchange import Dispatch

    start, stop = rows.span(axis_group.index, axis_group.size)
    places = {}
    for attribute in rows.parameters:
        whole = module.get_parameter(attribute)
        own = nn.Parameter(whole.detach()[start:stop].clone(), requires_grad=whole.requires_grad)
        own.__dict__.update(whole.__dict__)
        setattr(module, attribute, own)
        spans = (((start, stop),), *(((0, size),) for size in whole.shape[1:]))
        name = f"{rows.module}.{attribute}"
        places[name] = LocalShard(name=name, shape=tuple(whole.shape), spans=spans, copies=copies, axes=(AXIS.name,))
    for attribute in rows.counts:
        setattr(module, attribute, stop - start)
    dispatch: Any = Dispatch(module, rows, axis_group, same)
    module.forward = dispatch
    return places
