"""Questions about a plan: budgets, capacity, changed clusters, measured runs, walls, nearby sizes.

The witness of each is arithmetic written down here, or the planner asked another way.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import pytest

from meshwright.cluster.cluster import Cluster
from meshwright.errors import ClusterError, ConfigError, NoRoomError, PlanError
from meshwright.jobs.plan_model import (
    PlannableModel,
    model_of_sizes,
    plan_model,
    preset_model,
    question_of,
    scale_model,
)
from meshwright.jobs.plan_questions import (
    plan_batch,
    plan_budget,
    plan_largest,
    plan_longest,
    plan_measured,
    plan_reshape,
    plan_walls,
    plan_what_if,
)
from meshwright.jobs.requests import PlanConfig
from meshwright.models.config import ModelConfig
from meshwright.planner.candidate import Candidate
from meshwright.planner.capacity import BatchCurve, largest_that, with_sequence, with_shape
from meshwright.planner.cases import PlannedCase, fits
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.scaling import Point, best_size, knee
from meshwright.planner.shape_changes import (
    resized,
    with_feed_forward,
    with_head_size,
    with_positions,
    with_vocabulary,
)
from meshwright.units import parse_count

SIZES = "layers=8,width=1024,heads=16,kv_heads=4,vocab=32000,ffn=2816"
MODEL = model_of_sizes(SIZES)
CONFIG = PlanConfig(sizes=SIZES, cluster="8xh100", batch=64, sequence=1024)


def asked(**fields: object) -> PlanConfig:
    config = dataclasses.replace(CONFIG, **fields)  # type: ignore[arg-type]
    config.check_all()
    return config


def flops_per_token(sequence: int) -> float:
    """6 N + 12 L S H E, counted from the sizes in the text alone."""
    attention = 1024 * (1024 + 2 * 256) + 1024 * 1024
    weights = 8 * (attention + 3 * 1024 * 2816) + 32000 * 1024
    return 6 * weights + 12 * 8 * sequence * 16 * 64


def test_mfu_is_the_models_operations_over_the_data_sheets_peak() -> None:
    result = plan_model(CONFIG, MODEL)
    best = result.choice.best[0]
    expected = flops_per_token(1024) * 64 * 1024 / best.price.step_s / 8
    assert best.flops_per_device == pytest.approx(expected, rel=1e-12)
    # NVIDIA's data sheet: 989.4 TFLOP/s of bf16 without sparsity.
    assert best.mfu == pytest.approx(expected / 989.4e12, rel=1e-3)
    assert all("mfu" in option for option in result.to_json()["best"])  # type: ignore[attr-defined]


def test_a_budget_is_steps_times_their_price() -> None:
    result = plan_budget(asked(tokens="1B"), MODEL)
    (budget,) = result.budgets
    step_s = plan_model(CONFIG, MODEL).step_s
    steps = math.ceil(1e9 / 65536)
    assert budget.steps == steps and budget.days == pytest.approx(steps * step_s / 86400)
    assert budget.device_hours == pytest.approx(steps * step_s / 3600 * 8)
    device = Cluster.parse("8xh100").device
    assert budget.dollars == pytest.approx(budget.device_hours * (device.price_per_hour or 0))
    assert budget.kwh == pytest.approx(budget.device_hours * device.watts / 1000)
    assert result.chosen is budget and result.is_met


def test_the_cheapest_cluster_within_days_is_that_of_asking_one_by_one() -> None:
    config = asked(tokens="20B", days=2.0, cluster="2xh100,2xa100-80", batch=64, fix="offload=none")
    result = plan_budget(config, MODEL)
    by_hand = []
    for kind in ("h100", "a100-80"):
        for devices in (1, 2):
            single = dataclasses.replace(config, days=None, cluster=f"{devices}x{kind}")
            by_hand += [item for item in plan_budget(single, MODEL).budgets if item.days <= 2.0]
    cheapest = min(by_hand, key=lambda item: item.dollars or 0)
    assert len(by_hand) > 1
    assert result.chosen is not None and result.chosen.dollars == pytest.approx(cheapest.dollars)
    assert str(result.chosen.case.question.cluster) == str(cheapest.case.question.cluster)
    hopeless = plan_budget(dataclasses.replace(config, days=0.01), MODEL)
    assert not hopeless.is_met and hopeless.budgets


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"days": 3.0}, "say how many"),
        ({"tokens": "many"}, "write a number above 0"),
        ({"tokens": "1B", "largest": True}, "one at a time"),
        ({"cluster": "8xh100,8xa100-80"}, "compared by --tokens"),
        ({"measured_s": 1.0}, "of one layout"),
        ({"walls": True, "layout": ("tp=8",)}, "layout = tp=8 is for comparing .*leave layout out"),
        ({"largest": True, "devices": "8..16"}, "one number of devices"),
        ({"reshape": True, "html": "page.html"}, "html is the page of a plan"),
        ({"emit": "megatron", "layout": ("tp=2",)}, "layout = tp=2 is for comparing .* emit takes the plan as it is"),
    ],
)
def test_questions_that_cannot_be_are_refused(fields: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        asked(**fields)


def test_counts_are_parsed() -> None:
    assert parse_count("15T") == 15e12 and parse_count("300B") == 3e11 and parse_count("1.5M") == 1.5e6
    assert parse_count("2e12") == 2e12 and parse_count("1_000") == 1000
    assert parse_count("many") is None and parse_count("infT") is None and parse_count("") is None


def table(**sizes: object) -> TableSizes:
    fields = {"layers": 8, "width": 1024, "heads": 16, "kv_heads": 4, "vocab": 32000, "ffn": 2816} | sizes
    return TableSizes(name="m", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"gated": False, "ffn": 4096},
        {"experts": 8, "active_experts": 2, "expert_ffn": 1024, "dense_layers": 2},
        {"tied": True, "positions": 512, "window": 128},
    ],
)
def test_a_scaled_shape_is_that_of_the_scaled_table(extra: dict[str, object]) -> None:
    """The table's own formula is another way to the same sizes."""
    small = shape_from_sizes(table(**extra))
    scaled = {"layers": 16, "width": 2048, "heads": 32, "kv_heads": 8}
    scaled |= {"ffn": 2 * int(extra.get("ffn", 2816)), "expert_ffn": 2 * int(extra.get("expert_ffn", 0))}  # type: ignore[call-overload]
    scaled |= {"dense_layers": 2 * int(extra.get("dense_layers", 0))}  # type: ignore[call-overload]
    grown, expected = resized(small, 16, 32), shape_from_sizes(table(**extra | scaled))
    # Kinds of layers keep their shares; which of two kinds comes first may differ.
    assert Counter(grown.blocks) == Counter(expected.blocks)
    plain = {"blocks": (), "layer_parameters": ()}
    assert dataclasses.replace(grown, **plain) == dataclasses.replace(expected, **plain)  # type: ignore[arg-type]
    assert resized(small, small.layers, small.heads) == small


def test_changed_sizes_are_those_of_the_changed_table() -> None:
    small = shape_from_sizes(table())
    assert with_vocabulary(small, 32768) == shape_from_sizes(table(vocab=32768))
    assert with_feed_forward(small, 3072) == shape_from_sizes(table(ffn=3072))
    assert with_head_size(small, 128) == shape_from_sizes(table(heads=8, kv_heads=2))
    assert with_head_size(small, 192) is None
    learned = shape_from_sizes(table(positions=512))
    assert with_positions(learned, 1024) == shape_from_sizes(table(positions=1024))
    assert with_positions(small, 1024) is small


def test_the_largest_number_with_a_property() -> None:
    for largest in (0, 1, 2, 6, 7, 8, 99, 100):
        assert largest_that(lambda count, largest=largest: count <= largest, 3, 100) == largest  # type: ignore[misc]
    assert largest_that(lambda count: True, 3, 100) == 100


@pytest.mark.parametrize("usable", [0.7, 0.73])
def test_the_largest_model_fits_and_the_next_does_not(usable: float) -> None:
    config = asked(cluster="1xa100-40", batch=4, fix="offload=none", usable=usable)
    (largest,) = plan_largest(config, MODEL).largest
    shape = largest.question.job.shape
    assert largest.best is not None and shape.parameters > 4 * MODEL.shape.parameters
    # Four heads of queries share one of keys, so widths step by four of 64. Between two widths layers are added, until
    # the weights, which grow as layers times width squared, are those of the next width with its own layers.
    next_width = shape.width + 4 * 64
    assert 8 / 1024 * 0.97 < shape.layers / shape.width < 8 / 1024 * (next_width / shape.width) ** 3
    question = question_of(config, MODEL)
    assert not fits(with_shape(question, resized(MODEL.shape, round(next_width / 128), next_width // 64)))
    assert not fits(with_shape(question, resized(MODEL.shape, shape.layers + 1, shape.heads)))
    # 16 bytes a parameter leave little of 40 GB.
    assert 0.4 < 16 * shape.parameters / 40e9 < 1


def test_the_longest_rows_fit_and_longer_ones_do_not() -> None:
    config = asked(cluster="1xa100-40", batch=4, fix="offload=none")
    (longest,) = plan_longest(config, MODEL).longest
    tokens, question = longest.question.job.sequence, question_of(config, MODEL)
    assert longest.best is not None and tokens > 1024
    assert not fits(with_sequence(question, tokens + tokens // 8))


def test_rows_are_the_longest_that_a_public_models_plan_has() -> None:
    """Its modules' bytes were counted, eager and compiled; another way to ask is the plan of each length itself."""
    name = ModelConfig(name="qwen3-0.6b")
    model = preset_model(name)
    assert model is not None
    config = asked(sizes="", model=name, cluster="1xrtx4090", batch=1, fix="offload=none", usable=0.9)
    (longest,) = plan_longest(config, model).longest
    tokens = longest.question.job.sequence
    plan = plan_model(dataclasses.replace(config, sequence=tokens), model)
    # No layout fits without compiled layers, and the plan has the choice of them.
    assert plan.layout.compile and longest.best is not None and longest.best.price == plan.choice.best[0].price
    assert any("no layout fits without" in note for note in plan.choice.notes)
    for refused in ({"sequence": tokens}, {"sequence": tokens + tokens // 16, "compile": None}):
        with pytest.raises(NoRoomError):
            plan_model(dataclasses.replace(config, **{"compile": False, **refused}), model)  # type: ignore[arg-type]


def test_nothing_largest_where_nothing_fits() -> None:
    huge = PlannableModel(shape=shape_from_sizes(table(vocab=10**9)))
    for question in (plan_largest, plan_longest):
        with pytest.raises(PlanError, match=r"not even one layer|no rows are short enough"):
            question(asked(cluster="1xa100-40", batch=4, fix="offload=none"), huge)


def test_the_batch_curve_is_flat_from_its_knee() -> None:
    curve = plan_batch(asked(batch="auto", cluster="2xh100", fix="offload=none"), MODEL)
    rates = {case.question.job.rows: case.best.tokens_per_s for case in curve.cases if case.best}
    assert curve.knee is not None and rates[curve.knee] >= 0.95 * max(rates.values())
    assert all(rate < 0.95 * max(rates.values()) for rows, rate in rates.items() if rows < curve.knee)
    single = plan_model(asked(batch=curve.knee, cluster="2xh100", fix="offload=none"), MODEL)
    assert single.tokens_per_s == pytest.approx(rates[curve.knee])
    growing = BatchCurve(cases=curve.cases[:2])
    assert rates[curve.cases[0].question.job.rows] < 0.9 * rates[curve.cases[1].question.job.rows]
    assert growing.knee is None


def test_a_changed_cluster_is_the_one_that_has_the_figures() -> None:
    """Twice everything of a device halves what it computes; a file with the figures is another way to say it."""
    question = question_of(asked(cluster="2xh100"), MODEL)
    what_if = "flops=2x,bandwidth=2x,inside=2x"
    config = asked(cluster="2xh100", what_if=what_if, fix="offload=none")
    result = plan_what_if(config, MODEL)
    assert result.today.best is not None and len(result.changed) == 4
    group = question.cluster.groups[0]
    values = Cluster.parse("8xh100").to_dict()
    faster = result.changed[0].question.cluster.groups[0].node
    assert faster.device.peak("bf16") == 2 * group.node.device.peak("bf16")
    assert faster.inside.bytes_per_s == 2 * group.node.inside.bytes_per_s
    assert faster.device.memory_bytes == group.node.device.memory_bytes
    assert Cluster.parse("8xh100").to_dict() == values
    today, both = result.today.best.price, result.changed[0].best
    assert both is not None and today.step_s / 2 <= both.price.step_s < 0.7 * today.step_s
    assert all(case.best and case.best.price.step_s >= both.price.step_s for case in result.changed[1:])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("nic=2x", "cross no network"),
        ("wires=2x", "can't be changed"),
        ("flops=2", "write a factor"),
        ("flops=0x", "write a factor"),
        ("flops=2x,flops=3x", "given twice"),
        ("nodes=1.5x", "whole number"),
        (",", "nothing is changed"),
    ],
)
def test_changes_that_cannot_be_are_refused(text: str, why: str) -> None:
    with pytest.raises(ClusterError, match=why):
        plan_what_if(asked(what_if=text), MODEL)


def test_a_measured_run_loses_what_adds_up() -> None:
    layout = "pp=4,tp=2,microbatches=16"
    run = plan_measured(asked(layout=(layout,), measured_s=2.0), MODEL)
    assert run.mfu == pytest.approx(flops_per_token(1024) * 65536 / 2.0 / 8 / 989.4e12, rel=1e-3)
    assert run.plan.best is not None
    assert sum(run.losses.values()) == pytest.approx(2.0 - run.plan.best.price.step_s)
    assert run.losses["pipeline bubble"] > 0
    (reason,) = plan_model(asked(layout=(layout,)), MODEL).compared.values()
    assert "slower" in reason


def test_a_measured_run_of_a_public_model_has_the_plans_price() -> None:
    name = ModelConfig(name="llama-3.2-1b")
    model, config = preset_model(name), asked(sizes="", model=name)
    assert model is not None
    best = plan_model(config, model).choice.best[0]
    measured = {"layout": (str(best.layout),), "measured_s": best.price.step_s}
    run = plan_measured(dataclasses.replace(config, **measured), model)  # type: ignore[arg-type]
    assert run.predicted.price == best.price and run.mfu == pytest.approx(best.mfu)
    assert set(run.losses.values()) == {0.0}


def test_nearby_sizes_have_more_flops_by_the_plan_of_their_own() -> None:
    sizes = "layers=8,width=1024,heads=16,vocab=50257,ffn=2730"
    odd, config = (
        model_of_sizes(sizes),
        asked(sizes=sizes, cluster="1xh100", batch=16, fix="offload=none,microbatches=2"),
    )
    found = plan_reshape(config, odd)
    assert found.better and found.better == tuple(sorted(found.better, key=lambda item: -item.utilization))
    vocabulary = next(item for item in found.better if item.case.name.startswith("vocabulary"))
    padded = vocabulary.case.question.job.shape.vocab
    assert padded % 64 == 0 and vocabulary.parameters == 2 * (padded - 50257) * 1024
    alone = plan_model(config, model_of_sizes(sizes.replace("50257", str(padded))))
    plain = plan_model(config, odd)
    assert vocabulary.throughput == pytest.approx(alone.tokens_per_s / plain.tokens_per_s - 1)


def test_the_nearest_wall_is_the_resource_that_brings_most() -> None:
    walls = plan_walls(
        asked(walls=True, cluster="2x1xh100@ethernet-10g", batch=8, sequence=512, fix="offload=none,pp=1"), MODEL
    )
    assert walls.nearest == "network" and max(walls.gains.values()) == walls.gains["network"] > 0.2
    assert walls.tokens_per_device == 8 * 512 / 2
    # 989.4 TFLOP/s at the reached share, over the node's cards: 6 bytes of 6 N operations, N with the embedding's rows.
    cluster = Cluster.parse("2x1xh100@ethernet-10g")
    node = cluster.groups[0].node
    assert node.outside is not None
    rate = cluster.device.peak("bf16") * cluster.device.share("bf16") / (node.outside.rate * node.outside_count)
    shape = MODEL.shape
    assert walls.hidden_tokens == pytest.approx(rate * shape.parameters / shape.matmul_parameters, rel=1e-6)
    assert walls.state_bytes == 16 * shape.parameters and walls.fewest_devices == 1
    alone = plan_walls(asked(walls=True, cluster="1xh100", batch=16, sequence=4096, fix="offload=none"), MODEL)
    assert alone.nearest == "compute" and alone.hidden_tokens is None and "network" not in alone.gains
    assert sum(case.best is not None for case in alone.doubled) == len(alone.gains)


def test_a_knee_lies_inside_the_range_whatever_the_steps() -> None:
    best = plan_model(CONFIG, MODEL).choice.best[0]

    def point(devices: int, efficiency: float, **figures: float) -> Point:
        candidate: Candidate = dataclasses.replace(best, **figures)  # type: ignore[arg-type]
        return Point(devices=devices, best=candidate, efficiency=efficiency)

    # A doubling at 0.8 pays just so; half as much again has to bring 1.5 ** log2(1.6).
    assert knee([point(8, 1.0), point(16, 0.8), point(32, 0.64)]) is None
    least = 1.5 ** math.log2(1.6) / 1.5
    assert knee([point(8, 1.0), point(12, least * 1.001)]) is None
    assert knee([point(8, 1.0), point(12, least * 0.999), point(24, 0.1)]) == 8
    costs = [
        point(8, 1.0, cost_per_mtoken=2.0),
        point(16, 0.9, cost_per_mtoken=1.0),
        point(32, 0.8, cost_per_mtoken=3.0),
    ]
    assert best_size(costs, "cost") == 16 and best_size(costs, "time") is None
    result = scale_model(asked(cluster="4xh100", devices="1..4", objective="energy"), MODEL)
    frugal = {point.devices: point.best.joules_per_token or 0 for point in result.points if point.best}
    assert result.size == min(frugal, key=lambda devices: frugal[devices])


def test_given_degrees_that_leave_experts_to_padding_are_planned() -> None:
    sizes = "layers=4,width=256,heads=4,vocab=4096,experts=4,active_experts=2,expert_ffn=512"
    config = asked(sizes=sizes, fix="shard=8,ep=4,zero=3")
    assert str(plan_model(config, model_of_sizes(sizes)).layout).startswith("shard=8,ep=4,zero=3")
    # Nobody searches for it: no layout that isn't asked for shards an expert's row.
    free = plan_model(dataclasses.replace(config, fix=""), model_of_sizes(sizes)).choice
    assert not any(option.layout.degree("ep") == 4 and option.layout.degree("shard") == 8 for option in free.best)


def test_where_nothing_fits_the_answer_says_what_would_and_it_does() -> None:
    sizes = "layers=32,width=4096,heads=32,kv_heads=8,ffn=14336,vocab=128256"
    config = asked(sizes=sizes, cluster="8xa100-40", sequence=131072, fix="offload=none,cp=1,tp=1")
    with pytest.raises(PlanError, match=r"or rows of (\d+) tokens \(shard=") as refused:
        plan_model(config, model_of_sizes(sizes))
    tokens = int(str(refused.value).partition("rows of 131072")[2].partition("or rows of ")[2].split()[0])
    question = question_of(config, model_of_sizes(sizes))
    assert fits(with_sequence(question, tokens)) and not fits(with_sequence(question, 2 * tokens))
    small = dataclasses.replace(config, cluster="3xa100-40", batch=63, sequence=2048, fix="offload=none")
    with pytest.raises(PlanError, match=r"an optimizer with at most (\d\.\d) bytes a parameter instead of 8"):
        plan_model(small, model_of_sizes(sizes))


def test_a_case_without_a_plan_says_why() -> None:
    question = question_of(asked(batch=3, fix="replicate=8"), MODEL)
    case = PlannedCase(name="none", question=question, best=None, why="because")
    assert case.to_json()["best"] is None and case.to_json()["why"] == "because"


@pytest.mark.parametrize(
    ("fix", "nearest"),
    [
        ("tp=3", "nearest that works: tp=2"),
        ("pp=3,tp=8", "nearest that works: pp=2, tp=8"),
        ("tp=16", r"tp lies within the 8 that fast links join .*nearest that works: tp=8"),
        ("pp=3,tp=3", "nearest that works: fewer of them"),
    ],
)
def test_degrees_that_no_layout_has_are_refused_with_the_nearest(fix: str, nearest: str) -> None:
    with pytest.raises(PlanError, match=nearest):
        plan_model(asked(cluster="16xh100", batch=64, fix=fix), MODEL)
