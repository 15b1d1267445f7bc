"""Which layouts a proof tries when none is named: every way to use the ranks, each choice beside some other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle

from meshwright.errors import PlanError
from meshwright.schedules.spec import known_schedules
from meshwright.spec.axes import known_axes
from meshwright.spec.axis import Reads
from meshwright.spec.groups import mesh_shape
from meshwright.spec.layout import Layout
from meshwright.spec.layout_choices import BatchShares, Recompute


def layers_needed(layouts: Sequence[Layout]) -> int:
    """Returns how many layers a clone needs so that every pipeline has one for each of its stages; at least 2."""
    return max(2, *(layout.degree("pp") * layout.stages_per_rank for layout in layouts))


def data_layouts(ranks: int, base: Layout | None = None) -> list[Layout]:
    """Returns every way to use ``ranks`` ranks over the data axes, with and without accumulation and recompute.

    One of them shares the rows out unevenly.

    Args:
        ranks: number of ranks.
        base: choices that all of them share (precision, compile).
    """
    base = base or Layout()
    found: list[Layout] = []
    for shard in (size for size in range(1, ranks + 1) if ranks % size == 0):
        for zero in (1, 2, 3) if shard > 1 else (0,):
            for micro, recompute in ((1, "none"), (2, "none"), (1, "full"), (2, "selective")):
                degrees = {"replicate": ranks // shard, "shard": shard}
                layout = dataclasses.replace(
                    base, degrees=degrees, zero=zero, microbatches=micro, recompute=Recompute(recompute)
                )
                found.append(layout)
    if ranks > 1:
        shares = BatchShares.of((3, *[2] * (ranks - 2), 1))
        found.append(dataclasses.replace(base, degrees={"shard": ranks}, zero=2, rows=shares))
    return found


def factorisations(ranks: int, names: Sequence[str]) -> Iterator[dict[str, int]]:
    """Yields every way to write ``ranks`` as a product of one degree for each name."""
    if not names:
        if ranks == 1:
            yield {}
        return
    for degree in (size for size in range(1, ranks + 1) if ranks % size == 0):
        for rest in factorisations(ranks // degree, names[1:]):
            yield {names[0]: degree} | rest


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
    found = data_layouts(ranks, base)
    levels, recomputes, splits = cycle((1, 2, 3)), cycle(("none", "full", "selective")), cycle((True, False))
    attentions = cycle(("", "gather"))
    for degrees in factorisations(ranks, list(mesh_shape({}))):
        if all(degree == 1 for name, degree in degrees.items() if name not in data):
            continue
        layout = dataclasses.replace(
            base,
            degrees=degrees,
            zero=next(levels) if degrees["shard"] > 1 else 0,
            microbatches=2 * degrees["pp"] if degrees["pp"] > 1 else 1,
            recompute=Recompute(next(recomputes)),
            sequence=degrees["tp"] > 1 and next(splits),
            attention=next(attentions) if degrees["cp"] > 1 else "",
        )
        found.append(layout)
        if degrees["cp"] == ranks:
            found.append(dataclasses.replace(layout, attention="" if layout.attention else "gather"))
        if experts:
            found += _with_experts(layout, experts)
    if ranks > 1:
        found += _schedules(ranks, base)
    return found


def _with_experts(layout: Layout, experts: int) -> Iterator[Layout]:
    """Yields the layout with its experts spread over all ranks that can hold them."""
    for degree in range(min(experts, layout.world), 1, -1):
        try:
            yield dataclasses.replace(layout, degrees={**layout.degrees, "ep": degree})
        except PlanError:
            continue
        return


def _schedules(ranks: int, base: Layout) -> Iterator[Layout]:
    pipeline: Mapping[str, int] = {"pp": 2, "replicate": ranks // 2} if ranks % 2 == 0 else {"pp": ranks}
    for name in known_schedules():
        yield dataclasses.replace(base, degrees=dict(pipeline), microbatches=4 * pipeline["pp"], schedule=name)
