"""Layouts at measured speeds: the planner's choice against trying all, and against true costs that it isn't told."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import pytest

from meshwright.cluster.cluster import Cluster
from meshwright.errors import PlanError
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.measure import measure_shape
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.device_kinds import kinds_of_speeds
from meshwright.planner.measured_speeds import Freedom, choose_at_speeds, measured_speeds
from meshwright.planner.question import Question
from meshwright.planner.unequal import price_layouts, price_unequal
from meshwright.spec.layout import Layout
from meshwright.spec.layout_choices import BatchShares, StageSplit

LAYERS, ROWS = 6, 12
MODEL = ModelConfig(name="gpt2", layers=LAYERS, width=64, heads=4, vocab=64, context=32)
NAMED = Freedom(degrees=False)


def question(ranks: int, rows: int = ROWS, layers: int = LAYERS, width: int = 64) -> Question:
    shape = measure_shape(build_meta(dataclasses.replace(MODEL, layers=layers, width=width)))
    job = PricedJob(shape=shape, sequence=width // 2, rows=rows, precision="float32")
    return Question(job=job, cluster=Cluster.detected(ranks, "cpu", cores=ranks))


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yields all ways to write a number as an ordered sum of numbers from 1."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield tuple(stop - start for start, stop in itertools.pairwise((0, *cuts, total)))


def every_layout(ranks: int) -> Iterator[Layout]:
    """Yields pipelines and data layouts of two or four ranks with every split, every share of the rows."""
    sizes = [size for size in (1, 2, 4) if size <= ranks]
    for pp, tp, replicate, shard in itertools.product(sizes, repeat=4):
        if pp * tp * replicate * shard != ranks or (replicate > 1 and shard > 1):
            continue
        degrees = {"pp": pp, "tp": tp, "replicate": replicate, "shard": shard}
        for microbatches, zero in itertools.product((1, 2, 3, 4, 6, 12), (1, 2, 3) if shard > 1 else (0,)):
            rows, readers = ROWS // microbatches, replicate * shard
            base = Layout(degrees=degrees, zero=zero, microbatches=microbatches, sequence=tp > 1)
            if pp > 1:
                for split in compositions(LAYERS, pp) if rows % readers == 0 and microbatches >= pp else ():
                    yield dataclasses.replace(base, split=StageSplit(split))
            else:
                for shares in compositions(rows, readers) if rows >= readers else ():
                    yield dataclasses.replace(base, rows=BatchShares.of(shares))


@pytest.mark.parametrize(
    ("text", "busy_s"),
    [
        ("replicate=2", (0.5, 1.0)),
        ("pp=2,microbatches=4", (0.05, 0.1)),
        ("pp=2,microbatches=2,split=2-4", (3.0, 1.0)),
        ("replicate=4", (0.5, 0.5, 1.2, 0.5)),
        ("pp=2,replicate=2,microbatches=2", (0.2, 0.1, 0.1, 0.1)),
    ],
)
def test_nothing_is_cheaper_than_the_choice(text: str, busy_s: tuple[float, ...]) -> None:
    layout = Layout.parse(text)
    asked = question(layout.world)
    choice = choose_at_speeds(asked, layout, busy_s, Freedom())
    kinds = kinds_of_speeds(asked.cluster, measured_speeds(asked, layout, busy_s)[0])
    layouts = list(every_layout(layout.world))
    prices = price_layouts(asked, kinds, layouts)
    best, cheapest = choice.faster[0], int(prices.argmin())
    assert best.price.step_s <= prices[cheapest] * (1 + 1e-9), (str(best.layout), str(layouts[cheapest]))
    # The present layout is priced in the same way: at its own speeds no less than its ranks were measured to compute.
    present = price_unequal(asked, kinds, layout)
    assert present is not None and choice.present_s == pytest.approx(present.price.step_s)
    assert choice.present_s >= 0.99 * max(busy_s)
    assert all(candidate.price.step_s < choice.present_s for candidate in choice.faster)


def slowest(work: Sequence[int], costs: Sequence[float]) -> float:
    return max(size * cost for size, cost in zip(work, costs))


def settle(asked: Question, layout: Layout, costs: Sequence[float], total: int, field: str) -> tuple[list[int], int]:
    """Moves work while a tenth is promised, at busy times that follow from true costs alone."""
    work, moves = [total // len(costs)] * len(costs), 0
    for _ in range(6):
        choice = choose_at_speeds(asked, layout, [size * cost for size, cost in zip(work, costs)], NAMED)
        if not choice.faster or choice.faster[0].price.step_s > 0.9 * choice.present_s:
            break
        layout, moves = choice.faster[0].layout, moves + 1
        sizes = layout.split.layers if field == "layers" else layout.reader_shares()
        work = [total * size // sum(sizes) for size in sizes]
    return work, moves


@pytest.mark.parametrize("costs", [(1.0, 2.0), (3.0, 1.0), (1.0, 1.0, 2.0), (1.0, 4.0, 1.0, 2.0)])
@pytest.mark.parametrize("field", ["layers", "rows"])
def test_work_follows_true_costs_and_comes_to_rest(costs: tuple[float, ...], field: str) -> None:
    # The planner also counts ends that these ranks don't have: what it doesn't know must not make work swing.
    total, ranks = 12, len(costs)
    layout = Layout.parse(f"pp={ranks},microbatches=4" if field == "layers" else f"replicate={ranks}")
    work, moves = settle(question(ranks, 12 if field == "rows" else 16, 12, 512), layout, costs, total, field)
    best = min(slowest(split, costs) for split in compositions(total, ranks))
    # Whole units, speeds in steps of 5 %, and a tenth that isn't worth a start.
    assert moves in (1, 2) and slowest(work, costs) <= 1.25 * best, (work, best)


def test_equal_ranks_keep_a_named_layout() -> None:
    for text in ("pp=2,microbatches=4", "replicate=2"):
        choice = choose_at_speeds(question(2), Layout.parse(text), (1.0, 1.04), NAMED)
        assert not choice.faster or choice.faster[0].price.step_s > 0.9 * choice.present_s


def test_several_stages_a_rank_move_together() -> None:
    layout = Layout.parse("pp=2,microbatches=4,schedule=interleaved,stages=2")
    choice = choose_at_speeds(question(2, layers=12), layout, (1.0, 3.0), NAMED)
    (candidate,) = choice.faster
    sizes = candidate.layout.split.layers
    # Stages 1 and 3 are the slow rank's.
    assert len(sizes) == 4 and sizes[0] + sizes[2] > sizes[1] + sizes[3]
    assert candidate.layout == dataclasses.replace(layout, split=StageSplit(sizes))


def test_freedom_bounds_what_changes() -> None:
    asked, layout = question(2), Layout.parse("replicate=2")
    for candidate in choose_at_speeds(asked, layout, (0.5, 1.0), Freedom(pipelines=False)).faster:
        assert candidate.layout.degree("pp") == 1
    for candidate in choose_at_speeds(asked, layout, (0.5, 1.0), NAMED).faster:
        assert dataclasses.replace(candidate.layout, rows=BatchShares()) == layout
    assert not choose_at_speeds(asked, layout, (0.5, 1.0), Freedom(degrees=False, rows=False)).faster
    piped = Layout.parse("pp=2,microbatches=4")
    assert not choose_at_speeds(asked, piped, (0.5, 1.0), Freedom(degrees=False, split=False)).faster
    with pytest.raises(PlanError):
        choose_at_speeds(asked, Layout.parse("islands=2"), (0.5, 1.0), NAMED)
