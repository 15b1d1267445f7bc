"""What the options of an engine's runtime do to a step's time."""

import numpy as np
import pytest
import torch

from benchmarks.published.other_profile import OtherProfile, OtherRuntime
from meshwright.cluster.cluster import Cluster
from meshwright.parallel import recompute
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.cost.meshwright_profile import MESHWRIGHT
from meshwright.planner.cost.price import price
from meshwright.spec.layout import Layout

CLUSTER = Cluster.parse("8xa100-80")


def step(
    runtime: OtherRuntime, recompute: str = "none", tp: int = 1, vocab: int = 51200, heads: int = 16, rows: int = 16
):
    shape = shape_from_sizes(TableSizes(name="gpt", layers=12, width=2048, heads=heads, vocab=vocab, gated=False))
    layout = Layout(degrees={"tp": tp, "replicate": 8 // tp}, microbatches=rows * tp // 8, recompute=recompute)
    return price(
        PricedJob(shape=shape, sequence=1024, rows=rows),
        layout,
        CLUSTER,
        OtherProfile(name="test", runtime=runtime),
    )


def test_recompute_that_stops_early_redoes_all_but_the_last_product():
    whole, stopped, none = (
        step(OtherRuntime(recompute_stops=stops), recompute).parts for stops, recompute in
        ((False, "full"), (True, "full"), (True, "none"))
    )  # fmt: skip
    assert none["recompute"] == 0
    saved = whole["recompute"] - stopped["recompute"]
    # The last product is a third of a plain block's: 4 of 12 D^2.
    assert 0.2 * whole["matmul"] / 3 < saved < 0.45 * whole["matmul"] / 3


def test_a_host_that_waits_for_each_layer_makes_nothing_up():
    ahead, waiting = (
        step(OtherRuntime(host_layer_s=2e-3, host_backward=0.1, host_ahead=value)).step_s for value in (True, False)
    )
    assert waiting > ahead
    device = step(OtherRuntime()).step_s
    idle = step(OtherRuntime(host_ahead=False)).step_s
    assert idle == pytest.approx(device)


def test_a_batch_that_the_fused_softmax_refuses_costs_the_host_more():
    runtime = OtherRuntime(host_layer_s=5e-3, host_softmax_s=1e-3)
    assert step(runtime, tp=4).step_s == pytest.approx(step(OtherRuntime(host_layer_s=5e-3), tp=4).step_s)
    assert step(runtime, tp=8).step_s > step(OtherRuntime(host_layer_s=5e-3), tp=8).step_s


def test_hosts_of_many_ranks_of_tp_take_longer():
    plain, grown = (step(OtherRuntime(host_layer_s=5e-3, host_tp_power=power), tp=4).step_s for power in (0.0, 0.1))
    assert plain < grown < 1.2 * plain


def test_an_odd_number_of_words_makes_the_head_slower():
    odd, even = (step(OtherRuntime(), vocab=vocab).parts["matmul"] for vocab in (50257, 50258))
    assert odd > 1.1 * even


def test_ranks_of_tp_that_meet_wait_for_host_or_device():
    def gap(host, tp, rows=16):
        plain, met = (step(OtherRuntime(host_layer_s=host, tp_meeting=p), tp=tp, rows=rows).step_s for p in (0.0, 2.5))
        return met / plain - 1

    assert gap(2e-3, tp=1) == 0
    level = gap(1e-3, tp=2)
    assert 0.05 < level < 2 ** (1 / 2.5) - 1
    # Where one of them is far ahead there is little to wait for.
    assert 0 <= gap(1e-5, tp=2) < 0.01 * level
    assert 0 < gap(1e-1, tp=2) < 0.01 * level
    powers = [step(OtherRuntime(host_layer_s=1e-3, tp_meeting=p), tp=2).step_s for p in (2.0, 4.0, 8.0)]
    assert powers == sorted(powers, reverse=True)


def test_the_runtime_recomputes_as_its_engine_says():
    layer = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    passed: list[str] = []
    layer[0].register_forward_hook(lambda *_: passed.append("first"))
    layer[2].register_forward_hook(lambda *_: passed.append("last"))
    recompute.apply([layer], "full", None)
    out = layer(torch.randn(2, 4, requires_grad=True))
    passed.clear()
    out.sum().backward()
    assert passed == ["first"]
    assert MESHWRIGHT.runtime.repeated_matmul_s(np.array(3.0), np.array(1.0)) == 2.0
