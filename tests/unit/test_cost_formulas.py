import csv
import dataclasses
import itertools
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks.published.other_profile import OtherActivations, OtherProfile, OtherRuntime
from meshwright.cluster.cluster import Cluster
from meshwright.planner.closed_form import Latent, TableSizes, shape_from_sizes
from meshwright.planner.cost.groups import Machine, span
from meshwright.planner.cost.kernels import PRODUCTS, RATES, generation, matmul_s, sustained_share
from meshwright.planner.cost.layers import price_layer
from meshwright.planner.cost.layout_batch import LayoutBatch, PricedJob, schedule_names
from meshwright.planner.cost.meshwright_profile import MESHWRIGHT
from meshwright.planner.cost.price import price, price_many
from meshwright.planner.cost.priced_model import PricedModel
from meshwright.planner.cost.prices import MEMORY, layer_span
from meshwright.planner.cost.stages import _balanced, divide_blocks
from meshwright.planner.cost.timing import in_flight_microbatches, makespan
from meshwright.planner.memory import ModelParts, state_memory
from meshwright.schedules.costs import ActionCosts
from meshwright.schedules.simulate import simulate
from meshwright.schedules.spec import find_schedule
from meshwright.spec import layer_graph
from meshwright.spec.end_units import EndUnits
from meshwright.spec.layout import Layout
from meshwright.spec.model_shape import ModelShape

TRUTH = Path(__file__).parents[2] / "benchmarks" / "truth"
GPT3 = TableSizes(
    name="gpt3", layers=96, width=12288, heads=96, vocab=51200, gated=False, positions=2048, tied=True, dropout=True
)
LLAMA = TableSizes(name="llama", layers=32, width=4096, heads=32, kv_heads=8, vocab=128256, ffn=14336)


def test_gpt3_has_the_parameters_and_flops_of_the_closed_forms():
    shape = shape_from_sizes(GPT3)
    assert shape.parameters == pytest.approx(174.6e9, rel=1e-3)
    s, h, layers, vocab = 2048, 12288, 96, 51200
    model = 72 * s * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h))
    assert s * shape.train_flops_per_token(s) == pytest.approx(model, rel=1e-12)


def test_public_models_have_their_parameters():
    assert shape_from_sizes(LLAMA).parameters == pytest.approx(8.03e9, rel=1e-3)
    latent = Latent(query_rank=1536, kv_rank=512, rope_size=64, nope_size=128, value_size=128)
    deepseek = TableSizes(
        name="deepseek-v3",
        layers=61,
        width=7168,
        heads=128,
        vocab=129280,
        ffn=18432,
        experts=256,
        active_experts=8,
        expert_ffn=2048,
        shared_ffn=2048,
        dense_layers=3,
        latent=latent,
    )
    shape = shape_from_sizes(deepseek)
    assert shape.parameters == pytest.approx(671e9, rel=1e-3)
    assert shape.matmul_parameters == pytest.approx(36.6e9, rel=5e-3)


def test_a_shape_with_blocks_survives_json():
    shape = shape_from_sizes(LLAMA)
    assert ModelShape.from_json(shape.to_json()) == shape


def test_model_flops_are_those_that_nanotron_logged():
    with (TRUTH / "hf_ultrascale_nanotron.csv").open(encoding="utf-8", newline="") as text:
        rows = [row for row in csv.DictReader(text) if row["step_time_s"]][::40]
    for row in rows:
        number = {key: int(row[key]) for key in ("layers", "hidden", "heads", "vocab", "ffn_hidden", "gbs", "gpus")}
        shape = shape_from_sizes(
            TableSizes(
                name="row",
                layers=number["layers"],
                width=number["hidden"],
                heads=number["heads"],
                vocab=number["vocab"],
                ffn=number["ffn_hidden"],
            )
        )
        work = number["gbs"] * 4096 * shape.train_flops_per_token(4096) / number["gpus"]
        logged = float(row["tflops_per_gpu"])
        assert work / float(row["step_time_s"]) / 1e12 == pytest.approx(logged, rel=2e-3, abs=0.01)


PLAIN = OtherProfile(
    name="plain", saved=OtherActivations(flash=False, score_bytes=5.0), runtime=OtherRuntime(flash=False)
)


def saved_bytes(recompute: str, tp: int, sequence: bool) -> float:
    text = f"tp={tp},sequence={str(sequence).lower()}" if tp > 1 else "replicate=1"
    layout = Layout.parse(text + (f",recompute={recompute}" if recompute != "none" else ""))
    degrees = LayoutBatch.from_layouts([layout], 96)
    job = PricedJob(shape=shape_from_sizes(GPT3), sequence=2048, rows=1)
    model = PricedModel(job, degrees, Machine.of(Cluster.parse("8xa100-80")), PLAIN)
    cost = price_layer(model, job.shape.blocks[0])
    return float(np.broadcast_to(cost.saved - cost.spared, 1)[0])


@pytest.mark.parametrize(
    ("recompute", "tp", "sequence", "factor"),
    [
        ("none", 1, False, 34 + 5 * 96 * 2048 / 12288),
        ("none", 8, False, 10 + 24 / 8 + 5 * 96 * 2048 / 12288 / 8),
        ("none", 8, True, (34 + 5 * 96 * 2048 / 12288) / 8),
        ("full", 8, False, 2),
        ("full", 8, True, 2 / 8),
    ],
)
def test_saved_bytes_are_those_of_the_paper(recompute, tp, sequence, factor):
    """Korthikanti et al. (2022), table 2."""
    assert saved_bytes(recompute, tp, sequence) == pytest.approx(factor * 2048 * 12288, rel=1e-12)


def parts_of(shape: ModelShape) -> ModelParts:
    """The weights of a model whose embedding and head aren't tied, a layer's as one."""
    shapes = {"embed.weight": (shape.vocab, shape.width), "norm.weight": (shape.width,)}
    shapes |= {f"h.{at}.weight": (shape.width, size // shape.width) for at, size in enumerate(shape.layer_parameters)}
    ends = EndUnits(embedding="embed", head=("norm", "head"))
    layers = tuple(f"h.{at}" for at in range(shape.layers))
    return ModelParts(shapes=shapes | {"head.weight": (shape.vocab, shape.width)}, layers=layers, ends=ends)


@pytest.mark.parametrize(
    "text",
    [
        "replicate=8,precision=bf16",
        "shard=8,zero=1,precision=bf16",
        "shard=8,zero=1,microbatches=4,precision=bf16",
        "shard=8,zero=2,microbatches=4,precision=bf16",
        "shard=8,zero=3,precision=bf16",
        "shard=8,zero=3",
        "replicate=8",
        "replicate=2,shard=4,zero=2,microbatches=2",
    ],
)
def test_state_bytes_are_those_that_the_runtime_holds(text):
    layout, shape = Layout.parse(text), shape_from_sizes(LLAMA)
    job = PricedJob(shape=shape, sequence=4096, rows=64, precision="bf16" if layout.is_mixed_precision else "float32")
    ours = price(job, layout, Cluster.parse("8xh100")).most
    theirs, _ = state_memory(layout, parts_of(shape))
    for part, size in theirs.items():
        assert ours[part] == pytest.approx(size, rel=1e-6)


LAYOUTS = [
    "pp=4,shard=4,tp=4,zero=1,microbatches=16,sequence=true,precision=bf16",
    "shard=64,zero=3,microbatches=1,recompute=full,precision=bf16",
    "pp=2,replicate=8,cp=2,tp=2,microbatches=8,precision=bf16",
    "pp=4,stages=2,schedule=interleaved,shard=16,zero=1,microbatches=4,precision=bf16",
]


@pytest.mark.parametrize("text", LAYOUTS)
def test_parts_sum_to_the_whole(text):
    job = PricedJob(shape=shape_from_sizes(LLAMA), sequence=4096, rows=256)
    found = price(job, Layout.parse(text), Cluster.parse("64xh100"))
    assert sum(found.parts.values()) == pytest.approx(found.step_s, rel=1e-9)
    assert min(found.parts.values()) >= 0
    for stage in found.stages:
        assert set(stage.memory) == set(MEMORY)
        assert sum(stage.memory.values()) == pytest.approx(stage.peak)
    assert found.peak == max(stage.peak for stage in found.stages)


@pytest.mark.parametrize("cluster", ["1xh100", "1xa100-80", "1xcpu"])
def test_a_narrow_product_takes_no_longer_than_one_that_fills_a_tile(cluster: str) -> None:
    """A router has 8 columns, the gate of a shared expert has one."""
    device = Cluster.parse(cluster).device
    dtype = "bf16" if "bf16" in device.peak_flops else next(iter(device.peak_flops))
    for rows in (1.0, 16.0, 16384.0):
        filled_s = float(matmul_s(max(rows, 64.0), 64.0, 2048.0, device, dtype))
        for columns in (1.0, 8.0, 63.0):
            assert float(matmul_s(rows, columns, 2048.0, device, dtype)) <= filled_s
        batch = matmul_s(np.array([rows, 4096.0]), 8.0, 2048.0, device, dtype)
        assert batch.tolist() == [float(matmul_s(one, 8.0, 2048.0, device, dtype)) for one in (rows, 4096.0)]
    assert matmul_s(np.empty(0), 8.0, 2048.0, device, dtype).shape == (0,), "of no layouts"


def test_one_and_many_are_the_same():
    job = PricedJob(shape=shape_from_sizes(LLAMA), sequence=4096, rows=256)
    cluster, layouts = Cluster.parse("64xh100"), [Layout.parse(text) for text in LAYOUTS]
    many = price_many(job, LayoutBatch.from_layouts(layouts, 32), cluster)
    for at, layout in enumerate(layouts):
        one = price(job, layout, cluster)
        assert many.step_s[at] == pytest.approx(one.step_s, rel=1e-12)
        assert many.peak[at] == pytest.approx(one.peak, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "slack"),
    [("1f1b", 4, 1, 1e-9), ("gpipe", 4, 1, 1e-9), ("interleaved", 4, 2, 1e-9), ("zbv", 4, 2, 0.06)],
)
def test_the_closed_forms_of_schedules_agree_with_the_simulator(name, ranks, chunks, slack):
    microbatches = 16
    schedule = find_schedule(name).build(ranks, chunks, microbatches)
    run = simulate(schedule, ActionCosts.uniform(ranks * chunks, forward_s=1.0, input_s=1.0, weight_s=1.0))
    ones = np.full((1, ranks), float(chunks))
    columns = {"pp": ranks, "microbatches": microbatches, "stages": chunks}
    degrees = LayoutBatch.of(columns | {"schedule": schedule_names().index(name)})
    told = makespan(degrees, ones, 2 * ones, ones)
    assert told[0] == pytest.approx(run.makespan_s, rel=slack)
    live = in_flight_microbatches(degrees, ranks)[0] * chunks
    assert np.all(np.asarray(run.peak_live_rank) <= live + 1e-9)


def test_uneven_stages_of_1f1b_are_exact():
    forward, backward = np.array([[1.0, 1.5, 1.0, 2.0]]), np.array([[2.0, 3.0, 2.0, 4.0]])
    costs = ActionCosts(forward_s=(1, 1.5, 1, 2), backward_s=(2, 3, 2, 4), input_s=(1, 1, 1, 1), weight_s=(1, 1, 1, 1))
    run = simulate(find_schedule("1f1b").build(4, 1, 12), costs)
    told = makespan(LayoutBatch.of({"pp": 4, "microbatches": 12}), forward, backward, backward / 2)
    assert told[0] == pytest.approx(run.makespan_s, rel=0.03)


def test_stages_hold_every_layer_once_by_each_rule():
    shape = shape_from_sizes(LLAMA)
    for rule in ("balanced", "even", "compute", "slots"):
        for stages in (1, 2, 3, 4, 8, 16):
            bounds = divide_blocks(shape, stages, rule)
            assert len(bounds) == stages
            assert [at for start, stop in bounds for at in range(start, stop)] == list(range(32))
    assert divide_blocks(shape, 3, "even", (10, 12, 10)) == ((0, 10), (10, 22), (22, 32))


@pytest.mark.parametrize("stages", [3, 4])
def test_a_head_as_costly_as_the_layers_is_a_stage_alone(stages: int) -> None:
    """Of all splits, of which any first or last stage may be empty, the automatic one is about the fastest."""
    shape = shape_from_sizes(TableSizes(name="wide head", layers=6, width=2048, heads=16, vocab=128000))
    job, cluster = PricedJob(shape=shape, sequence=2048, rows=32), Cluster.parse(f"{stages}xh100")
    text, seconds = f"pp={stages},microbatches=16,precision=bf16", {}
    for cuts in itertools.combinations_with_replacement(range(7), stages - 1):
        sizes = [stop - start for start, stop in pairwise((0, *cuts, 6))]
        if 0 not in sizes[1:-1]:
            split = "-".join(map(str, sizes))
            seconds[split] = price(job, Layout.parse(f"{text},split={split}"), cluster).step_s
    automatic = price(job, Layout.parse(text), cluster)
    best_with_layers = min(took for split, took in seconds.items() if not split.endswith("-0"))
    assert automatic.step_s < 1.005 * min(seconds.values()) and automatic.step_s < 0.9 * best_with_layers
    assert layer_span(automatic.stages[-1], automatic.stages[-1]) == "none"


def test_a_rank_without_layers_has_no_layers_working_memory() -> None:
    job = PricedJob(shape=shape_from_sizes(LLAMA), sequence=2048, rows=16)
    text = "pp=4,microbatches=16,recompute=full,precision=bf16,split=0-16-16-0"
    first, second, _, last = price(job, Layout.parse(text), Cluster.parse("4xh100")).stages
    # Token indices in int64, of each micro-batch in flight; and of the head its input and that of the last norm.
    assert first.most["activations"] == 2048 * 8 * first.held
    assert last.most["activations"] == 2048 * 4096 * 2 * 2 * last.held
    assert second.most["activations"] > 1e8


@pytest.mark.parametrize(
    ("layout", "first", "second", "all_ranks"),
    [
        ("pp=2,microbatches=4,split=4-4", "0-3", "4-7", "0-7"),
        ("pp=2,microbatches=4,schedule=interleaved,split=0-4-3-1", "4-6", "0-3, 7-7", "0-3, 4-7"),
        ("pp=2,microbatches=4,schedule=zbv,split=2-2-3-1", "0-1, 7-7", "2-3, 4-6", "0-3, 4-7"),
    ],
)
def test_ranks_name_the_layers_of_all_their_stages(layout: str, first: str, second: str, all_ranks: str) -> None:
    shape = shape_from_sizes(TableSizes(name="small", layers=8, width=1024, heads=8, vocab=1000))
    job = PricedJob(shape=shape, sequence=512, rows=8)
    ranks = price(job, Layout.parse(f"{layout},precision=bf16"), Cluster.parse("2xh100")).stages
    assert [layer_span(rank, rank) for rank in ranks] == [first, second]
    assert layer_span(ranks[0], ranks[1]) == all_ranks


def test_groups_cross_the_nodes_that_they_cross():
    found = span(np.array([1, 8, 4, 1]), np.array([8, 4, 4, 16]), 8, np.array([64, 64, 64, 64]))
    assert found.inside.tolist() == [8, 1, 2, 8]
    assert found.nodes.tolist() == [1, 4, 2, 2]
    assert found.sharing.tolist() == [1, 8, 4, 1]


def test_a_faster_network_is_never_slower():
    job = PricedJob(shape=shape_from_sizes(LLAMA), sequence=4096, rows=256)
    columns = {"tp": 8, "shard": 8, "zero": 1, "microbatches": 2, "sequence": 1}
    scales = np.array([0.1, 0.5, 1.0, 2.0])
    found = price_many(job, LayoutBatch.of(columns | {"outside_scale": scales}), Cluster.parse("64xh100"), MESHWRIGHT)
    assert np.all(np.diff(found.step_s) <= 0)


def test_adapters_need_no_gradients_of_weights():
    shape = shape_from_sizes(LLAMA)
    columns = {"replicate": 8, "microbatches": 2}
    cluster = Cluster.parse("8xh100")
    whole, adapted = (
        price_many(PricedJob(shape=shape, sequence=4096, rows=64, adapters=some), LayoutBatch.of(columns), cluster)
        for some in (False, True)
    )
    assert adapted.step_s[0] < 0.85 * whole.step_s[0]
    assert adapted.peak[0] < whole.peak[0] - 12 * shape.parameters


@pytest.mark.parametrize("seed", range(20))
def test_balanced_stages_are_those_that_the_runtime_cuts(seed):
    chance = np.random.default_rng(seed)
    costs = tuple(int(size) for size in chance.integers(1, 6, chance.integers(4, 16)))
    tail, stages = int(chance.integers(0, 9)), int(chance.integers(1, 5))
    names = tuple(str(number) for number in range(len(costs)))
    nothing = (frozenset[str](),) * len(costs)
    model = layer_graph.LayerGraph(
        layers=names,
        input_weights=nothing,
        output_weights=(*nothing, frozenset({"head"})),
        boundary_tensors=((),) * len(costs),
        returns=(),
    )
    sizes = {f"{name}.weight": cost for name, cost in zip(names, costs)} | {"head": tail}
    theirs = layer_graph.divide(model, sizes, (), stages, "")
    assert _balanced(costs, tail, stages) == tuple(pairwise(theirs))


def test_our_rate_of_attention_is_that_of_the_generation_on_which_it_was_measured() -> None:
    """cuDNN's kernel was timed on Hopper; other GPUs keep what codes over FlashAttention-2 have in common."""
    job = PricedJob(shape=shape_from_sizes(LLAMA), sequence=8192, rows=1)
    own = Cluster.from_dict({"group": [{"device": "own", "count": 1}], "devices": {"own": {"like": "h200"}}})
    clusters = {name: Cluster.parse(f"1x{name}") for name in ("h100", "h20", "gh200", "a100-80", "mi300x")}
    for text, cluster in (clusters | {"own": own}).items():
        share = 0.75 if text in ("a100-80", "mi300x") else 1.3
        seconds = price(job, Layout.parse("precision=fp16"), cluster).parts["attention"]
        rate = RATES[generation(cluster.device)]
        # Causal: half of the pairs, two products forward and five backward.
        flops = 32 * 4096 * 8192 * 8192
        peak = cluster.device.peak("fp16")
        expected = (2 * flops / rate.flash_forward + 5 * flops / rate.flash_backward) / peak / share
        assert seconds == pytest.approx(expected, rel=0.02), text


def test_a_limit_of_power_slows_products_by_its_cube_root() -> None:
    """By hand: an H100 at 500 of 700 W, as torchtitan ran it, keeps (5/7)^(1/3) = 0.894 of its products' rate."""
    whole = Cluster.parse("1xh100").device

    def seconds(watts: float, dtype: str) -> float:
        return float(matmul_s(16384, 16384, 16384, dataclasses.replace(whole, watts=watts), dtype))

    for dtype in ("bf16", "fp8"):
        assert seconds(700, dtype) / seconds(500, dtype) == pytest.approx(0.8939, abs=1e-4), dtype
        # Neither a limit above what full clock takes nor an unknown one slows anything.
        assert seconds(5000, dtype) == seconds(0, dtype) < seconds(700, dtype), dtype
    # 1.37 pJ x 989.4 TFLOP/s are 1,355 W.
    assert PRODUCTS.picojoules == 1.37
    assert sustained_share(whole) == pytest.approx((700 / 1355.5) ** (1 / 3), rel=1e-4)


def test_products_lose_the_time_of_a_fixed_work_on_each_unit() -> None:
    """Of products of whole waves of tiles: what is lost is the ramp's work, in 16 bits as in twice as many."""
    device = dataclasses.replace(Cluster.parse("1xa100-80").device, bandwidth_bytes_per_s=1e18)
    rows, columns = 256 * 108, 128  # one tile of the best shape for each unit
    reached = sustained_share(device) * device.share("bf16")
    for dtype in ("bf16", "tf32"):
        short, long = (float(matmul_s(rows, columns, depth, device, dtype)) for depth in (1024, 2048))
        lost_s = 2 * short - long
        assert lost_s == pytest.approx(2 * PRODUCTS.ramp * 1e6 * 108 / (device.peak("bf16") * reached), rel=1e-6), dtype


def test_tokens_of_several_rows_are_copied_around_tps_collectives() -> None:
    """Four a layer and pass, each 2 bytes read and 2 written of every element: as `parallel.collectives` moves them."""
    cluster, shape = Cluster.parse("8xh100"), shape_from_sizes(LLAMA)
    plain = MESHWRIGHT.with_options(runtime__copies_tokens=False)

    def copies_s(text: str, rows: int) -> float:
        job = PricedJob(shape=shape, sequence=4096, rows=rows)
        layout = Layout.parse(text)
        return (
            price(job, layout, cluster).parts["elementwise"] - price(job, layout, cluster, plain).parts["elementwise"]
        )

    hidden_bytes, bandwidth = 2 * 4096 * 4096, 3.35e12 * 0.85
    # 32 layers and the two ends, forward and backward; of a micro-batch of 2 rows.
    each_s = 2 * 2 * hidden_bytes / bandwidth
    assert copies_s("tp=8,sequence=true", 2) == pytest.approx((32 * 4 + 2) * 2 * each_s, rel=1e-3)
    assert copies_s("tp=8,sequence=true,microbatches=2", 2) == 0.0
    assert copies_s("tp=8", 2) == copies_s("replicate=8", 8) == 0.0
