"""Every link, node and device of the catalogue: sourced, typed, and times that rise with bytes and ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshwright.cluster import catalogue
from meshwright.cluster.device import FALLBACKS
from meshwright.cluster.link import Link
from meshwright.cluster.node import named_node, standard_node
from meshwright.cluster.traffic import COLLECTIVES, Fabric

SIZES = np.logspace(0, 11, 45)
RANKS = np.array([2, 3, 4, 6, 8, 16, 64])
NODES = np.array([2, 3, 4, 8, 64, 512])


def fabrics(link: Link) -> list[Fabric]:
    """The link inside nodes, and between them."""
    near = catalogue.link("nvlink3")
    return [
        Fabric(inside=link, outside=catalogue.link("infiniband-hdr"), devices=8, cards=8),
        Fabric(inside=near, outside=link, devices=8, cards=1),
        Fabric(inside=near, outside=link, devices=8, cards=8),
    ]


@pytest.mark.parametrize("name", catalogue.links())
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_time_rises_and_never_is_under_latency(name: str, kind: str) -> None:
    link, price = catalogue.link(name), COLLECTIVES[kind]
    for fabric in fabrics(link):
        local = price(SIZES, RANKS[:, None], 1, fabric, 1)
        # Where every pair has a wire of its own, more members have more wires.
        assert fabric.inside.peers or (np.diff(local, axis=0) >= -1e-12).all(), "falls with ranks of a node"
        assert (local >= fabric.inside.latency_s).all()
        for inside, sharing in itertools.product((1, 2, 8), (1, 8)):
            taken = price(SIZES, inside, NODES[:, None], fabric, sharing)
            assert (np.diff(taken, axis=1) >= -1e-15).all(), "falls with bytes"
            assert (np.diff(taken, axis=0) >= -1e-12).all(), "falls with nodes"
            assert fabric.outside is not None and (taken >= fabric.outside.latency_s).all()
            assert taken[3, 5] == price(SIZES[5], inside, NODES[3], fabric, sharing)


@pytest.mark.parametrize("name", catalogue.links())
def test_a_link_has_a_source(name: str) -> None:
    link = catalogue.link(name)
    assert link.source and link.rate < link.bytes_per_s and link.latency_s > 0


@pytest.mark.parametrize("name", catalogue.devices())
def test_a_device_is_whole(name: str) -> None:
    entry = catalogue.entry(name)
    device = entry.device
    assert device.source and device.watts > 0 and device.cache_bytes > 0
    assert set(device.peak_flops) <= set(FALLBACKS)
    assert catalogue.entry(device.name).device is device
    assert device.peak("float32") <= device.peak("bf16") or device.computes_in("bf16") == "float32" or name == "cpu"
    node = standard_node(name)
    assert node.device is device and node.outside is not None and node.host_link is not None
    assert standard_node(name, 1).count == 1


@pytest.mark.parametrize("name", catalogue.nodes())
def test_a_node_is_whole(name: str) -> None:
    assert catalogue.nodes()[name]["source"]
    node = named_node(name, catalogue.device("h100"))
    assert node.host_memory_bytes > 2**36 and node.outside_count > 0
