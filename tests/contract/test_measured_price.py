"""A layout's price on a measured machine: operators at their rates, the host beside them, ranks that share cores."""

from __future__ import annotations

import dataclasses
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from meshwright.cluster.calibration import FORMS, Calibration
from meshwright.cluster.cluster import Cluster
from meshwright.jobs.model_reading import make_measure, model_parts
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.measure import measure_shape
from meshwright.planner.candidate_prices import price_candidate
from meshwright.planner.collectives import Collectives
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.cost.operators import PipelineSeconds, WorkSeconds, price_operators
from meshwright.planner.cost.prices import Price
from meshwright.planner.islands import island_question
from meshwright.planner.layer_traffic import LayerTraffic
from meshwright.planner.measured_price import correct_price
from meshwright.planner.predict import AFTER_PIPELINE, named_plan
from meshwright.planner.question import Question
from meshwright.planner.rates import MeasuredTimes
from meshwright.planner.run_history import learn, record
from meshwright.spec.compression import assign_buckets
from meshwright.spec.layout import Layout
from meshwright.spec.model_shape import ModelWork, ModuleWork, Operator
from meshwright.train.model_analysis import analyse_model
from tests.tiers import further

MODEL = ModelConfig(name="llama", layers=4, width=64, heads=4, ffn=128, vocab=256, context=32)
RATE, ELEMENTS = 1e10, 1e9
SIZES = (16, 4096)
BUILT = build_meta(MODEL)
JOB = PricedJob(shape=measure_shape(BUILT), sequence=32, rows=16, precision="float32")
MEASURE = make_measure(BUILT, 32, "float32")


NO_SECONDS = dict.fromkeys(("matmul", "attention", "elementwise", "host"), 0.0)
MIXTURE = build_meta(dataclasses.replace(MODEL, name="mixtral", experts=4))


def calibration(ranks: int, cores: int, **host: float) -> Calibration:
    products = [
        ("float32", form, True, m, n, k, 2.0 * m * n * k / RATE)
        for form, m, n, k in product(FORMS, SIZES, SIZES, SIZES)
    ]
    names = ("copy", "add", "mul")
    plain = [(name, "float32", True, count, count / ELEMENTS) for name in names for count in (10, 1000)]
    fused = [("float32", True, 1, sequence, 16, 1e-4, 2e-4) for sequence in (16, 64)]
    return Calibration(
        machine={"kind": "cpu", "cores": cores}, ranks=ranks, matmul=tuple(products), operations=tuple(plain),
        attention=tuple(fused), optimizer=((10, 1e-8), (1000, 1e-6)), host=tuple(host.items()),
    )  # fmt: skip


def priced(layout: str, cores: int = 0, **host: float) -> Price:
    one = Layout.parse(layout)
    made = calibration(one.world, cores or one.world, **host)
    cluster = Cluster.detected(one.world, "cpu", cores=one.world)
    question = Question(job=JOB, cluster=dataclasses.replace(cluster, calibration=made))
    return correct_price(question, price_candidate(question, one), MEASURE).price


def test_products_run_at_their_measured_rate() -> None:
    work = MEASURE(Layout(), 8)
    assert work is not None
    flops = sum(count * item.flops for back in (False, True) for count, item in work.operators(back)
                if item.kind == "product")  # fmt: skip
    assert priced("replicate=2").parts["matmul"] == pytest.approx(flops / RATE, rel=1e-6)


def test_the_host_takes_its_time_for_every_operator_of_every_micro_batch() -> None:
    work = MEASURE(Layout(), 4)
    assert work is not None
    with_host = priced("replicate=2,microbatches=2", operator_forward=1e-3, operator_backward=2e-3)
    expected = 2 * (1e-3 * len(work.operators()) + 2e-3 * len(work.operators(True)))
    counted = 2 * sum(count * cost for back, cost in ((False, 1e-3), (True, 2e-3)) for count, _ in work.operators(back))
    assert with_host.parts["host"] == pytest.approx(counted, rel=0.02) and counted > expected
    assert priced("replicate=2,microbatches=2").parts["host"] == 0.0


def test_the_reader_with_most_rows_is_waited_for() -> None:
    even, uneven = (priced(f"shard=2,zero=2{rows}") for rows in ("", ",rows=3-1"))
    assert uneven.parts["matmul"] == pytest.approx(1.5 * even.parts["matmul"], rel=0.01)


def test_full_recompute_makes_all_but_the_last_product_again() -> None:
    plain, again = priced("replicate=2"), priced("replicate=2,recompute=full")
    forward = plain.stages[0].forward_s
    assert 0.5 * forward < again.step_s - plain.step_s < forward


def test_a_pipeline_is_simulated_with_the_measured_times() -> None:
    schedules = {name: priced(f"pp=2,microbatches=8,schedule={name}").step_s for name in ("1f1b", "zerobubble")}
    assert schedules["zerobubble"] < schedules["1f1b"]
    assert priced("pp=2,microbatches=8,schedule=1f1b", action=1e-3, step=0.01).step_s > schedules["1f1b"] + 16e-3


def test_ranks_that_share_cores_leave_their_share_to_the_others() -> None:
    own, shared = priced("pp=4,microbatches=4", cores=4), priced("pp=4,microbatches=4", cores=2)
    assert shared.parts["bubble"] < own.parts["bubble"]
    busy = sum(own.parts[name] for name in ("matmul", "attention", "elementwise"))
    assert shared.step_s >= busy


def test_products_of_experts_are_products() -> None:
    """Each token goes to two experts of three matrices each, 2 FLOP a weight, and twice as many in backward."""
    work = make_measure(MIXTURE, 32, "bf16")(Layout.parse("precision=bf16"), 8)
    assert work is not None
    for is_backward, factor in ((False, 2), (True, 4)):
        grouped = [(count, one) for count, one in work.operators(is_backward) if one.name == "_grouped_mm"]
        flops = sum(count * one.flops for count, one in grouped)
        assert flops == factor * 4 * (8 * 32 * 2) * 3 * 64 * 128
        # As if all experts had as many tokens.
        assert {one.kind for _, one in grouped} == {"product"} and {one.sizes[0] for _, one in grouped} == {4}
        assert any(one.summed for _, one in grouped) is is_backward


def test_attention_by_documents_is_measured_without_the_mask_that_it_replaces() -> None:
    """With a mask transformers repeats the shared heads' keys and values, and both are kept."""
    sizes = ModelConfig(name="mistral", layers=2, width=64, heads=4, kv_heads=1, ffn=128, vocab=256, context=32)
    kept = {}
    for attention, window in (("auto", 32), ("varlen", 32), ("varlen", 8), ("auto", 64)):
        one = dataclasses.replace(sizes, attention=attention, overrides={"sliding_window": window})
        work = make_measure(build_meta(one), 32, "bf16")(Layout.parse("precision=bf16"), 8)
        assert work is not None and any(item.kind == "attention" for _, item in work.operators())
        kept[attention, window] = work.layers[0].kept.saved[0]
    # Keys and values of a head of 16, in 2 bytes: a window as long as the row has a mask in "auto".
    assert kept["varlen", 32] == kept["varlen", 8] == kept["auto", 64] == kept["auto", 32] - 2 * 16 * (8 * 32) * 2


def test_an_island_of_one_rank_computes_beside_the_others() -> None:
    """One rank of a node that computes alone is measured apart, and may have cores of its own."""
    made = calibration(4, 2)
    alone = {
        name: tuple((*row[:at], False, *row[at + 1 : -times], *(value / 4 for value in row[-times:])) for row in table)
        for name, at, times, table in (
            ("matmul", 2, 1, made.matmul), ("operations", 2, 1, made.operations), ("attention", 1, 2, made.attention)
        )
    }  # fmt: skip
    made = dataclasses.replace(made, **{name: (*getattr(made, name), *rows) for name, rows in alone.items()})
    cluster = dataclasses.replace(Cluster.detected(4, "cpu", cores=2), calibration=made)
    question = Question(job=JOB, cluster=cluster)

    def products(question: Question, layout: str) -> float:
        one = Layout.parse(layout)
        return correct_price(question, price_candidate(question, one), MEASURE).price.parts["matmul"]

    joined = products(question, "replicate=4")
    island = island_question(question, Layout.parse("islands=4"))
    assert island.cluster.devices == 1 and products(island, "replicate=1") == pytest.approx(joined)
    # The same rows on a machine where nobody else computes.
    assert products(dataclasses.replace(island, other_island_devices=0), "replicate=1") == pytest.approx(joined / 4)


def test_the_host_of_a_gpu_issues_its_step_while_the_device_is_at_work() -> None:
    def step_s(host_s: float, operator_s: float) -> float:
        made = calibration(1, 8, step=host_s, operator_forward=operator_s, operator_backward=operator_s)
        made = dataclasses.replace(made, machine={"kind": "cuda", "cores": 8})
        cluster = dataclasses.replace(Cluster.parse("1xh100"), calibration=made)
        question = Question(job=JOB, cluster=cluster)
        return correct_price(question, price_candidate(question, Layout()), MEASURE).price.parts["step"]

    # The device is at it for a tenth of a second: what the host needs beyond that is waited for.
    assert step_s(1e-3, 1e-6) == 0.0 < step_s(1.0, 1e-6) < 1.0
    # A host that is late with its operators hides nothing behind them.
    assert step_s(0.1, 1.0) == pytest.approx(0.1, rel=0.01)


@pytest.mark.parametrize("attention", ["heads", "gather"])
@pytest.mark.parametrize("precision", further(["float32", "bf16"], (1,)))
def test_cp_sends_tensors_of_the_type_of_compute(
    precision: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes that are priced are those of the list of collectives, which real ranks are held against."""
    layout = Layout.parse(f"cp=2,attention={attention},precision={precision}")
    job = dataclasses.replace(JOB, precision=precision)
    question = Question(job=job, cluster=Cluster.parse("2xh100"), base=Layout(precision=precision))
    work = make_measure(BUILT, 32, precision)(layout, 16)
    assert work is not None
    none = WorkSeconds(forward=NO_SECONDS, backward=NO_SECONDS)
    seconds = PipelineSeconds(first_end=none, layer=none, last_end=none)
    times = MeasuredTimes(question, layout, work, seconds, calibration(2, 2))
    priced_bytes: list[float] = []

    def record(kind: str, size: float, degree: int, rank_stride: int = 1) -> float:
        priced_bytes.append(size * (degree - 1) / degree)
        return 0.0

    monkeypatch.setattr(times, "_collective_s", record)
    times._cp_pass_s(JOB.shape.blocks[0])
    passes = 2 if attention == "heads" else 1
    exact = Collectives()
    LayerTraffic(job, layout, model_parts(BUILT, analyse_model(BUILT, layout)), 0).add_to(exact)
    assert passes * JOB.shape.layers * sum(priced_bytes) == pytest.approx(exact.sent()["cp"])


def test_a_calibration_of_the_wait_alone_keeps_the_step_of_the_host() -> None:
    plain, waits = priced("replicate=2"), priced("replicate=2", wait=1e-4)
    assert plain.parts["step"] > 0 and waits.parts["step"] == plain.parts["step"]
    measured = priced("replicate=2", wait=1e-4, step=0.5)
    assert measured.parts["step"] == 0.5


def test_work_is_measured_of_the_split_that_the_user_chose() -> None:
    """A feed-forward that stays whole under tp=2 is computed twice: once on each rank."""
    overridden = build_meta(dataclasses.replace(MODEL, sharding={"model.layers.*.mlp.down_proj": "whole"}))
    flops = [
        sum(count * item.flops for count, item in work.operators(False))
        for built in (BUILT, overridden)
        if (work := make_measure(built, 32, "float32")(Layout.parse("tp=2"), 8)) is not None
    ]
    # 3 matrices of 64 x 128 a layer, 2 FLOP a weight and token, of which each rank had half.
    assert flops[1] - flops[0] == 4 * (3 * 64 * 128) * 2 * (8 * 32) / 2


def test_an_update_in_host_memory_keeps_the_seconds_of_the_host() -> None:
    """The calibration timed the device's update, at 1e9 weights a second; the host's takes what its memory allows."""
    layout = Layout.parse("shard=2,zero=1,offload=optimizer,precision=float32")
    machine = {"kind": "cuda", "device": "h100"}
    made = dataclasses.replace(calibration(2, 0), machine=machine, host=())
    question = Question(job=JOB, cluster=dataclasses.replace(Cluster.parse("2xh100"), calibration=made))
    closed = price_candidate(question, layout)
    measured = correct_price(question, closed, MEASURE).price
    assert measured.parts["optimizer"] == pytest.approx(closed.price.parts["optimizer"])
    on_device = correct_price(question, price_candidate(question, dataclasses.replace(layout, offload="none")), MEASURE)
    assert measured.parts["matmul"] == on_device.price.parts["matmul"] != closed.price.parts["matmul"]
    assert on_device.price.parts["optimizer"] == pytest.approx(JOB.shape.parameters / 2 / ELEMENTS)


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_launches_on_a_gpu_take_what_its_host_was_measured_to_take(mode: str) -> None:
    """Tiny products are done before the next launch: the step is the host's, operator by operator."""
    made = dataclasses.replace(
        calibration(1, 0),
        machine={"kind": "cuda", "device": "h100"},
        host=(("operator_forward", 1e-2), ("operator_backward", 2e-2), ("step", 0.5)),
    )
    question = Question(job=JOB, cluster=dataclasses.replace(Cluster.parse("1xh100"), calibration=made))
    layout = Layout.parse(f"recompute={mode}")
    work = MEASURE(layout, JOB.rows)
    assert work is not None
    forward, backward = (sum(count for count, _ in work.operators(is_backward)) for is_backward in (False, True))
    repeated = sum(count * len(kind.forward) for count, kind in zip(work.counts, work.layers)) if mode != "none" else 0
    host_s = 1e-2 * (forward + repeated) + 2e-2 * backward
    price = correct_price(question, price_candidate(question, layout), MEASURE).price
    # The device is at the update meanwhile.
    assert price.parts["step"] == pytest.approx(0.5 - price.parts["optimizer"])
    assert price.stages[0].forward_s + price.stages[0].backward_s == pytest.approx(host_s)


def test_the_exchange_of_experts_is_part_of_a_pipeline() -> None:
    """A stage's makespan has the all-to-alls of its layers in it: they aren't paid out of the bubble."""
    layout = Layout.parse("pp=2,shard=2,ep=2,zero=1,microbatches=4,precision=bf16")
    made = calibration(4, 0)
    made = dataclasses.replace(
        made,
        machine={"kind": "cuda", "device": "h100"},
        matmul=in_bf16(made.matmul, 0),
        operations=in_bf16(made.operations, 1),
        attention=in_bf16(made.attention, 0),
    )
    cluster = dataclasses.replace(Cluster.parse("4x1xh100@ethernet-100m"), calibration=made)
    job = dataclasses.replace(JOB, shape=measure_shape(MIXTURE), precision="bf16")
    question, measure = Question(job=job, cluster=cluster), make_measure(MIXTURE, 32, "bf16")
    assert measure(layout, 2) is not None
    price = correct_price(question, price_candidate(question, layout), measure).price
    work = sum(price.parts[name] for name in ("matmul", "attention", "elementwise", "host"))
    after = sum(price.parts[name] for name in AFTER_PIPELINE)
    # Two equal stages: each idles for one micro-batch of the other.
    assert price.parts["ep"] > 0.1 * work
    assert price.step_s - after >= (price.parts["ep"] + work) * (1 + 1 / 4)


def in_bf16(rows: tuple[tuple[Any, ...], ...], column: int) -> tuple[tuple[Any, ...], ...]:
    """The same measurements for bf16, and those of float32."""
    return tuple((*row[:column], dtype, *row[column + 1 :]) for row in rows for dtype in ("float32", "bf16"))


@pytest.mark.parametrize(
    ("attention", "full", "selective"),
    # Backward of a ring sends twice, and selective recompute keeps what attention returned.
    [("heads", 1.5, 1.5), ("gather", 1.5, 1.5), ("ring", 4 / 3, 1.0)],
)
def test_recompute_sends_over_cp_again_what_a_forward_sends(attention: str, full: float, selective: float) -> None:
    plain, *recomputed = (
        priced(f"cp=2,attention={attention}{mode}", operator_forward=1e-6).parts["cp"]
        for mode in ("", ",recompute=full", ",recompute=selective")
    )
    assert recomputed == pytest.approx([full * plain, selective * plain])


def test_recompute_sends_over_tp_again_what_layers_send() -> None:
    modes = ("", ",recompute=full", ",recompute=selective", ",recompute=full:2+selective")
    # Selective recompute has kept the sums, and with them all that is sent but the gathers of sequence parallelism.
    for tokens, gathers in (("", 0.0), (",sequence=true", 0.5)):
        plain, full, selective, mixed = (priced(f"tp=2{tokens}{mode}").parts["tp"] for mode in modes)
        # But not what the vocabulary sends.
        assert 1.4 * plain < full < 1.5 * plain
        assert selective - plain == pytest.approx(gathers * (full - plain))
        assert mixed == pytest.approx((full + selective) / 2)


def test_a_layer_is_the_mean_of_all_kinds() -> None:
    """Recompute leaves out the last product of every layer: the mean layer's is the mean of theirs."""
    operators = [
        Operator(kind="product", name="mm", sizes=(1, 16, 16, size), flops=0.0, bytes=0) for size in (16, 4096)
    ]
    kinds = tuple(ModuleWork(forward=[operator] * count) for operator, count in zip(operators, (1, 4)))
    work = ModelWork(rows=1, layers=kinds, counts=(3, 1), rest=ModuleWork())
    layer = price_operators(work, calibration(1, 1), "float32", True).layer
    assert layer.operators == pytest.approx((3 * 1 + 1 * 4) / 4)
    seconds = [2 * 16 * 16 * size / RATE for size in (16, 4096)]
    assert layer.last_s == pytest.approx((3 * seconds[0] + seconds[1]) / 4)


def test_a_backward_that_can_t_come_in_halves_fills_no_bubble() -> None:
    """The runtime then runs the schedule unsplit, and so it is priced, on any machine."""
    layouts = {name: Layout.parse(f"pp=2,microbatches=8,schedule={name}") for name in ("1f1b", "zerobubble", "zbv")}
    for calibrated in (None, calibration(2, 2)):
        cluster = dataclasses.replace(Cluster.detected(2, "cpu", cores=2), calibration=calibrated)
        steps: dict[tuple[str, bool], float] = {}
        for name, splits in product(layouts, (True, False)):
            question = Question(job=dataclasses.replace(JOB, splits_backward=splits), cluster=cluster)
            closed = price_candidate(question, layouts[name])
            steps[name, splits] = correct_price(question, closed, MEASURE).price.step_s
            assert not splits or name in question.space.schedules
            assert splits or (name in question.space.schedules) is (name == "1f1b")
        assert steps["1f1b", False] == steps["1f1b", True]
        assert steps["zerobubble", True] < steps["zerobubble", False] == pytest.approx(steps["1f1b", False])
        assert steps["zbv", True] <= steps["zbv", False]


def test_a_run_s_plan_says_that_its_backward_is_whole() -> None:
    layouts = [Layout.parse(f"pp=2,microbatches=8,schedule={name}") for name in ("1f1b", "zerobubble")]
    question = Question(
        job=JOB, cluster=dataclasses.replace(Cluster.detected(2, "cpu", cores=2), calibration=calibration(2, 2))
    )
    halves = model_parts(BUILT, analyse_model(BUILT, layouts[1]))
    assert halves.layer_graph is not None and not halves.layer_graph.whole_backward
    graph = dataclasses.replace(halves.layer_graph, whole_backward="a tensor is read by two stages")
    whole = dataclasses.replace(halves, layer_graph=graph)
    plain, split = (named_plan(question, layout, halves, MEASURE) for layout in layouts)
    unsplit = named_plan(question, layouts[1], whole, MEASURE)
    assert unsplit.reason == (
        "named by the user; schedule=zerobubble runs each backward whole: a tensor is read by two stages"
    )
    assert split.prediction.step_s < unsplit.prediction.step_s == pytest.approx(plain.prediction.step_s)
    assert split.reason == plain.reason == "named by the user"


def test_every_message_of_gradients_costs_its_latency() -> None:
    """The messages that the runtime sends, two at a time over gloo, held against the reducer's own list."""
    work = MEASURE(Layout(), 1)
    assert work is not None
    trained = [weight.numel() for weight in BUILT.module.parameters()]
    assert sorted(work.gradients) == sorted(trained)
    messages = len(list(assign_buckets([4 * count for count in work.gradients])))
    assert messages > 2
    sums = [("all_reduce", 2, 1, 1, size, 1.0) for size in (1000, 10_000_000)]
    calibrated = dataclasses.replace(calibration(2, 2), collectives=tuple(sums))
    question = Question(job=JOB, cluster=Cluster.detected(2, "cpu", cores=2).calibrated(calibrated))
    closed = price_candidate(question, Layout.parse("replicate=2"))
    rest_s = closed.price.parts["reduce"]
    price = correct_price(question, closed, MEASURE).price
    # A message takes a second whatever its size: the closed form has one, the runtime a line of them two wide.
    assert rest_s == pytest.approx(1.0, rel=0.2)
    assert price.parts["reduce"] == pytest.approx(messages / 2, rel=0.2)
    # Messages that cost their bytes alone cost the same in any number.
    sums = [("all_reduce", 2, 1, 1, size, size * 1e-6) for size in (1000, 10_000_000)]
    calibrated = dataclasses.replace(calibrated, collectives=tuple(sums))
    question = Question(job=JOB, cluster=Cluster.detected(2, "cpu", cores=2).calibrated(calibrated))
    closed = price_candidate(question, Layout.parse("replicate=2"))
    price = correct_price(question, closed, MEASURE).price
    assert price.parts["reduce"] == pytest.approx(closed.price.parts["reduce"], rel=0.05)


def test_a_rank_of_tp_sums_its_part_of_a_split_weight() -> None:
    whole, part = MEASURE(Layout(), 1), MEASURE(Layout.parse("tp=2"), 1)
    assert whole is not None and part is not None
    # Norms stay whole; the llama's other weights are split in two.
    norms = (2 * 4 + 1) * MODEL.width
    assert sum(part.gradients) == (sum(whole.gradients) - norms) // 2 + norms


def test_what_a_rank_works_for_its_traffic_is_no_wait(tmp_path: Path) -> None:
    """Over a wire that hides, a core still carries each byte: work by hand, and a run that takes it teaches nothing."""
    core_byte_s, sent_bytes = 2e-9, 4.0 * JOB.shape.parameters
    wire = (1 << 10, 1 << 30)
    made = dataclasses.replace(
        calibration(2, 1, core_byte=core_byte_s),
        nodes=2,
        collectives=tuple(("all_reduce", 2, 2, 1, size, size / 1e15) for size in wire),
    )
    cluster = Cluster.detected(1, "cpu", nodes=2).calibrated(made)
    question, layout = Question(job=JOB, cluster=cluster), Layout.parse("replicate=2,precision=float32")
    plan = named_plan(question, layout, model_parts(BUILT, analyse_model(BUILT, layout)), MEASURE)
    parts = correct_price(question, price_candidate(question, layout), MEASURE).price.parts
    assert parts["traffic_work"] == pytest.approx(core_byte_s * sent_bytes, rel=0.01)
    assert parts["reduce"] == pytest.approx(0.0, abs=1e-9) and plan.prediction.waits_s == pytest.approx(0.0, abs=1e-9)
    # The run takes what was priced, and stands still for nothing.
    step_s = plan.prediction.step_s
    row = {"layout": "replicate=2", "flops": JOB.step_flops, "priced_s": step_s, "measured_s": step_s, "paced": True}
    record(tmp_path / "runs", "here", row | {"waits_s": 0.0, "priced_waits_s": plan.prediction.waits_s})
    assert plan.prediction.flops == JOB.step_flops
    history = learn(tmp_path / "runs", "here", JOB.step_flops, "float32")
    assert history.runs == 1 and history.of(Layout.parse("islands=2")).compute == pytest.approx(1.0)
    # ZeRO-3 sends half as much again, and copies what it gathers and scatters.
    sharded = Layout.parse("shard=2,zero=3,precision=float32")
    sharded_parts = correct_price(question, price_candidate(question, sharded), MEASURE).price.parts
    assert sharded_parts["traffic_work"] > 1.45 * core_byte_s * sent_bytes
