"""Steps by the catalogue alone: bytes of a model that was counted by hand, and many kinds of model on a real H100."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.fit_device import Timed, errors, read_rows
from benchmarks.published.framework_profiles import MEGATRON_2022
from meshwright.cluster.cluster import Cluster
from meshwright.jobs.model_reading import make_measure
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.measure import measure_shape
from meshwright.planner.candidate import Candidate
from meshwright.planner.cost.framework_profile import FrameworkProfile
from meshwright.planner.cost.groups import Machine
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.cost.meshwright_profile import EAGER_MOVES, MESHWRIGHT
from meshwright.planner.measured_price import measure_activations, price_layout
from meshwright.planner.question import Question
from meshwright.spec.layout import Layout
from tests.plain_model import Block, PlainModel

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CLUSTER = Cluster.parse("1xh100")
WIDTH, LAYERS, TOKENS = 1024, 3, 4096


class ScaledBlock(Block):
    """A block that scales its input so many times, each time by an operator of its own."""

    def __init__(self, times: int) -> None:
        super().__init__(WIDTH)
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = x * 1.5
        return super().forward(x)


class ScaledModel(PlainModel):
    def __init__(self, times: int) -> None:
        super().__init__(512, WIDTH, 0)
        self.blocks = nn.ModuleList([ScaledBlock(times) for _ in range(LAYERS)])


def build_10() -> nn.Module:
    return ScaledModel(10)


def build_30() -> nn.Module:
    return ScaledModel(30)


def planned(builder: str, layout: str) -> Candidate:
    built = build_meta(ModelConfig(name=f"tests.contract.test_catalogue_steps:{builder}"))
    job = PricedJob(shape=measure_shape(built), sequence=TOKENS, rows=1)
    asked = Layout.parse(layout)
    question = Question(job=job, cluster=CLUSTER, base=asked)
    measure = make_measure(built, TOKENS, "bf16")
    return price_layout(measure_activations(question, measure), asked, measure)


def test_each_operator_of_a_users_own_layer_moves_its_bytes() -> None:
    seconds = [planned(builder, "precision=bf16").price.parts["elementwise"] for builder in ("build_10", "build_30")]
    # Twenty products by a number more: forward reads and writes x, backward its gradient, two bytes each.
    moved_bytes = 20 * LAYERS * 2 * 2 * TOKENS * WIDTH * 2
    device = Machine.of(CLUSTER).device
    by_hand_s = EAGER_MOVES * moved_bytes / (device.bandwidth_bytes_per_s * device.memory_share)
    assert seconds[1] - seconds[0] == pytest.approx(by_hand_s, rel=1e-6)


def test_a_compiled_layer_reads_and_writes_once_whatever_lies_between() -> None:
    seconds = [
        planned(builder, "precision=bf16,compile=true").price.parts["elementwise"]
        for builder in ("build_10", "build_30")
    ]
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-9)


@pytest.mark.parametrize(("cluster", "engine"), [("1xcpu", None), ("1xh100", MEGATRON_2022)])
def test_cores_and_frameworks_that_fuse_by_hand_keep_the_closed_form(
    cluster: str, engine: FrameworkProfile | None
) -> None:
    built = build_meta(ModelConfig(name="tests.contract.test_catalogue_steps:build_10"))
    job = PricedJob(shape=measure_shape(built), sequence=TOKENS, rows=1)
    question = Question(job=job, cluster=Cluster.parse(cluster), engine=engine)
    assert measure_activations(question, make_measure(built, TOKENS, "bf16")).job.moved is None


def test_small_heads_take_longer_a_flop_as_a_calibration_found() -> None:
    table = json.loads((BENCHMARKS / "h100_calibration.json").read_text(encoding="utf-8"))["attention"]
    seconds = {size: (forward, backward) for dtype, _, heads, queries, size, forward, backward in table
               if (dtype, heads, queries) == ("bf16", 128, 8192)}  # fmt: skip
    device, runtime = Machine.of(CLUSTER).device, MESHWRIGHT.runtime
    planned_ratio = 0.5 * runtime.attention_share(device, 128) / runtime.attention_share(device, 64)
    for measured_64, measured_128 in zip(seconds[64], seconds[128]):
        assert planned_ratio == pytest.approx(measured_64 / measured_128, rel=0.04)
    assert runtime.attention_share(device, 256) == runtime.attention_share(device, 128), "no kernel is faster there"


BIAS = 0.10
"""How much slower these rows were planned, all of them: products at the rate that clusters hold for hours."""
QUICK = ("qwen3 4 4096 precision=bf16", "mixtral 4 4096 precision=bf16,compile=true")
LEFT_OUT = {
    "offload": "moved by the runtime of that day, which today's isn't",
    "gemma3 ": "read a mask of its window, which no run does any more",
}


def rows() -> list[Timed]:
    """Rows of the calls whose runtime is today's."""
    found = [row for call in (10, 11, 12) for row in read_rows([BENCHMARKS / "h100.jsonl"], call)]
    return [row for row in found if not any(word in row.row["case"] for word in LEFT_OUT)]


@pytest.mark.parametrize("case", QUICK)
def test_models_that_no_constant_has_seen_are_planned_alike(case: str) -> None:
    (row,) = (row for row in rows() if row.row["case"] == case and row.row["call"] == 12)
    assert abs(float(errors([row], CLUSTER, MESHWRIGHT, "time")[0]) - np.log1p(BIAS)) < 0.08


@pytest.mark.long
def test_all_rows_lie_around_one_bias() -> None:
    found = errors(rows(), CLUSTER, MESHWRIGHT, "time")
    assert abs(np.median(found) - np.log1p(BIAS)) < 0.02
    assert found.std() < 0.08 and np.quantile(np.abs(np.expm1(found)), 0.9) < 0.17
