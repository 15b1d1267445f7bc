"""State in host memory: bytes on the device and in the host by layout, worked out by hand, and what it takes."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.cluster import catalogue
from meshwright.cluster.calibration import Calibration
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.host import KERNEL_SHARE, host_of
from meshwright.cluster.node import named_node, standard_node
from meshwright.errors import PlanError
from meshwright.planner.candidate_prices import price_candidate
from meshwright.planner.choose import choose
from meshwright.planner.closed_form import TableSizes, shape_from_sizes
from meshwright.planner.cost.layout_batch import LayoutBatch, PricedJob
from meshwright.planner.cost.offload import ADAM_PASSES, HOST_USABLE, PINNED
from meshwright.planner.cost.price import price, price_many
from meshwright.planner.cost.prices import Price
from meshwright.planner.explain import why
from meshwright.planner.question import Question
from meshwright.spec.layout import Layout

LLAMA = shape_from_sizes(TableSizes(name="llama", layers=32, width=4096, heads=32, kv_heads=8, vocab=128256, ffn=14336))
N = LLAMA.parameters
CLUSTER = Cluster.parse("8xh100")
FILE = {"group": [{"device": "h100", "nodes": 1, "count": 8}]}


def priced(text: str, cluster: Cluster = CLUSTER, rows: int = 64) -> Price:
    layout = Layout.parse(text)
    job = PricedJob(shape=LLAMA, sequence=2048, rows=rows, precision=layout.precision)
    return price(job, layout, cluster)


def described(**keys: object) -> Cluster:
    return Cluster.from_dict({"group": [{**FILE["group"][0], **keys}]})


# -------------------------------------------------------- hosts


def test_every_node_of_devices_has_a_host_that_its_ranks_share() -> None:
    for name in catalogue.nodes():
        host = host_of(named_node(name, catalogue.device("h100")))
        assert (host is None) == (name == "cpu-server"), name
    node = standard_node("h100")
    host = host_of(node)
    assert host is not None and node.host_link is not None
    assert host.memory_bytes == node.host_memory_bytes / 8
    assert host.copy_bytes_per_s == node.host_link.rate
    assert host.kernel_bytes_per_s == node.host_bandwidth_bytes_per_s / 8 * KERNEL_SHARE
    grace = host_of(standard_node("gb200"))  # four links of 382 GB/s meet in 1,024 GB/s of memory
    assert grace is not None and grace.copy_bytes_per_s == 1024e9 / 4


def test_a_cluster_has_the_least_of_its_hosts() -> None:
    both = Cluster.parse("8xh100+8xa100-80").host
    one, other = Cluster.parse("8xh100").host, Cluster.parse("8xa100-80").host
    assert both is not None and one is not None and other is not None
    for name in ("memory_bytes", "copy_bytes_per_s", "kernel_bytes_per_s"):
        assert getattr(both, name) == min(getattr(one, name), getattr(other, name))
    assert Cluster.parse("4xcpu").host is None


def test_the_processors_rate_is_that_of_the_paper() -> None:
    """ZeRO-Offload, table 4: CPU-Adam updates 10 billion parameters in 2.57 s on a DGX-2, whatever its devices."""
    host = host_of(standard_node("v100-32-sxm3", 1))
    assert host is not None
    assert ADAM_PASSES * 4 * 10e9 / host.kernel_bytes_per_s == pytest.approx(2.57, rel=0.02)


def test_a_cluster_with_host_figures_survives_its_file() -> None:
    made = described(host_bandwidth_bytes_per_s=3e11)
    assert made.groups[0].node.host_bandwidth_bytes_per_s == 3e11
    assert Cluster.from_dict(made.to_dict()).host == made.host


# -------------------------------------------------------- memory


def test_the_optimizer_leaves_its_masters_where_they_are_gathered_from() -> None:
    for text, owned in (("replicate=8", N), ("shard=8,zero=1", N / 8), ("shard=8,zero=3", N / 8)):
        plain, there = priced(f"{text},precision=bf16"), priced(f"{text},precision=bf16,offload=optimizer")
        assert plain.most["optimizer"] == pytest.approx(12 * owned)
        assert there.most["optimizer"] == pytest.approx(4 * owned)
        for part in ("parameters", "gradients", "activations", "logits"):
            assert there.most[part] == plain.most[part]
        assert plain.peak - there.peak == pytest.approx(8 * owned)
        # Masters again and gradients in pinned blocks, moments beside them.
        assert there.host == pytest.approx((8 * PINNED + 8) * owned) and plain.host == 0
    wide = priced("replicate=8,offload=optimizer")
    assert wide.most["optimizer"] == 0 and wide.host == pytest.approx((8 * PINNED + 8) * N)


def test_parameters_leave_what_is_gathered_and_what_is_on_its_way() -> None:
    # Two neighbours of embedding, layers and head, which are units of their own where they aren't tied.
    layer, *ends = LLAMA.layer_parameters[0], LLAMA.embedding_parameters, LLAMA.head_parameters
    units = layer + max(layer, *ends) + LLAMA.other_parameters
    three = priced("shard=8,zero=3,precision=bf16,offload=parameters")
    assert three.most["optimizer"] == 0
    assert three.most["parameters"] == pytest.approx(2 * units + 4 * units / 8)
    assert three.most["gradients"] == pytest.approx(4 * units)
    assert three.host == pytest.approx((8 * PINNED + 8) * N / 8)
    one = priced("shard=8,zero=1,precision=bf16,offload=parameters")
    assert one.most["parameters"] == pytest.approx(2 * N + 4 * units / 8)
    assert one.most["gradients"] == pytest.approx(4 * units)
    adding = priced("shard=8,zero=1,microbatches=2,precision=bf16,offload=parameters")
    assert adding.most["gradients"] == pytest.approx(4 * N)
    piped = priced("pp=2,shard=4,zero=3,microbatches=4,precision=bf16,offload=parameters")
    assert piped.most["gradients"] > 4 * N / 2 * 0.8


def test_thirteen_billion_train_on_one_device_of_32_gb() -> None:
    """ZeRO-Offload (Ren et al., 2021): 13 billion parameters on one V100 of 32 GB, none of it without offload."""
    shape = shape_from_sizes(
        TableSizes(name="13b", layers=40, width=5120, heads=40, vocab=50304, gated=False, tied=True)
    )
    assert shape.parameters == pytest.approx(13e9, rel=0.02)
    cluster = Cluster.parse("1xv100-32")
    job = PricedJob(shape=shape, sequence=1024, rows=1, precision="fp16")
    whole, some, most = (
        price(job, Layout(precision="fp16", recompute="full", offload=mode), cluster)
        for mode in ("none", "optimizer", "parameters")
    )
    assert whole.peak > 6 * cluster.memory_bytes and some.peak > cluster.memory_bytes
    assert most.peak < cluster.memory_bytes
    assert most.most["parameters"] < 2.4 * shape.parameters
    host = cluster.host
    assert host is not None and most.host < HOST_USABLE * host.memory_bytes


def test_hosts_of_a_dgx2_hold_sixty_five_billion_and_not_eighty() -> None:
    """ZeRO-Infinity (SC 2021), recalled: 70 billion with host memory on one DGX-2, a trillion with disks."""
    cluster = Cluster.parse("16xv100-32-sxm3")
    host = cluster.host
    assert host is not None
    for layers, fits in ((80, True), (100, False)):
        shape = shape_from_sizes(TableSizes(name="big", layers=layers, width=8192, heads=64, vocab=50304, gated=False))
        job = PricedJob(shape=shape, sequence=1024, rows=16, precision="fp16")
        layout = Layout.parse("shard=16,zero=3,recompute=full,precision=fp16,offload=parameters")
        found = price(job, layout, cluster)
        assert (found.host < HOST_USABLE * host.memory_bytes) is fits
        if fits:
            assert shape.parameters > 65e9 and found.peak < 0.94 * cluster.memory_bytes


# -------------------------------------------------------- time


def test_copies_lie_beside_an_update_in_host_memory() -> None:
    host = CLUSTER.host
    assert host is not None
    text, ends_s = "shard=8,zero=1,precision=bf16,offload=optimizer", 2 * 2**25 / host.copy_bytes_per_s
    found = priced(text).parts
    assert found["optimizer"] == pytest.approx(28 * N / 8 / host.kernel_bytes_per_s)
    # Of all but the first 32 MiB down and the last up nothing is seen.
    assert found["offload"] == pytest.approx(ends_s)
    # Twenty times as fast, and the copies take longer.
    fast = priced(text, described(host_bandwidth_bytes_per_s=20 * 614.4e9, host_update_share=0.9)).parts
    copy_s = 4 * N / 8 / host.copy_bytes_per_s
    assert fast["offload"] + fast["optimizer"] == pytest.approx(copy_s + ends_s) and fast["optimizer"] < copy_s / 2


def test_a_rank_s_update_is_no_faster_than_its_cores() -> None:
    """Measured on one H100 with 16 cores: 5.45e9 weights a second; with its norm and scaling 36 bytes, not 28."""
    alone = Cluster.parse("1xh100")
    update_s = priced("precision=bf16,offload=optimizer", alone, 8).parts["optimizer"]
    assert update_s == pytest.approx(N / 5.45e9, rel=1e-3)
    both_s = priced("precision=bf16,offload=parameters", alone, 8).parts["optimizer"]
    assert both_s == pytest.approx(update_s * 36 / 28)


def test_a_calibrated_host_is_priced_as_measured() -> None:
    """A billion weights updated in 0.5 s and their norm in 0.1 s, on all cores, which eight ranks share."""
    times = (("update", 0.5), ("norm", 0.1))
    made = Calibration(machine={"kind": "cuda", "device": "h100"}, ranks=8, host=times)
    measured = CLUSTER.calibrated(made)
    assert measured.host is not None and measured.host.memory_bytes == CLUSTER.host.memory_bytes  # type: ignore[union-attr]
    text = "shard=8,zero=1,precision=bf16,offload="
    assert priced(f"{text}optimizer", measured).parts["optimizer"] == pytest.approx(N * 0.5e-9)
    found = priced(f"{text}parameters", measured).parts["optimizer"]
    assert found == pytest.approx(N * (0.5e-9 * 32 / 28 + 0.1e-9))
    assert Cluster.from_dict(measured.to_dict()).host == measured.host


def test_what_is_copied_hides_as_the_runtime_hides_it() -> None:
    host = CLUSTER.host
    assert host is not None
    copy_s = 4 * N / 8 / host.copy_bytes_per_s
    long = priced("shard=8,zero=3,precision=bf16,offload=parameters", rows=512).parts
    assert long["offload"] < copy_s  # three copies, of which next to nothing is seen
    adds = priced("shard=8,zero=3,microbatches=8,precision=bf16,offload=parameters", rows=512).parts
    assert adds["offload"] > 7 * copy_s  # the host waits for all but the first, and adds them up
    slow, text = Cluster.parse("16xh100@ethernet-25g"), "shard=16,zero=2,microbatches=4,precision=bf16"
    assert priced(f"{text},offload=parameters", slow).parts["reduce"] > priced(text, slow).parts["reduce"] > 0
    alone = Cluster.parse("1xh200")
    single = priced("offload=parameters,precision=bf16", alone, rows=8).parts
    # Gradients leave under backward, weights come up under the update.
    assert alone.host is not None and single["offload"] < 0.05 * 4 * N / alone.host.copy_bytes_per_s
    # Where a group of shards is one of several ranks, FSDP2 copies weights up ahead of each layer.
    split = priced("tp=8,offload=parameters,precision=bf16").parts
    assert split["offload"] > copy_s
    piped = priced("pp=2,shard=4,zero=1,microbatches=4,precision=bf16,offload=parameters").parts
    assert piped["offload"] > copy_s * 1.5


@pytest.mark.parametrize("mode", ["optimizer", "parameters"])
@pytest.mark.parametrize("text", ["replicate=8", "shard=8,zero=1", "shard=8,zero=2,microbatches=4", "shard=8,zero=3"])
def test_what_offloads_is_never_faster(text: str, mode: str) -> None:
    plain, there = priced(f"{text},precision=bf16"), priced(f"{text},precision=bf16,offload={mode}")
    assert there.step_s > plain.step_s and there.peak < plain.peak
    assert sum(there.parts.values()) == pytest.approx(there.step_s)
    assert sum(there.memory.values()) == pytest.approx(there.peak)


def test_many_layouts_are_priced_with_those_that_offload_among_them() -> None:
    job = PricedJob(shape=LLAMA, sequence=2048, rows=64)
    texts = [
        "shard=8,zero=1,precision=bf16,offload=optimizer",
        "shard=8,zero=1,precision=bf16",
        "pp=2,shard=4,zero=3,microbatches=4,precision=bf16,offload=parameters",
        "pp=2,shard=4,zero=1,microbatches=4,precision=bf16",
    ]
    layouts = [Layout.parse(text) for text in texts]
    many = price_many(job, LayoutBatch.from_layouts(layouts, 32), CLUSTER)
    for at, layout in enumerate(layouts):
        one = price(job, layout, CLUSTER)
        assert many.step_s[at] == pytest.approx(one.step_s) and many.peak[at] == pytest.approx(one.peak)
        assert many.host[at] == pytest.approx(one.host)
        plain = price(job, dataclasses.replace(layout, offload="none"), CLUSTER)
        assert (many.unoffloaded_peak[at] or many.peak[at]) == pytest.approx(plain.peak)


# -------------------------------------------------------- what can't be


def question(cluster: Cluster, **changes: object) -> Question:
    job = PricedJob(shape=LLAMA, sequence=2048, rows=64)
    return Question(job=job, cluster=cluster, base=Layout(precision="bf16"), **changes)  # type: ignore[arg-type]


def test_a_host_that_is_missing_or_too_small_is_told() -> None:
    layout = Layout.parse("shard=8,zero=3,precision=bf16,offload=optimizer")
    assert price_candidate(question(CLUSTER), layout).price.host > 0
    for keys, told in (
        ({"host_link": "none"}, "nodes of h100 have no host_link"),
        ({"host_bandwidth_bytes_per_s": 0}, "have no host_bandwidth_bytes_per_s"),
        ({"host_memory_bytes": 2**36}, r"takes 18\.\d+ GiB of host memory, of 6\.\d+ GiB .* shard it over more ranks"),
    ):
        with pytest.raises(PlanError, match=told):
            price_candidate(question(described(**keys)), layout)
    with pytest.raises(PlanError, match="compute on processor cores"):
        price_candidate(question(Cluster.parse("8xcpu")), layout)
    with pytest.raises(PlanError, match="no host memory for it"):
        choose(question(described(host_link="none"), limits={"offloads": ("optimizer",)}))


def test_a_named_layout_that_offloads_is_explained() -> None:
    asked = question(CLUSTER)
    layout = Layout.parse("shard=8,zero=3,precision=bf16,recompute=full,offload=parameters")
    told = why(asked, price_candidate(asked, layout), choose(asked), lambda other: price_candidate(asked, other))
    assert "of a rank in host memory" in told and "optimizer +" in told


BIG = TableSizes(name="big", layers=48, width=8192, heads=64, kv_heads=8, vocab=32000, ffn=28672)


def test_offload_is_chosen_where_nothing_fits_without() -> None:
    job = PricedJob(shape=shape_from_sizes(BIG), sequence=2048, rows=8)
    asked = Question(job=job, cluster=Cluster.parse("8xa100-40"), base=Layout(precision="bf16"))
    best = choose(asked).best[0]
    assert best.layout.offload != "none" and best.price.peak <= asked.usable_bytes
    assert Layout.parse(str(best.layout)) == best.layout
    refused = dataclasses.replace(asked, limits={"offloads": ("none",)})
    with pytest.raises(PlanError, match=r"nearest that would: about .* devices, .*or offload=\w+ \("):
        choose(refused)
    small = [{"device": "a100-40", "host_memory_bytes": 2**38}]
    with pytest.raises(PlanError, match=r"offload=\w+ \(.*\) with .* of host memory a node, of which it has 256.0 GiB"):
        choose(dataclasses.replace(asked, cluster=Cluster.from_dict({"group": small})))
    without = [{"device": "a100-40", "host_link": "none"}]
    with pytest.raises(PlanError, match="once the hosts are described: nodes of a100-40 have no host_link"):
        choose(dataclasses.replace(asked, cluster=Cluster.from_dict({"group": without})))
