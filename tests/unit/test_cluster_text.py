"""How clusters are written: short text, tables both ways, hostfiles, what is found; nonsense is refused."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from meshwright.cluster import catalogue
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.link import Link
from meshwright.errors import ClusterError

NAMES = {
    "A100-SXM-80GB": "a100-80",
    "A100-SXM": "a100-80",
    "a100_80gb": "a100-80",
    "A100-SXM-40GB (DGX-A100)": "a100-40",
    "A100-40": "a100-40",
    "NVIDIA A100 PCIe": "a100-80-pcie",
    "NVIDIA A100-SXM4-80GB": "a100-80",
    "H100-SXM-80GB": "h100",
    "h100_80gb": "h100",
    "DGX-H100": "h100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "H100-SXM-96GB (HBM2e 2.4TB/s, 500W cap)": "h100-96",
    "H200-SXM-141GB": "h200",
    "GH-96": "gh200",
    "NVIDIA GH200 480GB": "gh200",
    "B200": "b200",
    "B200-SXM": "b200",
    "NVIDIA B300 SXM": "b300",
    "DGX-GB200": "gb200",
    "V100-SXM3-32GB (DGX-2)": "v100-32-sxm3",
    "V100-16": "v100-16",
    "Tesla V100-SXM2-16GB": "v100-16",
    "Titan-RTX": "titan-rtx",
    "NVIDIA TITAN RTX": "titan-rtx",
    "RTX-2080": "rtx2080",
    "GeForce RTX 2080 Ti": "rtx2080ti",
    "RTX-3090": "rtx3090",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "AMD Instinct MI300X": "mi300x",
    "AMD MI355X": "mi355x",
    "Intel Gaudi 2": "gaudi2",
    "Tesla T4": "t4",
    "cpu": "cpu",
}


@pytest.mark.parametrize("written", NAMES)
def test_a_device_is_found_by_what_people_call_it(written: str) -> None:
    assert catalogue.device(written).name == NAMES[written]


WRITTEN = {
    "64xh100": [("h100", 8, 8)],
    "h100x64": [("h100", 8, 8)],
    "8xa100-40": [("a100-40", 1, 8)],
    "2x8xh100": [("h100", 2, 8)],
    "64xh100+32xa100": [("h100", 8, 8), ("a100-80", 4, 8)],
    "4xcpu": [("cpu", 1, 4)],
    "2x2xcpu@ethernet-100m": [("cpu", 2, 2)],
    "12xh100": [("h100", 1, 8), ("h100", 1, 4)],
    "8xmi300x": [("mi300x", 1, 8)],
    "mi300x": [("mi300x", 1, 1)],
    "72xgb200": [("gb200", 18, 4)],
}


@pytest.mark.parametrize("text", WRITTEN)
def test_text_and_tables_say_the_same(text: str, tmp_path: Path) -> None:
    cluster = Cluster.parse(text)
    assert [(g.node.device.name, g.count, g.node.count) for g in cluster.groups] == WRITTEN[text]
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster
    path = tmp_path / "mine.toml"
    path.write_text(tomli_w.dumps(cluster.to_dict()), encoding="utf-8")
    assert Cluster.parse(str(path)) == cluster


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8xh100", "1 node"),
        ("64xh100", "8 nodes with 8xinfiniband-ndr"),
        ("64xa100-80@ethernet-100g", "8 nodes with 1xethernet-100g"),
        ("16xh100@4xinfiniband-hdr:2", "2 nodes with 4xinfiniband-hdr:2"),
        ("8xh100+8xa100-80", "2 nodes with 8xinfiniband-ndr and 8xinfiniband-hdr"),
        ("72xgb200", "18 nodes of one rack"),
        ("144xgb200", "36 nodes with 4xinfiniband-ndr"),
    ],
)
def test_a_plan_says_what_joins_the_nodes(text: str, said: str) -> None:
    assert Cluster.parse(text).nodes_text == said


def test_a_network_is_named_behind_the_devices() -> None:
    assert Cluster.parse("16xh100@4xinfiniband-hdr").fabric().cards == 4
    slow = Cluster.parse("16xh100@ethernet-10g").fabric()
    assert slow.outside is not None and (slow.outside.name, slow.cards) == ("ethernet-10g", 1)


REFUSED = {
    "8xh1000": "did you mean 'h100'",
    "0xh100": "0 devices",
    "": "no cluster",
    "12": "no cluster",
    "h100-60": "h100-pcie",
    "16xh100@infiniband": "unknown link",
    "8xa100-40@pcie4": r"pcie4 joins what is in one; .*\(a100-40, a100-40-pcie\)",
    "16xh100@4xnvlink4": "names the network between nodes",
    "16xh100@": "follows @",
    "64xh100+": "no cluster",
    "missing.toml": "can't be read",
}


@pytest.mark.parametrize("text", REFUSED)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ClusterError, match=REFUSED[text]):
        Cluster.parse(text)


TABLES = {
    "[[group]]\nnodes = 2": "device is missing",
    "[[group]]\ndevice = 'h100'\ncards = 8": "unknown key 'group.0..cards'",
    "[[groups]]\ndevice = 'h100'": "did you mean 'group'",
    "name = 'empty'": r"no \[\[group\]\]",
    "[[group]]\ndevice = 'h100'\nnodes = 0": "at least 1",
    "[[group]]\ndevice = 'h100'\nnodes = 2\noutside = 'none'": "no network",
    "[[group]]\ndevice = 'h100'\nnodes = 2\noutside_count = 0": "carry nothing",
    "[[group]]\ndevice = 'h100'\noutside = 'thin'\n[links.thin]\nbytes_per_s = 0\nlatency_s = 0.1": "without bandwidth",
    "[[group]]\ndevice = 'mine'\n[devices.mine]\nmemory_bytes = 1": "missing",
    "[[group]]\ndevice = 'mine'\n[devices.mine]\nlike = 'h100'\nmemory = 1": "unknown key 'devices.mine.memory'",
    "[[group]]\ndevice = 'h100'\nnodes = 'two'": "whole number",
    "[[group]]\ndevice = 'h100'\ninside = 'none'": "8 devices share it: name a link",
    "[[group]]\ndevice = 'h100'\noutside_count = 'two'": "must be a number of cards",
    "[[group]]\ndevice = 'mine'\n[devices.mine]\nlike = 'h100'\npeak_flops = 3": "devices.mine",
    "[[group]]\ndevice = 'h100'\n[links.mine]\nlike = 'pcie4'\nprotocols = [['fast', 0, 0]]": "links.mine",
    "group = 8": "must be tables",
}


UNKNOWN = """[[group]]
device = 'mine'
count = 4
{inside}
[devices.mine]
memory_bytes = 1e9
bandwidth_bytes_per_s = 1e9
peak_flops = {{ float32 = 1e12 }}
[links.inside]
like = 'nvlink4'
[links.thin]
like = 'ethernet-10g'
"""


@pytest.mark.parametrize(
    ("named", "link"), [("", "pcie4"), ("inside = 'thin'", "thin"), ("inside = 'inside'", "inside")]
)
def test_a_link_that_happens_to_be_called_inside_is_used_where_it_is_named(named: str, link: str) -> None:
    """The devices of an unknown device's node share the link that its group names, else PCIe."""
    cluster = Cluster.from_dict(tomllib.loads(UNKNOWN.format(inside=named)))
    assert cluster.groups[0].node.inside.name == link


@pytest.mark.parametrize("text", TABLES)
def test_a_wrong_table_is_refused(text: str) -> None:
    with pytest.raises(ClusterError, match=TABLES[text]):
        Cluster.from_dict(tomllib.loads(text))


def test_a_table_changes_what_it_names_alone() -> None:
    text = """
    name = "lab"
    [[group]]
    nodes = 4
    device = "capped"
    count = 8
    outside = "thin"
    [devices.capped]
    like = "h100"
    watts = 500
    [links.thin]
    like = "infiniband-ndr"
    share = 0.3
    """
    cluster = Cluster.from_dict(tomllib.loads(text))
    assert cluster.device.watts == 500 and cluster.device.peak("bf16") == catalogue.device("h100").peak("bf16")
    outside = cluster.fabric().outside
    assert outside is not None and outside.rate == 0.3 * catalogue.link("infiniband-ndr").bytes_per_s
    assert cluster.devices == 32 and Cluster.from_dict(cluster.to_dict()) == cluster


def test_a_hostfile_is_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a slots=8  # first\nb slots=8\n\nc slots=4\n", encoding="utf-8")
    cluster = Cluster.from_hostfile(path, "h100", "ethernet-100g")
    assert [(g.count, g.node.count) for g in cluster.groups] == [(2, 8), (1, 4)]
    path.write_text("a slots=eight\n", encoding="utf-8")
    with pytest.raises(ClusterError, match="slots=8"):
        Cluster.from_hostfile(path, "h100")


def test_the_machine_at_hand_is_a_cluster() -> None:
    cluster = Cluster.detected(4, "cpu", cores=2, memory_bytes=2**30)
    assert cluster.devices == 4 and cluster.memory_bytes == 2**30
    assert cluster.device.peak("float32") == catalogue.device("cpu").peak("float32") / 2
    found = Cluster.detected(8, "cuda", name="NVIDIA H100 80GB HBM3", nodes=2)
    assert (found.devices, found.device.name) == (16, "h100")
    with pytest.raises(ClusterError, match="driver's name"):
        Cluster.detected(8, "cuda")


def test_parts_of_a_cluster() -> None:
    cluster = Cluster.parse("16xh100+16xa100-40")
    assert not cluster.uniform and cluster.device.name == "a100-40" and cluster.nodes == 4
    assert cluster.kinds == {"h100": 16, "a100-40": 16} and cluster.device_of(16).name == "a100-40"
    assert cluster.restricted(20).kinds == {"h100": 16, "a100-40": 4}
    assert cluster.without(1).kinds == {"h100": 16, "a100-40": 8}
    assert cluster.without([0, 1]).kinds == {"a100-40": 16} and cluster.subset([0]).uniform
    assert cluster.price_per_hour == pytest.approx(16 * 2.99 + 16 * 1.29)
    for wrong in (lambda: cluster.restricted(33), lambda: cluster.without(4), lambda: cluster.without([7])):
        with pytest.raises(ClusterError):
            wrong()
    with pytest.raises(ClusterError, match="no such rank"):
        cluster.device_of(32)


def test_data_types_fall_back_as_kernels_do() -> None:
    v100, h100 = catalogue.device("v100-16"), catalogue.device("h100")
    assert v100.computes_in("bf16") == "float32" and v100.computes_in("fp16") == "fp16"
    assert h100.computes_in("fp4") == "fp8" and h100.peak("fp32") == 67e12 and h100.share("fp8") == 0.709
    assert v100.share("fp16") == 0.8
    with pytest.raises(ClusterError, match="float64"):
        catalogue.device("gaudi2").peak("float64")
    with pytest.raises(ClusterError, match="unknown data type"):
        h100.peak("fp5")


@pytest.mark.parametrize(
    "wrong", [{"bytes_per_s": 0.0}, {"bytes_per_s": -1.0}, {"latency_s": -1.0}, {"share": 0.0}, {"share": 1.5}]
)
def test_a_link_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ClusterError, match="link thin"):
        Link(**{"name": "thin", "bytes_per_s": 1e9, "latency_s": 1e-6, **wrong})


def test_an_oversubscribed_network_carries_less() -> None:
    plain, half = (Cluster.parse(f"16xh100@infiniband-ndr{ratio}") for ratio in ("", ":2"))
    rates = [cluster.fabric().outside.rate for cluster in (plain, half)]  # type: ignore[union-attr]
    assert rates[1] == pytest.approx(rates[0] / 2)
    assert Cluster.from_dict(half.to_dict()).fabric() == half.fabric() != plain.fabric()
    with pytest.raises(ClusterError, match=r"oversubscription = 0\.5"):
        Cluster.parse("16xh100@infiniband-ndr:0.5")
