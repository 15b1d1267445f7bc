"""Which layouts a proof tries when none is named: every way to use the ranks, each choice beside some other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle

from meshwright.errors import PlanError
from meshwright.schedules.spec import known_schedules
from meshwright.spec.axes import known_axes
from meshwright.spec.axis import Holds, Mechanics, Reads
from meshwright.spec.groups import axis_with, mesh_shape, row_axes
from meshwright.spec.layout import Layout
from meshwright.spec.layout_choices import BatchShares, Recompute


def min_layers(layouts: Sequence[Layout]) -> int:
    """Returns how many layers a clone needs so that every pipeline has one for each of its stages; at least 2."""
    return max(2, *(layout.degree(Mechanics.STAGES) * layout.stages_per_rank for layout in layouts))


def data_layouts(ranks: int, base: Layout | None = None) -> list[Layout]:
    """Returns every way to use ``ranks`` ranks over the data axes, with and without accumulation and recompute.

    One of them shares the rows out unevenly.

    Args:
        ranks: number of ranks.
        base: choices that all of them share (precision, compile).
    """
    base = base or Layout()
    layouts: list[Layout] = []
    shards = row_axes(Holds.SHARD)
    for degrees in factorisations(ranks, (*shards, *row_axes(Holds.COPY))):
        for zero in (1, 2, 3) if any(degrees[name] > 1 for name in shards) else (0,):
            for micro, recompute in ((1, "none"), (2, "none"), (1, "full"), (2, "selective")):
                layout = dataclasses.replace(
                    base, degrees=degrees, zero=zero, microbatches=micro, recompute=Recompute(recompute)
                )
                layouts.append(layout)
    if ranks > 1:
        shares = BatchShares.of((3, *[2] * (ranks - 2), 1))
        layouts.append(dataclasses.replace(base, degrees={shards[0]: ranks}, zero=2, rows=shares))
    return layouts


def factorisations(ranks: int, names: Sequence[str]) -> Iterator[dict[str, int]]:
    """Yields every way to write ``ranks`` as a product of one degree for each name."""
    if not names:
        if ranks == 1:
            yield {}
        return
    for degree in (size for size in range(1, ranks + 1) if ranks % size == 0):
        for other_degrees in factorisations(ranks // degree, names[1:]):
            yield {names[0]: degree} | other_degrees


def all_layouts(ranks: int, base: Layout | None = None, experts: int = 0) -> list[Layout]:
    """Returns the data layouts and every composition of the other axes, with choices that change from one to the next.

    Each factorisation of the ranks stands once, or twice where experts can be spread over it as well; the ZeRO level,
    recompute, token splits and the two ways of attention under ``cp`` take turns, and ``cp`` alone stands in both. Each
    schedule stands once at the smallest pipeline.

    Args:
        ranks: number of ranks.
        base: choices that all of them share.
        experts: the model's number of experts; 0 for none.
    """
    base = base or Layout()
    data = [name for name, axis in known_axes().items() if axis.reads is Reads.ROWS]
    layouts = data_layouts(ranks, base)
    levels, recomputes, splits = cycle((1, 2, 3)), cycle(("none", "full", "selective")), cycle((True, False))
    attentions = cycle(("", "gather"))
    for degrees in factorisations(ranks, list(mesh_shape({}))):
        if all(degree == 1 for name, degree in degrees.items() if name not in data) or _repeats_mechanics(degrees):
            continue
        stages, tokens = (degrees[axis_with(mechanics, degrees)] for mechanics in (Mechanics.STAGES, Mechanics.TOKENS))
        layout = dataclasses.replace(
            base,
            degrees=degrees,
            zero=next(levels) if any(degrees[name] > 1 for name in row_axes(Holds.SHARD)) else 0,
            microbatches=2 * stages if stages > 1 else 1,
            recompute=Recompute(next(recomputes)),
            sequence=degrees[axis_with(Mechanics.MATRICES, degrees)] > 1 and next(splits),
            attention=next(attentions) if tokens > 1 else "",
        )
        layouts.append(layout)
        if tokens == ranks:
            layouts.append(dataclasses.replace(layout, attention="" if layout.attention else "gather"))
        if experts:
            layouts += _with_experts(layout, experts)
    if ranks > 1:
        layouts += _schedules(ranks, base)
    return layouts


def _with_experts(layout: Layout, experts: int) -> Iterator[Layout]:
    """Yields the layout with its experts spread over all ranks that can hold them."""
    axis = layout.axis(Mechanics.EXPERTS)
    for degree in range(min(experts, layout.world), 1, -1):
        try:
            yield dataclasses.replace(layout, degrees={**layout.degrees, axis: degree})
        except PlanError:
            continue
        return


def _schedules(ranks: int, base: Layout) -> Iterator[Layout]:
    stages = 2 if ranks % 2 == 0 else ranks
    degrees = {base.axis(Mechanics.STAGES): stages, row_axes(Holds.COPY)[0]: ranks // stages}
    for name in known_schedules():
        yield dataclasses.replace(base, degrees=degrees, microbatches=4 * stages, schedule=name)


def _repeats_mechanics(degrees: Mapping[str, int]) -> bool:
    """Returns whether two axes of the same mechanics are used, which no layout may combine."""
    used = [known_axes()[name].mechanics for name, degree in degrees.items() if degree > 1]
    split = [mechanics for mechanics in used if mechanics is not Mechanics.NONE]
    return len(set(split)) < len(split)
