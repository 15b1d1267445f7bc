"""What rounding and the wire's own work cost on the core that computes, in the plan of calibrated machines."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from meshwright.cluster.calibration import Calibration
from meshwright.cluster.cluster import Cluster
from meshwright.planner.candidate_prices import price_candidate
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.cost.groups import Machine
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.cost.rounding import CORE_BYTE, RoundingTimes
from meshwright.planner.islands import price_join
from meshwright.planner.measured_price import price_layout
from meshwright.planner.question import Question, engine_on
from meshwright.planner.rounds import Rounds
from meshwright.spec.layout import Layout

SHAPE = shape_from_sizes(TableSizes(name="gpt2", layers=6, width=256, heads=4, vocab=2048))
JOB = PricedJob(shape=SHAPE, sequence=128, rows=16, precision="float32")
GBIT_BYTES_PER_S = 1.2e8
NS = {"bf16": (11.4, 4.6, 0.56, 2.2), "int8": (11.3, 3.4, 0.83, 3.0)}
"""Nanoseconds of a value on a core of a Xeon as `meshwright calibrate` measured them: round, nearest, decode, book."""
CORE_BYTE_S = 1.46e-9
"""Its processor seconds for a byte that it sends by gloo over a network, of the same calibration."""


def machines(
    bytes_per_s: float = GBIT_BYTES_PER_S, core_byte_s: float = CORE_BYTE_S, overlap: float = 0.0, cores: float = 1
) -> Cluster:
    """Returns two machines of a core each, of 45 GFLOP/s, with a wire between them."""
    count = 1 << 19
    operations = [
        (f"{operation}_{name}", "float32", True, count, 1e-9 * value_ns * count)
        for name, values in NS.items()
        for operation, value_ns in zip(("round", "nearest", "decode", "book"), values)
    ]
    operations.append(("copy", "float32", True, count, 8.0 * count / 1e10))
    sizes = (1 << 10, 1 << 18, 1 << 20, 1 << 25)
    calibration = Calibration(
        machine={"kind": "cpu", "device": "core", "cores": cores},
        ranks=2,
        nodes=2,
        matmul=(("float32", "nt", True, 512, 512, 512, 2 * 512**3 / 45e9),),
        operations=tuple(operations),
        collectives=tuple(("all_reduce", 2, 2, 1, size, 2e-4 + size / bytes_per_s) for size in sizes),
        overlap=overlap,
        host=((CORE_BYTE, core_byte_s),) if core_byte_s else (),
    )
    return Cluster.detected(1, "cpu", nodes=2).calibrated(calibration)


def parts(text: str, cluster: Cluster) -> dict[str, float]:
    layout = Layout.parse(f"{text},precision=float32")
    return dict(price_layout(Question(job=JOB, cluster=cluster), layout, None).price.parts)


def step_s(text: str, cluster: Cluster) -> float:
    return sum(parts(text, cluster).values())


def test_ways_come_out_in_the_order_in_which_they_were_measured() -> None:
    """On two such machines: exact, int8, bf16 at 1 Gbit/s, and int8, bf16, exact at 100 Mbit/s (docs/slow-networks)."""
    ways = ["replicate=2", "replicate=2,compress=int8", "replicate=2,compress=bf16"]
    fast, slow = machines(), machines(GBIT_BYTES_PER_S / 10)
    assert sorted(ways, key=lambda way: step_s(way, fast)) == ways
    assert sorted(ways, key=lambda way: step_s(way, slow)) == [ways[1], ways[2], ways[0]]


def test_a_core_that_rounds_computes_as_much_later() -> None:
    """With a wire that takes no time, what is left of a rounded sum is the core's: by hand from the nanoseconds."""
    cluster, parameters = machines(1e15, core_byte_s=1e-18), SHAPE.parameters
    for name, (round_ns, _, decode_ns, book_ns) in NS.items():
        # Two copies: each rounds all and half of the sum, decodes two halves and then the whole, books half.
        expected_s = 1e-9 * parameters * (1.5 * round_ns + 2.0 * decode_ns + 0.5 * book_ns)
        added_s = parts(f"replicate=2,compress={name}", cluster)["reduce"] - parts("replicate=2", cluster)["reduce"]
        assert added_s == pytest.approx(expected_s, rel=0.01)
    # Of ZeRO-3's rounded weights a rank rounds its half and decodes all, for forward; for backward of the layers alone.
    ends = 2 * 2048 * 256
    expected_s = 1e-9 * (2 * parameters - ends) * (0.5 * NS["int8"][1] + NS["int8"][2])
    exact, rounded = (parts(f"shard=2,zero=3{more}", cluster)["gather"] for more in ("", ",compress_weights=int8"))
    assert rounded - exact == pytest.approx(expected_s, rel=0.02)


def test_a_pipeline_rounds_its_sums_too() -> None:
    """The sum of a stage's gradients over two copies, by hand as above, on the stage that computes longest."""
    cluster = dataclasses.replace(Cluster.parse("4x1xcpu@ethernet-1g"), calibration=machines().calibration)
    question = Question(job=JOB, cluster=cluster)
    ways = [f"pp=2,replicate=2,microbatches=2,precision=float32{more}" for more in ("", ",compress=int8")]
    exact, rounded = (price_candidate(question, Layout.parse(way)).price for way in ways)
    round_ns, _, decode_ns, book_ns = NS["int8"]
    value_s = 1e-9 * (1.5 * round_ns + 2.0 * decode_ns + 0.5 * book_ns)
    # Each stage has half the layers, and the embedding or a head of the same size.
    elements = SHAPE.parameters / 2
    # Exact sums send 4 bytes a value, rounded ones 260 in 256 values, at the wire's rate of the cluster's text.
    wire_s = exact.parts["reduce"] * 260.0 / 256.0 / 4.0
    assert rounded.parts["reduce"] - wire_s == pytest.approx(value_s * elements, rel=0.02)


def test_a_send_between_stages_takes_both_cores() -> None:
    """Of each micro-batch either stage sends once and receives once: as many bytes of a sum take a core as long."""
    core_byte_s, micro_batch_bytes = 4e-9, 4.0 * 128 * 256 * 16 / 4
    without, with_core = (
        parts("pp=2,microbatches=4,schedule=1f1b", machines(core_byte_s=core)) for core in (1e-18, core_byte_s)
    )
    # The busy stage works on four micro-batches. At both ends of the step a send as a whole is as long as before, and
    # its half there is the other stage's work: four less a half at either end.
    longer_s = sum(with_core.values()) - sum(without.values())
    assert longer_s == pytest.approx(3 * core_byte_s * micro_batch_bytes, rel=0.02)
    assert with_core["send"] > 4 * core_byte_s * micro_batch_bytes


def test_a_wire_that_hides_still_takes_its_core() -> None:
    cluster, sent_bytes = machines(1e15), 4.0 * SHAPE.parameters
    assert parts("replicate=2", cluster)["reduce"] == pytest.approx(CORE_BYTE_S * sent_bytes, rel=0.01)
    # A wire that is longer than all compute carries on while its core waits: then its core's seconds add nothing.
    slow = GBIT_BYTES_PER_S / 100
    without, with_core = (parts("replicate=2", machines(slow, core))["reduce"] for core in (1e-18, CORE_BYTE_S))
    assert with_core == pytest.approx(without, rel=1e-6)


def test_an_older_calibration_hides_what_it_measured_as_hidden() -> None:
    old, new = (engine_on(machines(core_byte_s=core, overlap=0.25)).runtime for core in (0.0, CORE_BYTE_S))
    assert (old.dp_overlap, old.reduce_floor) == (0.25, 0.75) and new.reduce_floor == 0.0 and new.dp_overlap > 0.5
    assert Machine.of(machines(core_byte_s=0.0)).core_byte_s == 0.0


def test_a_quota_of_less_than_a_core_hides_nothing() -> None:
    whole, part = (engine_on(machines(overlap=0.5, cores=cores)).runtime for cores in (1, 0.45))
    assert (part.dp_overlap, part.gather_overlap, part.reduce_floor) == (0.0, 0.0, 1.0) and whole.dp_overlap > 0.5
    # All of the sum is waited for, of each weight's 4 bytes one way and the other.
    assert parts("replicate=2", machines(cores=0.45))["reduce"] > 0.9 * 4.0 * JOB.shape.parameters / GBIT_BYTES_PER_S


def test_formats_that_were_not_measured_are_priced_by_the_bytes_that_move() -> None:
    cluster = Cluster.parse("2xa100-40")
    times = RoundingTimes.of(cluster.device, None)
    assert times.round_s[0] == 0.0 and times.round_s[3] > times.nearest_s[3] > times.decode_s[3] > 0.0
    some = RoundingTimes.of(machines().device, machines().calibration)
    assert some.round_s[3] == pytest.approx(11.3e-9) and some.round_s[2] > 0.0, "fp16 wasn't measured"


def test_joins_that_round_take_their_core() -> None:
    question = Question(job=JOB, cluster=machines())
    layout = Layout.parse("islands=2,precision=float32")
    price = price_layout(question, layout, None).price
    for rounds in (Rounds(compress="int8"), Rounds(compress="int8", delay=20)):
        question = dataclasses.replace(question, rounds=rounds)
        join = price_join(question, layout, dataclasses.replace(price, step_s=0.5))
        _, nearest_ns, decode_ns, _ = NS["int8"]
        assert join.rounding_s == pytest.approx(1e-9 * SHAPE.parameters * (nearest_ns + 2 * decode_ns))
        assert join.step_s == pytest.approx((join.exposed_s + join.work_s + join.rounding_s + join.update_s) / 30)
    assert join.exposed_s == 0.0 < join.rounding_s, "a delay hides the wire, and nothing that the core does"
    assert join.work_s == pytest.approx(CORE_BYTE_S * SHAPE.parameters * 260 / 256)
    assert price_join(dataclasses.replace(question, rounds=Rounds()), layout, price).rounding_s == 0.0


def test_rounded_sums_are_priced_by_format_for_many_layouts_at_once() -> None:
    times = RoundingTimes.of(machines().device, machines().calibration)
    codes, copies = np.array([0.0, 3.0]), np.array([4.0, 4.0])
    seconds = times.sum_s(codes, np.full((2, 1), 1e6), copies)
    assert seconds[0, 0] == 0.0
    assert seconds[1, 0] == pytest.approx(1e-3 * (1.25 * 11.3 + 2 * 0.83 + 0.25 * 3.0))
