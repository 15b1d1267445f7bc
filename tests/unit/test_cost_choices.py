"""What compiled layers, dropout and float64 change of a price."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.published.framework_profiles import NANOTRON
from meshwright.cluster.cluster import Cluster
from meshwright.errors import PlanError
from meshwright.models.operators import DRAWN_BYTES
from meshwright.parallel import build, random_ops
from meshwright.planner.candidate_prices import price_candidate
from meshwright.planner.choose import choose
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.cost.meshwright_profile import DRAW_BYTES, MESHWRIGHT, MOST_SCORES, SELECTIVE_HOST
from meshwright.planner.cost.price import price
from meshwright.planner.cost.prices import Price
from meshwright.planner.question import Question
from meshwright.spec.layout import Layout

LLAMA = TableSizes(name="llama", layers=16, width=2048, heads=16, kv_heads=4, vocab=32000, ffn=8192)
GPT = TableSizes(name="gpt", layers=12, width=2048, heads=16, vocab=50304, gated=False, positions=1024)
CLUSTER = Cluster.parse("8xh100")


def priced(text: str, sizes: TableSizes = LLAMA, cluster: Cluster = CLUSTER, rows: int = 64) -> Price:
    layout = Layout.parse(text)
    job = PricedJob(shape=shape_from_sizes(sizes), sequence=1024, rows=rows, precision=layout.precision)
    return price(job, layout, cluster)


# -------------------------------------------------------- compiled layers


@pytest.mark.parametrize("text", ["replicate=8", "pp=2,replicate=4,microbatches=4", "tp=2,shard=4,zero=3"])
def test_compiled_layers_save_passes_launches_and_activations(text: str) -> None:
    eager, made = priced(f"{text},precision=bf16"), priced(f"{text},precision=bf16,compile=true")
    assert made.step_s < eager.step_s
    assert made.parts["elementwise"] < 0.8 * eager.parts["elementwise"]
    for name in ("matmul", "attention", "reduce", "optimizer", "tp"):
        assert made.parts[name] == pytest.approx(eager.parts[name])
    for name in ("parameters", "gradients", "optimizer", "logits"):
        assert made.most[name] == eager.most[name]
    assert 0.5 * eager.most["activations"] < made.most["activations"] < 0.9 * eager.most["activations"]
    assert made.peak < eager.peak


def test_launches_are_the_floor_of_small_layers() -> None:
    small = dataclasses.replace(LLAMA, width=512, ffn=2048)
    eager, made = (priced(f"replicate=8,precision=bf16{more}", small, rows=8) for more in ("", ",compile=true"))
    assert 0 < made.parts["host"] < eager.parts["host"]


def test_an_engine_that_was_run_compiled_stays_as_it_is() -> None:
    assert NANOTRON.for_layout(Layout(compile=True)) == NANOTRON
    assert MESHWRIGHT.for_layout(Layout()) == MESHWRIGHT


def test_a_search_for_compiled_layers_finds_no_split_backward() -> None:
    job = PricedJob(shape=shape_from_sizes(LLAMA), sequence=1024, rows=64)
    asked = Question(job=job, cluster=CLUSTER, base=Layout(precision="bf16", compile=True), limits={"fixed": {"pp": 4}})
    best = choose(asked).best
    assert all(one.layout.compile and one.layout.schedule not in ("zbv", "zerobubble", "dualpipev") for one in best)
    eager = choose(dataclasses.replace(asked, base=Layout(precision="bf16")))
    assert not any(one.layout.compile for one in eager.best)


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_a_search_for_compiled_layers_finds_selective_recompute_of_layers_that_communicate(axis: str) -> None:
    # So little room that eager layers recompute selectively.
    job = PricedJob(shape=shape_from_sizes(LLAMA), sequence=4096, rows=64)
    limits = {"fixed": {axis: 4, "microbatches": 1}}
    asked = Question(job=job, cluster=CLUSTER, base=Layout(precision="bf16"), limits=limits, usable=0.5)
    for base in (asked.base, Layout(precision="bf16", compile=True)):
        kept = choose(dataclasses.replace(asked, base=base)).kept
        assert any("selective" in layout.recompute.modes(LLAMA.layers) for _, layout in kept)
    build.check(Layout.parse(f"{axis}=2,compile=true,recompute=selective:1"), "cuda", 2)


# -------------------------------------------------------- dropout


def test_draws_are_counted_as_the_runtime_makes_them() -> None:
    assert DRAWN_BYTES == DRAW_BYTES and random_ops.DEAR == MOST_SCORES


def test_dropout_draws_for_each_element() -> None:
    plain = dataclasses.replace(GPT, dropout=False)
    without, with_ = priced("replicate=8,precision=bf16", plain), priced("replicate=8,precision=bf16", GPT_DROPPED)
    tokens = 64 / 8 * 1024
    drawn = tokens * GPT.width * (2 * GPT.layers + 1)  # twice a layer, once after the embedding
    moved = 2 * drawn * (DRAW_BYTES + 4)  # in backward the same once more
    rate = CLUSTER.device.bandwidth_bytes_per_s * CLUSTER.device.memory_share
    assert with_.parts["elementwise"] - without.parts["elementwise"] == pytest.approx(moved / rate)
    # Attention whose weights are dropped is made of products and passes over scores, and keeps of each some bytes.
    assert with_.parts["attention"] > 3 * without.parts["attention"]
    assert with_.most["activations"] > without.most["activations"] + 0.9 * drawn
    assert with_.parts["host"] >= without.parts["host"]


def test_too_many_weights_of_attention_are_made_again() -> None:
    few, many = (priced("replicate=8,precision=bf16", GPT_DROPPED, rows=rows) for rows in (8, 64))
    assert 16 * 1024 * 1024 < MOST_SCORES < 8 * 16 * 1024 * 1024
    assert many.most["activations"] < 8 * few.most["activations"]
    assert many.parts["attention"] > 8 * few.parts["attention"]


def test_kernels_of_others_draw_as_they_drop() -> None:
    layout = Layout.parse("replicate=8,precision=bf16")
    job = PricedJob(shape=shape_from_sizes(GPT_DROPPED), sequence=1024, rows=64)
    plain = dataclasses.replace(job, shape=shape_from_sizes(GPT))
    assert price(job, layout, CLUSTER, NANOTRON).parts == price(plain, layout, CLUSTER, NANOTRON).parts


GPT_DROPPED = dataclasses.replace(GPT, dropout=True)


# -------------------------------------------------------- float64


def test_float64_is_twice_the_bytes_at_its_own_rate() -> None:
    single, double = priced("shard=8,zero=1"), priced("shard=8,zero=1,precision=float64")
    for part in ("parameters", "gradients", "optimizer"):
        assert double.most[part] == pytest.approx(2 * single.most[part])
    # No kernel of the loss has float64: seven passes over wide exponentials beside the logits' three.
    rate = CLUSTER.device.bandwidth_bytes_per_s * CLUSTER.device.memory_share
    unfused = {"elementwise": 64 / 8 * 1024 * LLAMA.vocab * 7 * 8 / rate, "optimizer": 0.0}
    for part, more in unfused.items():
        assert double.parts[part] == pytest.approx(2 * single.parts[part] + more, rel=0.01)
    # And scores: no fused kernel takes float64. Of float32 none takes fewer key heads.
    whole = dataclasses.replace(LLAMA, kv_heads=LLAMA.heads)
    grouped, single, double = (
        priced(f"shard=8,zero=1{more}", sizes).most["activations"]
        for sizes, more in ((LLAMA, ""), (whole, ""), (whole, ",precision=float64"))
    )
    assert double > 2 * single and grouped > 1.2 * single
    full, cut = (
        priced("replicate=8,precision=float64", cluster=Cluster.parse(name)) for name in ("8xa100-80", "8xh800")
    )
    assert cut.parts["matmul"] > 10 * full.parts["matmul"]  # 1 TFLOP/s against 19.5


def test_float64_is_half_the_speed_on_a_core() -> None:
    core = Cluster.parse("4xcpu")
    single, double = (priced(f"replicate=4{more}", cluster=core).parts for more in ("", ",precision=float64"))
    assert double["matmul"] == pytest.approx(2 * single["matmul"], rel=0.05)


def test_a_device_without_float64_refuses_it() -> None:
    job = PricedJob(shape=shape_from_sizes(LLAMA), sequence=1024, rows=64)
    asked = Question(job=job, cluster=Cluster.parse("8xgaudi2"), base=Layout(precision="bf16"))
    with pytest.raises(PlanError, match="precision=float64: device gaudi2 has no rate for float64"):
        price_candidate(asked, Layout.parse("replicate=8,precision=float64"))
    ours = dataclasses.replace(asked, cluster=CLUSTER)
    named = price_candidate(ours, Layout.parse("shard=8,zero=1,precision=float64")).price
    assert named.step_s > 4 * price_candidate(ours, Layout.parse("shard=8,zero=1,precision=bf16")).price.step_s
    whole = dataclasses.replace(job, precision="float64")
    ours = dataclasses.replace(ours, job=whole, base=Layout(precision="float64"))
    assert choose(ours).best[0].layout.precision == "float64"


def test_selective_recompute_holds_up_the_host_unless_the_layers_are_compiled() -> None:
    tiny = dataclasses.replace(LLAMA, width=256, heads=4, kv_heads=4, ffn=512, vocab=512)

    def step_s(words: str) -> float:
        return priced(f"precision=bf16{words}", tiny, Cluster.parse("1xh100"), rows=1).step_s

    plain, full, selective = (step_s(words) for words in ("", ",recompute=full", ",recompute=selective"))
    layers_s = tiny.layers * MESHWRIGHT.runtime.host_layer_s
    assert full - plain == pytest.approx(layers_s)
    # Its forward, and that which is repeated, as an H100 showed whose host held the steps up.
    assert selective - plain == pytest.approx(layers_s * (2 * SELECTIVE_HOST - 1))
    compiled, recomputed = (step_s(f",compile=true{words}") for words in ("", ",recompute=selective"))
    assert 0 < recomputed - compiled <= tiny.layers * MESHWRIGHT.runtime.fused_layer_s
