"""Maps each axis to the column of `LayoutBatch` with its degree, and columns back to axes.

A column is a symbol of the formulas: axes with the same cost share one. A known axis has the column of its mechanics;
an axis that changes no module has one by what its ranks read and hold. An axis without a column has no price, and
layouts that use it are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType

from meshwright.errors import PlanError
from meshwright.spec.axes import known_axes
from meshwright.spec.axis import Holds, Joins, Mechanics, Reads
from meshwright.spec.layout import Layout

COPIES = "replicate"
"""Column of axes that change no module, read other rows and hold copies."""
SHARDS = "shard"
"""Column of axes that change no module, read other rows and share the state."""
WIRE_ORDER = ("pp", COPIES, SHARDS, "cp", "tp")
"""Columns of axes in the order in which `cost.groups` lays out their ranks, outermost first."""


@cache
def priced_columns() -> Mapping[str, str]:
    """Returns the column of each known axis that the formulas price.

    Axes of the same mechanics share a column; so do all that change no module, read other rows and hold copies.
    """
    columns = {}
    for name, axis in known_axes().items():
        column = axis.mechanics.value
        if axis.joins is Joins.ROUND:
            continue  # `planner.islands` prices a join on top of one island's layout
        if axis.mechanics is Mechanics.NONE and axis.reads is Reads.ROWS:
            column = {Holds.COPY: COPIES, Holds.SHARD: SHARDS}.get(axis.holds, column)
        if column in (*WIRE_ORDER, Mechanics.EXPERTS.value):
            columns[name] = column
    return columns


def column_of(name: str) -> str:
    """Returns the column of an axis.

    Raises:
        PlanError: no formula prices the axis.
    """
    column = priced_columns().get(name)
    if column is None:
        axis = known_axes()[name]
        if axis.joins is Joins.ROUND:
            raise PlanError(
                f"axis {name} joins once in a round, and the search prices layouts of one island; name the layout, or "
                f"give the islands (--fix {name}=2)"
            )
        raise PlanError(
            f"axis {name} reads {axis.reads.value}, holds {axis.holds.value} and has the mechanics "
            f"'{axis.mechanics.name.lower()}', for which the planner has no formula, so no layout with {name} above 1 "
            f"has a price; give its AXIS the mechanics that it has ({', '.join(item.name for item in Mechanics)}), add "
            f"formulas to planner/cost, or leave {name} out"
        )
    return column


def column_degrees(layout: Layout) -> dict[str, int]:
    """Returns a layout's degrees by column.

    Raises:
        PlanError: for an axis without a price, or in another position of the mesh than its formulas assume.
    """
    degrees: dict[str, int] = dict.fromkeys((*WIRE_ORDER, *priced_columns().values()), 1)
    outer = ""
    for name, degree in layout.degrees.items():  # outermost first
        column = column_of(name)
        degrees[column] *= degree
        if carves := known_axes()[name].carves:
            _check_carved(name, carves, layout)
            continue
        if outer and WIRE_ORDER.index(column) < WIRE_ORDER.index(column_of(outer)):
            raise PlanError(
                f"axis {name} lies inside of {outer} in the order of the mesh, and the planner prices links in the "
                f"order {', '.join(WIRE_ORDER)}; give {name} an order below {known_axes()[outer].order}, or use one of "
                "them"
            )
        outer = name
    return degrees


def _check_carved(name: str, carves: Sequence[str], layout: Layout) -> None:
    """Refuses a layout with a further axis in a column of those that ``name`` carves: formulas know one degree."""
    columns = {column_of(other) for other in carves}
    for other in layout.degrees:
        if other not in (name, *carves) and column_of(other) in columns:
            raise PlanError(
                f"{name} divides the ranks of {' x '.join(carves)} a second time, not those of {other}, and the "
                f"planner has no formula for both; leave one of them out, or add {other} to what {name} carves"
            )


def named_degrees(fixed: Mapping[str, int] = MappingProxyType({}), **columns: int) -> dict[str, int]:
    """Returns degrees by axis from degrees by column; a column's first axis has what the others don't fix.

    Args:
        fixed: degrees that the user fixed, by axis.
        columns: degree of each column, a multiple of the fixed ones.
    """
    degrees: dict[str, int] = {}
    for column, size in columns.items():
        names = [name for name, priced_column in priced_columns().items() if priced_column == column]
        for name in names[1:]:
            degrees[name] = fixed.get(name, 1)
            size //= degrees[name]
        degrees[names[0]] = size
    return degrees
