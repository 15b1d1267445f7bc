"""The search's first choice is the fastest of its space by the price that is printed: random spaces, priced whole.

Each space is written down here as products of degrees and choices, by the rules that the docs state, and each of its
layouts is priced by itself, as `plan --layout` prices it. The search's enumeration, bounds and arrays aren't used.

    python -m tests.contract.test_planner_exact --cases 300 --json FILE   # all spaces, one line each
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshwright.cluster.cluster import Cluster
from meshwright.errors import PlanError
from meshwright.planner.candidate import Candidate
from meshwright.planner.choose import choose
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.device_kinds import kinds_of
from meshwright.planner.measured_price import price_layout
from meshwright.planner.question import TIME_TOLERANCE, Question
from meshwright.planner.unequal import choose_unequal, price_unequal
from meshwright.schedules.spec import known_schedules
from meshwright.spec.layout import Layout
from meshwright.spec.layout_choices import BatchShares, Recompute, StageSplit
from meshwright.spec.layout_fields import OFFLOADS
from tests.tiers import further

CASES = 300
QUICK = (*range(12), 171)
"""Cases that every run of the tests tries."""
PIPELINES = 40
"""Spaces of pipelines alone."""
QUICK_PIPELINES = (2, 4, 15, 27)
"""Those that every run of the tests tries."""
ROUNDING = 1e-9
"""Relative difference of two sums of the same times in another order."""
CLUSTERS = {
    "dense": ("2xh100", "4xh100", "3xa100-80", "4xa100-40", "6xh100"),
    "mixture": ("2xh100", "4xh100", "4xa100-40"),
    "offload": ("1xh100", "2xa100-40", "2xgh200", "3xh100"),
    "unequal": ("1xh100+1xt4", "2xh100+2xa100-40", "2xh100+2xt4", "2xh100+1xa100-80"),
    "slow": ("2x1xa100-80@ethernet-10g", "4x1xh100@ethernet-1g", "2x2xa100-40@ethernet-10g"),
    "nodes": ("2x2xh100", "2x3xa100-80", "4x1xh100", "2x2xh100@infiniband-ndr:2"),
}
"""Clusters of each kind of space."""
SCHEDULES = ("1f1b", "interleaved", "zerobubble", "zbv", "dualpipev")


def random_question(seed: int) -> Question:
    """Returns a small model on a few devices, whose memory holds a part of the layouts in most cases."""
    draw = random.Random(seed)
    kind = list(CLUSTERS)[seed % len(CLUSTERS)]
    heads = draw.choice((2, 4, 6, 8))
    sizes = {
        "layers": draw.choice((2, 3, 4)),
        "width": 128 * heads * draw.choice((1, 2, 4)),
        "heads": heads,
        "kv_heads": draw.choice((heads, heads // 2)),
        "vocab": draw.choice((4096, 32000)),
    }
    if kind == "mixture":
        sizes |= {"experts": draw.choice((4, 8)), "active_experts": 2, "expert_ffn": 256 * draw.choice((1, 4))}
    cluster = Cluster.parse(draw.choice(CLUSTERS[kind]))
    rows = draw.choice((cluster.devices, 2 * cluster.devices, 4, 6))
    job = PricedJob(
        shape=shape_from_sizes(TableSizes(name=kind, **sizes)), sequence=draw.choice((512, 2048, 4096)), rows=rows
    )
    question = Question(job=job, cluster=cluster, base=Layout(precision="bf16"))
    if not cluster.uniform:
        return question
    limits = {
        "offloads": OFFLOADS if kind == "offload" else ("none",),
        "levels": draw.choice(((0, 1, 2, 3), (0, 1), (0, 2), (0, 3))),
        "recomputes": draw.choice((("none", "selective", "full"), ("none", "full"), ("none", "selective"), ("full",))),
        "schedules": tuple(draw.sample(SCHEDULES, 2)),
    }
    question = dataclasses.replace(question, limits=limits)
    # Memory between that of the leanest and of the fullest of a few layouts, so that some fit and some don't.
    layouts = list(every_layout(question))
    peaks = [found.price.peak for found in map_prices(question, draw.sample(layouts, min(12, len(layouts))))]
    if not peaks:
        return question
    room = draw.choice((draw.uniform(min(peaks), max(peaks)), draw.uniform(0.97, 1.2) * min(peaks), 2 * max(peaks)))
    return dataclasses.replace(question, usable=min(0.94, room / cluster.memory_bytes))


def pipeline_question(seed: int) -> Question:
    """Returns a deeper model whose every layout is a pipeline of one length, under all schedules."""
    draw = random.Random(seed)
    heads, layers = draw.choice((4, 8, 16)), draw.choice((8, 12, 16))
    devices, pp = draw.choice(((4, 4), (8, 4), (8, 8), (8, 2)))
    name, width = draw.choice(("dense", "mixture")), 128 * heads * draw.choice((1, 2, 4))
    sizes = {"layers": layers, "width": width, "heads": heads, "vocab": draw.choice((4096, 32000, 128000))}
    if name == "mixture":
        sizes |= {"experts": 8, "active_experts": 2, "expert_ffn": 1024}
    nodes = (f"{devices}xh100", f"{devices}xa100-80", f"{devices}x1xh100", f"{devices // 2}x2xa100-80@ethernet-25g")
    cluster = Cluster.parse(draw.choice(nodes))
    sequence, rows = draw.choice((512, 2048)), draw.choice((pp, 2 * pp, 4 * pp, 16)) * (devices // pp)
    job = PricedJob(shape=shape_from_sizes(TableSizes(name=name, **sizes)), sequence=sequence, rows=rows)
    limits = {
        "offloads": ("none",),
        "levels": draw.choice(((0, 1), (0, 3))),
        "recomputes": ("none",),
        "schedules": SCHEDULES,
        "fixed": {"pp": pp},
    }
    return Question(job=job, cluster=cluster, base=Layout(precision="bf16"), usable=0.94, limits=limits)


def map_prices(question: Question, layouts: Sequence[Layout]) -> list[Candidate]:
    """Returns the printed price of each layout that the hosts have room for."""
    priced = []
    for layout in layouts:
        try:
            priced.append(price_layout(question, layout, None))
        except PlanError:
            assert layout.offload != "none", layout
    return priced


def factors(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yields all ways to write a number as an ordered product."""
    if parts == 1:
        yield (number,)
        return
    for first in (size for size in range(1, number + 1) if number % size == 0):
        yield from ((first, *rest) for rest in factors(number // first, parts - 1))


def every_layout(question: Question) -> Iterator[Layout]:
    """Yields every layout of a cluster of equal devices that the docs say is searched."""
    job, devices = question.job, question.cluster.devices
    heads, experts = job.shape.blocks[0].heads, job.shape.experts
    for pp, replicate, shard, cp, tp in factors(devices, 5):
        if pp != question.limits.get("fixed", {}).get("pp", pp):
            continue
        readers = replicate * shard
        token_parts = tp * cp * (2 if cp > 1 else 1)
        if heads % tp or tp > question.cluster.domain or job.rows % readers:
            continue
        if pp > len(job.shape.blocks) + 2 or (tp * cp > 1 and job.sequence % token_parts):
            continue
        for ep in _expert_degrees(experts, shard, cp * tp):
            degrees = {"pp": pp, "replicate": replicate, "shard": shard, "cp": cp, "tp": tp, "ep": ep}
            levels = [level for level in question.limits["levels"] if (level > 0) == (shard > 1)]
            for zero, microbatches in itertools.product(levels, _divisors(job.rows // readers)):
                yield from _with_choices(question, degrees, zero, microbatches)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _expert_degrees(experts: int, shard: int, block: int) -> list[int]:
    """Returns degrees of ep over ``shard`` x ``block`` ranks, of which none shards less than one expert."""
    if not experts:
        return [1]
    degrees = [ep for ep in _divisors(experts) if shard * block % ep == 0]
    return [ep for ep in degrees if shard == 1 or (shard * block // ep if ep > 1 else shard) <= max(1, experts // ep)]


def _with_choices(question: Question, degrees: dict[str, int], zero: int, microbatches: int) -> Iterator[Layout]:
    """Yields the layouts of some degrees with every schedule, number of stages, recompute and place of the state."""
    layers, modes = len(question.job.shape.blocks), question.limits["recomputes"]
    # Fewer than all layers recompute only where none need to.
    counts = range(layers) if "none" in modes else (0,)
    schedules = _schedules(degrees["pp"], microbatches, layers, question.limits["schedules"])
    for (schedule, stages, splits), offload in itertools.product(schedules, question.limits["offloads"]):
        recomputes = [Recompute("none")] * ("none" in modes)
        if not splits:
            recomputes += [Recompute(mode, count) for mode in modes if mode != "none" for count in counts]
            if {"selective", "full"} <= set(modes):
                recomputes += [Recompute("full", count, "selective") for count in range(1, layers)]
        for recompute in recomputes:
            yield dataclasses.replace(
                question.base,
                degrees={name: degree for name, degree in degrees.items() if degree > 1},
                zero=zero,
                microbatches=microbatches,
                recompute=recompute,
                schedule=schedule,
                stages=stages,
                sequence=degrees["tp"] > 1,
                offload=offload,
            )


def _schedules(pp: int, microbatches: int, layers: int, names: Sequence[str]) -> Iterator[tuple[str, int, bool]]:
    """Yields (name, stages where they aren't the schedule's own, whether it splits the backward)."""
    if pp == 1:
        yield "", 0, False
        return
    for name in names:
        spec = known_schedules()[name]
        for stages in range(spec.least_stages, 1 + (spec.most_stages or (8 if spec.least_stages > 1 else 1))):
            # The first and the last stage need no layer; more than two stages a rank only where few places stay empty.
            places = pp * stages * -(-layers // (pp * stages))
            if pp * stages > layers + 2 or (stages > 2 and places > 1.25 * layers):
                continue
            try:
                spec.check(pp, stages, microbatches)
            except PlanError:
                continue
            yield name, 0 if stages == spec.least_stages else stages, spec.splits_backward


def every_unequal_layout(question: Question) -> Iterator[Layout]:
    """Yields pipelines with every split of the layers, and data layouts with every share of the rows."""
    job, devices = question.job, question.cluster.devices
    heads, layers = job.shape.blocks[0].heads, len(job.shape.blocks)
    counts = list(question.cluster.kinds.values())
    for pp, readers, tp in factors(devices, 3):
        if (
            heads % tp
            or tp > question.cluster.domain
            or any(count % (devices // pp if pp > 1 else tp) for count in counts)
        ):
            continue
        modes = [Recompute(mode) for mode in ("none", "selective", "full")]
        for (shard, zero), recompute in itertools.product(_states(readers, pp), modes):
            layout = dataclasses.replace(
                question.base,
                degrees={"pp": pp, "replicate": readers // shard, "shard": shard, "tp": tp},
                zero=zero,
                recompute=recompute,
                schedule="1f1b" if pp > 1 else "",
                sequence=tp > 1,
            )
            if pp > 1 and job.rows % readers == 0:
                for microbatches, cuts in itertools.product(
                    _divisors(job.rows // readers), itertools.combinations(range(1, layers + 1), pp - 1)
                ):
                    sizes = tuple(stop - start for start, stop in zip((0, *cuts), (*cuts, layers)))
                    if pp <= microbatches <= 16 * pp:
                        yield dataclasses.replace(layout, microbatches=microbatches, split=StageSplit(sizes))
            elif pp == 1 and readers > 1:
                for microbatches in _divisors(job.rows):
                    for shares in _row_shares(job.rows // microbatches, [count // tp for count in counts]):
                        yield dataclasses.replace(layout, microbatches=microbatches, rows=shares)


def _states(readers: int, pp: int) -> list[tuple[int, int]]:
    """Returns (shard, ZeRO level) of the two families."""
    levels = (1,) if pp > 1 else (1, 2, 3)
    return [(1, 0), *((readers, level) for level in levels if readers > 1)]


def _row_shares(rows: int, readers: Sequence[int]) -> Iterator[BatchShares]:
    """Yields shares of a micro-batch's rows over the readers of each kind; equal readers in one order."""
    by_kind = [list(itertools.combinations_with_replacement(range(rows, 0, -1), count)) for count in readers]
    for shares in itertools.product(*by_kind):
        if sum(map(sum, shares)) == rows:
            yield BatchShares.of([share for of_kind in shares for share in of_kind])


@dataclass(frozen=True)
class Outcome:
    """What pricing a space whole found, beside the search's first choice."""

    seed: int
    kind: str
    cluster: str
    layouts: int
    fitting: int
    best_s: float
    """Of all that fit; inf where nothing does."""
    best: str
    found_s: float
    """The fastest of the search's finalists."""
    found: str
    plan_s: float
    """The plan: the simplest of those that tie with it."""
    seconds: float

    @property
    def exact(self) -> bool:
        """Whether no layout of the space is faster than the search's first."""
        return math.isclose(self.found_s, self.best_s, rel_tol=ROUNDING)


def solve(seed: int, draw: Callable[[int], Question] = random_question) -> Outcome:
    """Prices a random space whole and searches it."""
    started = time.perf_counter()
    question = draw(seed)
    if question.cluster.uniform:
        layouts = list(every_layout(question))
        priced = [item for item in map_prices(question, layouts) if item.price.peak <= question.usable_bytes]
    else:
        layouts, kinds = list(every_unequal_layout(question)), kinds_of(question.cluster)
        priced = [item for item in (price_unequal(question, kinds, layout) for layout in layouts) if item is not None]
    assert len(set(map(str, layouts))) == len(layouts)
    best = min(priced, key=lambda item: item.price.step_s, default=None)
    try:
        choice = choose(question) if question.cluster.uniform else choose_unequal(question)
        found = min(choice.best, key=lambda item: item.price.step_s)
    except PlanError:
        choice = found = None
    return Outcome(
        seed=seed,
        kind=question.job.shape.name,
        cluster=str(question.cluster),
        layouts=len(layouts),
        fitting=len(priced),
        best_s=best.price.step_s if best else math.inf,
        best=str(best.layout) if best else "",
        found_s=found.price.step_s if found else math.inf,
        found=str(found.layout) if found else "",
        plan_s=choice.best[0].price.step_s if choice else math.inf,
        seconds=time.perf_counter() - started,
    )


def check(seed: int) -> None:
    """Holds the search of a random space to what pricing all of it finds."""
    outcome = solve(seed)
    assert outcome.exact, outcome
    # The plan is the simplest of those that tie with the fastest.
    assert outcome.plan_s <= outcome.best_s * (1 + TIME_TOLERANCE) or math.isinf(outcome.best_s)


@pytest.mark.parametrize("seed", further(QUICK, (0, 1, 12)))
def test_the_first_choice_is_the_fastest_of_its_space(seed: int) -> None:
    check(seed)


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, CASES, 20))
def test_the_first_choice_of_many_spaces_is_the_fastest(first: int) -> None:
    for seed in range(first, first + 20):
        check(seed)


@pytest.mark.parametrize(
    "seeds",
    [
        QUICK_PIPELINES,
        *(pytest.param(range(at, at + 8), marks=pytest.mark.long, id=f"{at}") for at in range(0, PIPELINES, 8)),
    ],
)
def test_the_first_choice_among_pipelines_is_the_fastest(seeds: Sequence[int]) -> None:
    """Pipelines are kept by a lower bound and then simulated: one whose bound is too high would be lost."""
    outcomes = [solve(seed, pipeline_question) for seed in seeds]
    assert all(outcome.exact for outcome in outcomes), outcomes
    assert sum(outcome.fitting > 10 for outcome in outcomes) >= len(outcomes) // 4


def test_spaces_of_every_kind_are_tried() -> None:
    """Some cases hold only a part of their layouts in memory, some none, and all kinds are among the quick ones."""
    questions = [random_question(seed) for seed in QUICK]
    assert {question.job.shape.name for question in questions} == set(CLUSTERS)
    assert {question.cluster.nodes > 1 for question in questions} == {True, False}


def main(argv: Sequence[str] | None = None) -> int:
    """Solves the spaces and prints those that differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=CASES)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(argv)
    outcomes = []
    for seed in range(given.first, given.cases, given.step):
        outcome = solve(seed)
        outcomes.append(outcome)
        if given.json:
            with given.json.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
        if not outcome.exact:
            print(outcome, flush=True)
    print(f"{sum(outcome.exact for outcome in outcomes)} of {len(outcomes)} exact")
    return 0


if __name__ == "__main__":
    sys.exit(main())
