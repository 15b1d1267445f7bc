"""The search finds what pricing everything finds; what can't be is refused with numbers and a cure."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping

import numpy as np
import pytest

from meshwright.cluster.cluster import Cluster, NodeGroup
from meshwright.errors import PlanError
from meshwright.planner import choose as choose_module
from meshwright.planner.candidate import Candidate, Choice
from meshwright.planner.candidate_prices import price_candidate
from meshwright.planner.choose import add_named_layouts, build_choice, choose, search_space
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.cost.layout_batch import (
    RECOMPUTES,
    LayoutBatch,
    PricedJob,
    array_fields,
    splits_backward,
)
from meshwright.planner.cost.measured_bytes import ActivationBytes, MeasuredBytes
from meshwright.planner.cost.offload import HOST_USABLE
from meshwright.planner.cost.pipeline_simulation import simulated_steps_s
from meshwright.planner.cost.price import price, price_many
from meshwright.planner.explain import NAMES, memory_sentence, reason, why
from meshwright.planner.measured_price import price_layout
from meshwright.planner.question import Question
from meshwright.planner.scaling import Point, _smaller_questions, curve, knee, replan, sizes
from meshwright.planner.search import search
from meshwright.planner.space import contains, cores, divisors, expand, layout_of
from meshwright.planner.state_rule import named
from meshwright.planner.timeline import timeline
from meshwright.spec.layout import Layout
from meshwright.spec.layout_fields import OFFLOADS
from meshwright.units import format_bytes, format_seconds
from tests.tiers import further

LLAMA = shape_from_sizes(TableSizes(name="llama", layers=12, width=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000))
MIXTURE = shape_from_sizes(
    TableSizes(
        name="mixture", layers=8, width=2048, heads=16, vocab=32000, experts=16, active_experts=2, expert_ffn=4096
    )
)


SHORT = shape_from_sizes(TableSizes(name="short", layers=5, width=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000))


def question(text: str = "16xh100", shape: object = LLAMA, rows: int = 32, **changes: object) -> Question:
    job = PricedJob(shape=shape, sequence=4096, rows=rows)  # type: ignore[arg-type]
    return Question(job=job, cluster=Cluster.parse(text), base=Layout(precision="bf16"), **changes)  # type: ignore[arg-type]


def told_of(asked: Question, text: str, choice: Choice) -> str:
    """Why a layout isn't the plan."""

    def price(layout: Layout) -> Candidate:
        return price_layout(asked, layout, None)

    return why(asked, price(Layout.parse(text)), choice, price)


@pytest.fixture(scope="module")
def choice() -> Choice:
    return choose(question())


def _everything(asked: Question) -> tuple[float, int, str]:
    """Of all that fit, recomputing any number of layers, the least time; how many there are; what it offloads."""
    job, layers, host = asked.job, len(asked.job.shape.blocks), asked.machine.host
    assert host is not None
    least, count, best = np.inf, 0, ""
    for offload in OFFLOADS:
        whole = expand(job, asked.space, cores(job, asked.space), (offload,))
        count += whole.count
        for some, rest in itertools.product(range(1, layers + 1), ("none", "selective")):
            share = np.where(whole.recompute > 0, some / layers, 1.0)
            # Beside layers of which all is recomputed the others may keep products.
            others = np.where(whole.recompute == RECOMPUTES.index("full"), float(RECOMPUTES.index(rest)), 0.0)
            mixed = dataclasses.replace(whole, recompute_share=share, recompute_rest=others)
            prices = price_many(job, mixed, asked.machine, asked.runtime)
            fits = (prices.peak <= asked.usable_bytes) & (prices.host <= HOST_USABLE * host.memory_bytes)
            fastest = float(prices.step_s[fits].min(initial=np.inf))
            least, best = (fastest, offload) if fastest < least else (least, best)
    return least, count, best


@pytest.mark.parametrize(
    ("text", "shape", "rows", "usable", "offload"),
    further(
        [
            ("8xh100", SHORT, 16, 0.2, "none"),
            ("8xa100-40", MIXTURE, 8, 0.94, "none"),
            ("4xa100-40", SHORT, 16, 0.5, "none"),
            ("1xh100", SHORT, 64, 0.25, "parameters"),  # nothing else fits
            ("2xa100-40", MIXTURE, 64, 0.3, "parameters"),
            ("4xa100-40", SHORT, 512, 0.24, "optimizer"),  # others recompute more, or shard
            ("4xh100", SHORT, 512, 0.165, "optimizer"),
            ("4xh100", MIXTURE, 512, 0.22, "parameters"),
            ("2xgh200", MIXTURE, 512, 0.5, "optimizer"),
        ],
        (0, 1, 3, 4),
    ),
)
def test_nothing_in_the_space_is_faster(text: str, shape: object, rows: int, usable: float, offload: str) -> None:
    asked = question(text, shape, rows, usable=usable)
    least, count, best = _everything(asked)
    assert best == offload
    found = search(asked.job, asked.space, asked.machine, asked.runtime, asked.usable_bytes)
    assert found.considered == count and found.best is not None
    assert float(found.best[1].step_s[0]) == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("usable", further([0.47, 0.6]))
def test_as_few_layers_are_recomputed_as_fit(usable: float) -> None:
    """Every share of every variant is priced: a peak is the most of several moments, which fall at other paces.

    A stage of a pipeline may have one layer less of more evenly spaced ones; there one fewer than found doesn't fit.
    """
    sizes = TableSizes(name="deep", layers=24, width=2048, heads=16, ffn=8192, vocab=200_000)
    asked = question("8xh100", shape_from_sizes(sizes), 128, usable=usable, limits={"offloads": ("none",)})
    job, layers = asked.job, len(asked.job.shape.blocks)
    whole = expand(job, asked.space, cores(job, asked.space))
    names = [name for name in array_fields() if name != "recompute_share"]

    def keys(batch: LayoutBatch) -> list[tuple[float, ...]]:
        return list(zip(*(getattr(batch, name).tolist() for name in names)))

    fitting, needless = dict[tuple[float, ...], set[int]](), set[tuple[float, ...]]()
    place = names.index("recompute_rest")
    for rest in map(RECOMPUTES.index, ("none", "selective")):
        # Where all layers may do what the others do, none has to do more.
        plain = whole.take(whole.recompute == rest)
        fits_plain = price_many(job, plain, asked.machine, asked.runtime).peak <= asked.usable_bytes
        less = dataclasses.replace(plain, recompute_rest=plain.recompute).take(fits_plain)
        for mode in range(rest + 1, 3):
            needless |= set(keys(dataclasses.replace(less, recompute=np.full(less.count, float(mode)))))
            others = np.full(whole.count, float(rest))
            for some in range(layers, 0, -1):
                share = np.full(whole.count, some / layers)
                batch = dataclasses.replace(whole, recompute_share=share, recompute_rest=others)
                fits = price_many(job, batch, asked.machine, asked.runtime).peak <= asked.usable_bytes
                recomputes = fits & (batch.recompute == mode) & ~splits_backward(batch.schedule)
                for key in keys(batch.take(recomputes)):
                    fitting.setdefault(key, set()).add(some)
    # A layout of which all layers do the one has no others.
    fitting = {
        key: some for key, some in fitting.items() if key not in needless and (key[place] == 0.0 or min(some) < layers)
    }
    assert {key[place] for key in fitting} == {0.0, 1.0}
    found = search(job, asked.space, asked.machine, asked.runtime, asked.usable_bytes, keep=10**6).best
    assert found is not None
    best = found[0].take(found[0].recompute > 0)
    given = dict[tuple[float, ...], int]()
    for key, share in zip(keys(best), best.recompute_share.tolist()):
        given[key] = min(round(share * layers), given.get(key, layers))
    piped = {key for key in fitting if key[names.index("pp")] > 1}
    assert len(fitting) > 50 and sum(min(some) < layers for some in fitting.values()) > 20
    alone = fitting.keys() - piped
    assert len(alone) > 20 and {key: given[key] for key in alone} == {key: min(fitting[key]) for key in alone}
    # Where not even all fit, no number of them is looked for.
    for key in (key for key in piped if layers in fitting[key]):
        found_layers = given.get(key, layers)
        assert found_layers in fitting[key] and found_layers - 1 not in fitting[key]


def test_other_layers_never_keep_less() -> None:
    """Modules that take thrice as much as is priced while a layer recomputes fully, so that keeping more may fit."""
    sizes = TableSizes(name="wide", layers=2, width=2048, heads=16, ffn=8192, vocab=32000)
    asked = question("8xh100", shape_from_sizes(sizes), 256, usable=0.08, limits={"offloads": ("none",)})
    same, thrice = (MeasuredBytes(real=(1.0, 1.0, times), closed=(1.0, 1.0, 1.0)) for times in (1.0, 3.0))
    job = dataclasses.replace(asked.job, activations=ActivationBytes(saved=same, working=thrice))
    found = search(job, asked.space, asked.machine, asked.runtime, asked.usable_bytes, keep=10**6).best
    assert found is not None
    batch = found[0]
    shares = batch.recompute_share
    assert (shares < 1.0).any() and (batch.recompute_rest < batch.recompute)[shares < 1.0].all()
    for index in np.flatnonzero(shares < 1.0):
        layout = layout_of(batch, int(index), asked.base, 2, {})
        assert layout.recompute.share(2) == shares[index] and Layout.parse(str(layout)) == layout


@pytest.mark.parametrize("text", further(["2x4xa100-40@ethernet-10g", "8xh100"]))
@pytest.mark.parametrize("shape", [SHORT, MIXTURE], ids=["dense", "mixture"])
def test_a_limit_of_time_leaves_out_only_what_is_slower(text: str, shape: object) -> None:
    """Of a whole space, those under the limit have the same price to the bit, and no others are said to be faster."""
    asked = question(text, shape, 16)
    batch = expand(asked.job, asked.space, cores(asked.job, asked.space))

    def fits(_: LayoutBatch, memory: Mapping[str, np.ndarray]) -> np.ndarray:
        return np.asarray(memory["peak"] <= asked.usable_bytes)

    whole = price_many(asked.job, batch, asked.machine, asked.runtime, fits).step_s
    limit_s = float(np.quantile(whole[whole > 0], 0.2))
    limited = price_many(asked.job, batch, asked.machine, asked.runtime, fits, limit_s).step_s
    left_out = np.isinf(limited)
    assert np.array_equal(limited[~left_out], whole[~left_out])
    assert (whole[left_out] > limit_s).all()
    assert left_out.sum() > 0.02 * (whole > 0).sum()


def test_layouts_of_every_schedule_are_priced_together_as_one_by_one() -> None:
    asked = question("16xh100", SHORT, 32)
    texts = [f"pp=2,shard=8,zero=1,microbatches=4,schedule={name}" for name in ("interleaved", "zbv", "1f1b", "gpipe")]
    layouts = [Layout.parse(f"{text},precision=bf16") for text in (*texts, "shard=16,zero=3", texts[1])]
    many = price_many(asked.job, LayoutBatch.from_layouts(layouts, 5), asked.machine, asked.runtime)
    for at, layout in enumerate(layouts):
        one = price(asked.job, layout, asked.machine, asked.runtime)
        assert many.parts_of(at) == pytest.approx(dict(one.parts)) and many.step_s[at] == pytest.approx(one.step_s)
        assert many.peak[at] == pytest.approx(one.peak)


def test_schedules_that_split_the_backward_are_searched_with_all_layers_kept_alone() -> None:
    """Layers that recompute run their backward whole: a search offers no such pair, and a named one is priced so."""
    job = question("8xa100-40", SHORT, 16).job
    for recomputes in (("none", "selective", "full"), ("full",)):
        asked = question("8xa100-40", SHORT, 16, limits={"recomputes": recomputes})
        every = cores(job, asked.space)
        whole = expand(job, asked.space, every)
        layouts = [layout_of(whole, at, asked.base, 5) for at in range(whole.count)]
        kinds = {(layout.schedule, layout.recompute.mode) for layout in layouts}
        halved = {mode for schedule, mode in kinds if schedule in ("zerobubble", "zbv", "dualpipev")}
        assert halved == {"none"} & set(recomputes) and ("1f1b", "full") in kinds
        named = Layout.parse("pp=2,shard=4,zero=1,microbatches=4,schedule=zbv,recompute=full,precision=bf16")
        assert not contains(job, asked.space, every, asked.base, named)


def test_a_split_backward_under_recompute_is_priced_whole(choice: Choice) -> None:
    asked = question()
    rest = "pp=2,shard=8,zero=1,microbatches=4,recompute=full,precision=bf16"
    found = {name: price_candidate(asked, Layout.parse(f"{rest},schedule={name}")) for name in ("1f1b", "zerobubble")}
    assert found["zerobubble"].price.step_s == pytest.approx(found["1f1b"].price.step_s, rel=1e-6)
    told = told_of(asked, f"{rest},schedule=zerobubble", choice)
    assert "schedule=zerobubble runs each backward whole under recompute=full" in told
    assert "runs each backward whole" not in told_of(asked, f"{rest},schedule=1f1b", choice)
    assert "runs each backward whole" in named(Layout.parse(f"{rest},schedule=zerobubble"))


def test_layouts_survive_as_text(choice: Choice) -> None:
    for one in choice.best:
        assert Layout.parse(str(one.layout)) == one.layout
        one.layout.check_ranks(16)
        one.layout.check_batch(32)


def test_parts_add_up_and_have_names(choice: Choice) -> None:
    for one in choice.best:
        assert sum(one.price.parts.values()) == pytest.approx(one.price.step_s)
        assert set(one.price.parts) <= set(NAMES)
        assert one.price.peak == pytest.approx(sum(one.price.stages[one.price.fullest].memory.values()))
        assert one.price.peak <= question().usable_bytes
    times = [one.price.step_s for one in choice.best[1:]]
    assert times == sorted(times)
    assert choice.best[0].price.step_s <= min(times) * 1.05
    assert choice.considered >= choice.priced > choice.too_large
    steps = [step for step, _, _ in choice.front]
    assert steps == sorted(steps) and [peak for _, peak, _ in choice.front] == sorted(
        (peak for _, peak, _ in choice.front), reverse=True
    )


def test_degrees_that_are_given_are_kept() -> None:
    found = choose(question(limits={"fixed": {"pp": 4, "tp": 2}}))
    assert all(one.layout.degree("pp") == 4 and one.layout.degree("tp") == 2 for one in found.best)
    level = choose(question(limits={"fixed": {"shard": 8}, "levels": (2,)}))
    assert all(one.layout.degree("shard") == 8 and one.layout.zero == 2 for one in level.best)
    assert "fits" in told_of(question(), "shard=16,zero=3,recompute=full,precision=bf16", found)


def test_experts_spread_only_over_ranks_that_there_are() -> None:
    asked = question("16xh100", MIXTURE, 16)
    degrees = expand(asked.job, asked.space, cores(asked.job, asked.space))
    assert set(degrees.ep) >= {1, 2, 4, 8, 16}
    assert not np.any((degrees.shard * degrees.cp * degrees.tp) % degrees.ep)
    for at in range(0, degrees.count, 37):
        layout_of(degrees, at, Layout(precision="bf16"), 8)


def test_why_a_layout_loses(choice: Choice) -> None:
    small = question("16xa100-40")
    told = told_of(small, "replicate=16,precision=bf16", choose(small))
    assert told.startswith("doesn't fit: every rank needs ") and "GiB of" in told
    # What is less than the device, and more than plans fill, says the latter too.
    tight = dataclasses.replace(question(), usable=0.01)
    candidate = price_layout(tight, Layout.parse("replicate=16,precision=bf16"), None)
    filled = format_bytes(0.01 * tight.cluster.memory_bytes)
    assert candidate.price.peak < tight.cluster.memory_bytes
    assert f", of which plans fill {filled}: " in memory_sentence(tight, candidate)
    slow = told_of(question(), "pp=4,shard=4,zero=1,microbatches=8,precision=bf16", choice)
    assert "slower" in slow and "pipeline bubble" in slow
    told = told_of(question(), "shard=16,zero=3,offload=optimizer,precision=bf16", choice)
    assert "of a rank in host memory" in told and "slower" in told
    with pytest.raises(PlanError, match="multiply to 8"):
        told_of(question(), "replicate=8", choice)
    assert "of the best apart" in reason(question(), choice) or "slower" in reason(question(), choice)


def test_the_closed_form_of_a_pipeline_is_near_its_simulation() -> None:
    asked = question()
    for schedule in ("1f1b", "gpipe", "interleaved", "zbv", "zerobubble", "dualpipev", "loopedbfs"):
        layout = Layout.parse(f"pp=4,shard=4,zero=1,microbatches=8,precision=bf16,schedule={schedule}")
        run = timeline(asked.job, layout, asked.machine, asked.runtime)
        assert run is not None
        closed = price_many(asked.job, LayoutBatch.from_layouts([layout], 12), asked.machine, asked.runtime)
        after = sum(float(closed.parts[name][0]) for name in ("gather", "reduce", "optimizer", "step", "stragglers"))
        piped = float(closed.step_s[0]) - after
        assert abs(piped / run.makespan_s - 1) < 0.16, schedule
        whole = price_candidate(asked, layout).price
        assert whole.step_s - after == pytest.approx(run.makespan_s, rel=0.05)


def test_what_cannot_be_is_refused_with_a_cure() -> None:
    told = r"needs .* of .* that may be filled; nearest that would: about \d+ devices, .* or offload=\w+ \("
    with pytest.raises(PlanError, match=told):
        choose(question("2xrtx3090", limits={"offloads": ("none",)}))
    assert choose(question("2xrtx3090")).best[0].layout.offload != "none"
    with pytest.raises(PlanError, match=r"nearest that would: about \d+ devices, or \d+ layers instead of 12$"):
        choose(question("2xrtx2080", rows=64, usable=0.6))
    with pytest.raises(PlanError, match="batch of 1 rows"):
        choose(question("64xh100", rows=1, limits={"axes": ("replicate", "shard")}))
    with pytest.raises(PlanError, match="tp=3"):
        choose(question(limits={"fixed": {"tp": 3}}))
    with pytest.raises(PlanError, match="objective=speed"):
        question(objective="speed")


def test_more_devices_are_faster_until_they_are_not() -> None:
    points = curve(question("64xh100"), sizes("8..64", 64))
    times = [point.best.price.step_s for point in points if point.best]
    assert [point.devices for point in points] == [8, 16, 32, 64] and times == sorted(times, reverse=True)
    assert knee(points) in (None, 8, 16, 32)
    assert sizes("64,8,64", 64) == [8, 64]
    with pytest.raises(PlanError, match="the cluster has 64"):
        sizes("8..512", 64)
    with pytest.raises(PlanError, match="write a number"):
        sizes("many", 64)


def test_the_knee_is_where_growth_stops_paying(choice: Choice) -> None:
    def point(devices: int, efficiency: float) -> Point:
        return Point(devices=devices, best=choice.best[0], efficiency=efficiency)

    assert knee([point(8, 1.0), point(16, 0.95), point(32, 0.7), point(64, 0.6)]) == 16
    assert knee([point(8, 1.0), point(16, 0.9), point(32, 0.8)]) is None
    assert knee([point(8, 1.0)]) is None and knee([point(8, 1.0), Point(devices=16, best=None)]) is None


def test_what_is_left_of_a_cluster_is_used_as_far_as_that_is_faster() -> None:
    left = question("128xh100", LLAMA, 240, limits={"chunks": 2})
    left = dataclasses.replace(left, cluster=left.cluster.without(1))
    part, again = replan(left)
    times = {}
    for count in (120, 112):
        some = dataclasses.replace(left, cluster=left.cluster.restricted(count))
        found = search_space(some)
        assert found.best is not None
        times[count] = float(found.best[1].step_s[0])
        least = search_space(some, under=times[count])
        assert least.best is not None and float(least.best[1].step_s[0]) == times[count]
        assert search_space(some, under=times[count] * 0.99).best is None
    assert part.cluster.devices == min(times, key=lambda count: times[count])
    assert again.best[0] == choose(part).best[0]
    with pytest.raises(PlanError, match="can't be shared by 8 devices"):
        replan(question("8xh100", SHORT, 1, limits={"axes": ("replicate", "shard")}))


def test_no_more_devices_than_a_sixteenth_are_left_idle() -> None:
    """Of 20 devices one may idle, not two: 18 would leave a tenth of them."""
    left = question("20xh100", LLAMA, 20)
    single = dataclasses.replace(left.cluster.groups[0].node.resized(1), outside_count=1)
    left = dataclasses.replace(
        left, cluster=dataclasses.replace(left.cluster, groups=(NodeGroup(node=single, count=20),))
    )
    assert sorted(smaller.cluster.devices for smaller in _smaller_questions(left)) == [19, 20]


def test_a_later_finalist_gives_its_own_reason(choice: Choice) -> None:
    second = choice.best[1]
    first_reason, second_reason = reason(question(), choice), reason(question(), choice, second)
    assert format_seconds(second.price.step_s) in second_reason and str(choice.best[0].layout) in second_reason
    assert second_reason.startswith("number 2 that fit") and first_reason == reason(question(), choice, choice.best[0])


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12] and divisors(1) == [1] and divisors(16384)[-1] == 16384


def test_uneven_stages_of_an_interleaved_pipeline_are_searched() -> None:
    """126 layers on 16 ranks of 4 stages: the first and the last stage have one layer, all others two."""
    sizes = TableSizes(name="deep", layers=126, width=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256)
    asked = question("16384xh100", shape_from_sizes(sizes), 2048)
    published = Layout.parse(
        "pp=16,shard=128,tp=8,zero=1,microbatches=16,schedule=interleaved,stages=4,sequence=true,precision=bf16"
    )
    every = cores(asked.job, asked.space)
    assert contains(asked.job, asked.space, every, asked.base, published)
    bounds = price_candidate(asked, published).price.stages
    ends = (bounds[0].layers[0], bounds[-1].layers[-1])
    assert len(bounds) == 16 and sum(stop - start for start, stop in ends) <= 4
    assert sum(stop - start for rank in bounds for start, stop in rank.layers) == 126
    # Of 112 stages 14 would have two layers and the others one: they would set the pace.
    wasteful = dataclasses.replace(published, stages=7)
    assert not contains(asked.job, asked.space, every, asked.base, wasteful)


@pytest.mark.parametrize("text", further(["4x1xa100-40@ethernet-1g", "2x4xa100-40@ethernet-10g", "8xh100"], (1,)))
@pytest.mark.parametrize("shape", [SHORT, MIXTURE], ids=["dense", "mixture"])
def test_no_printed_price_of_the_space_is_below_the_fastest(text: str, shape: object) -> None:
    """Every layout that fits, its pipeline simulated; on slow networks bounds are far from what is printed."""
    asked = question(text, shape, 16, usable=0.6, limits={"offloads": ("none",)})
    job, layers, least = asked.job, len(asked.job.shape.blocks), np.inf
    whole = expand(job, asked.space, cores(job, asked.space))
    for some in range(1, layers + 1):
        share = np.where(whole.recompute > 0, some / layers, 1.0)
        batch = dataclasses.replace(whole, recompute_share=share)
        prices = price_many(job, batch, asked.machine, asked.runtime)
        fitting = np.flatnonzero(prices.peak <= asked.usable_bytes)
        steps_s = simulated_steps_s(job, batch.take(fitting), prices.step_s[fitting], asked.machine, asked.runtime)
        least = min(least, float(steps_s.min(initial=np.inf)))
    found = choose(asked)
    assert min(one.price.step_s for one in found.best) == pytest.approx(least, rel=1e-9)


def test_what_is_shown_changes_neither_plan_nor_ties() -> None:
    found = {show: choose(question(), show) for show in (1, 2, 10, 15)}
    assert {show: len(one.shown) for show, one in found.items()} == {1: 1, 2: 2, 10: 10, 15: 15}
    assert len({str(one.best[0].layout) for one in found.values()}) == 1
    assert len({reason(question(), one) for one in found.values()}) == 1
    ties = found[15].ties
    times = [one.price.step_s for one in found[10].best]
    assert {one.ties for one in found.values()} == {ties} and ties == sum(time <= min(times) * 1.05 for time in times)


def test_a_named_layout_that_search_misjudged_becomes_the_plan() -> None:
    """Priced in full it beats the finalists by more than the model can tell; nothing outside the space does."""
    asked = question()
    found = choose(asked, 3)
    best = found.best[0]

    def at(text: str, share: float) -> Candidate:
        one = price_candidate(asked, Layout.parse(text))
        step_s = min(item.price.step_s for item in found.best) * share
        return dataclasses.replace(one, price=dataclasses.replace(one.price, step_s=step_s))

    inside = "pp=2,shard=8,zero=1,microbatches=4,precision=bf16,schedule=1f1b"
    outside = "pp=2,shard=8,zero=1,precision=bf16,split=5-7"
    assert add_named_layouts(asked, found, [at(inside, 0.99), at(outside, 0.5)]).best[0] is best
    better = add_named_layouts(asked, found, [at(inside, 0.9)])
    assert str(better.best[0].layout) == inside and better.ties == 1
    assert any("a layout that was named" in note for note in better.notes)


@pytest.mark.parametrize("shape", [LLAMA, MIXTURE], ids=["dense", "mixture"])
def test_the_space_contains_what_it_is_made_of(shape: object) -> None:
    asked = question("8xh100", shape)
    job, space = asked.job, asked.space
    every = cores(job, space)
    degrees = expand(job, space, every)
    layouts = [layout_of(degrees, at, asked.base, len(job.shape.blocks)) for at in range(0, degrees.count, 97)]
    assert len(layouts) > 20
    assert all(contains(job, space, every, asked.base, layout) for layout in layouts)
    for text in ("replicate=8", "replicate=8,precision=bf16,compile=true", "replicate=4,precision=bf16",
                 "pp=2,replicate=4,schedule=gpipe,precision=bf16", "replicate=8,microbatches=3,precision=bf16",
                 "cp=2,replicate=4,attention=gather,precision=bf16"):  # fmt: skip
        assert not contains(job, space, every, asked.base, Layout.parse(text)), text


def test_a_plan_says_what_the_limits_of_its_search_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With three layouts kept, the others' least bound holds for the fastest that a search without limits finds."""
    asked = dataclasses.replace(question("32xh100", rows=64), limits={"fixed": {"pp": 8}})
    whole = choose(asked)
    assert not any("by its lower bound" in note for note in whole.notes)
    for limit in ("KEPT", "MOST_KEPT"):
        monkeypatch.setattr(choose_module, limit, 3)
    cut = build_choice(asked, search_space(asked, keep=3), 3)
    (note,) = (note for note in cut.notes if "by its lower bound" in note)
    share = float(re.findall(r"more than ([0-9.]+)% faster", note)[0]) / 100.0
    assert min(option.price.step_s for option in whole.best) >= cut.best[0].price.step_s * (1.0 - share - 1e-3)


@pytest.mark.parametrize(("microbatches", "noted"), [(128, False), (4096, True)])
def test_a_plan_says_where_its_pipeline_is_too_long_to_be_simulated(microbatches: int, noted: bool) -> None:
    fixed = {"pp": 64, "microbatches": microbatches, "tp": 1}
    sizes = TableSizes(name="deep", layers=64, width=1024, heads=8, vocab=1000)
    asked = question("64xh100", shape_from_sizes(sizes), 4096)
    plan = choose(dataclasses.replace(asked, limits={"fixed": fixed, "schedules": ("1f1b",)}))
    assert any("too many to simulate" in note for note in plan.notes) == noted
