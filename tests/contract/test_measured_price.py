"""A layout's price on a measured machine: operators at their rates, the host beside them, ranks that share cores."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest

from meshwright.cluster.calibration import FORMS, Calibration
from meshwright.cluster.cluster import Cluster
from meshwright.jobs.model_reading import make_measure, model_parts
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.measure import measure_shape
from meshwright.planner.choose import Question, price_candidate
from meshwright.planner.collectives import Collectives
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.cost.operators import PipelineSeconds, WorkSeconds
from meshwright.planner.cost.prices import Price
from meshwright.planner.layer_traffic import LayerTraffic
from meshwright.planner.measured_price import correct_price
from meshwright.planner.rates import MeasuredTimes
from meshwright.spec.layout import Layout
from meshwright.train.model_analysis import analyse_model

MODEL = ModelConfig(name="llama", layers=4, width=64, heads=4, ffn=128, vocab=256, context=32)
RATE, ELEMENTS = 1e10, 1e9
SIZES = (16, 4096)
BUILT = build_meta(MODEL)
JOB = PricedJob(shape=measure_shape(BUILT), sequence=32, rows=16, precision="float32")
MEASURE = make_measure(BUILT, 32, "float32")


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


@pytest.mark.parametrize("attention", ["heads", "gather"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_cp_sends_tensors_of_the_type_of_compute(
    precision: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes that are priced are those of the list of collectives, which real ranks are held against."""
    layout = Layout.parse(f"cp=2,attention={attention},precision={precision}")
    job = dataclasses.replace(JOB, precision=precision)
    question = Question(job=job, cluster=Cluster.parse("2xh100"), base=Layout(precision=precision))
    work = make_measure(BUILT, 32, precision)(layout, 16)
    assert work is not None
    none = WorkSeconds(forward={}, backward={})
    seconds = PipelineSeconds(first_end=none, layer=none, last_end=none)
    times = MeasuredTimes(question, price_candidate(question, layout), work, seconds, calibration(2, 2))
    priced_bytes: list[float] = []

    def record(kind: str, size: float, degree: int, rank_stride: int = 1) -> float:
        priced_bytes.append(size * (degree - 1) / degree)
        return 0.0

    monkeypatch.setattr(times, "_collective_s", record)
    times._cp_s()
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
