"""What a group crosses, and what its collectives take, against the ranks counted one by one and known figures."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.cluster.cluster import Cluster
from meshwright.cluster.link import Link
from meshwright.cluster.traffic import Fabric, all_gather_s, all_reduce_s, all_to_all_s, collective_s, send_s, span
from meshwright.errors import ClusterError


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_a_span_is_what_counting_gives(devices: int) -> None:
    world = 32
    for before in (1, 2, 4, 8, 16, 32):
        for degree in (1, 2, 4, 8, 16, 32):
            if before * degree > world:
                continue
            groups = [
                [block + offset + before * index for index in range(degree)]
                for block in range(0, world, before * degree)
                for offset in range(before)
            ]
            inside, nodes, sharing = span(before, degree, devices, world)
            touched = [[rank // devices for rank in group] for group in groups]
            assert {len(set(places)) for places in touched} == {nodes}
            assert {places.count(places[0]) for places in touched} == {inside}
            if nodes > 1:
                assert sum(0 in places for places in touched) == sharing


def test_a_span_takes_arrays_and_ragged_groups() -> None:
    inside, nodes, sharing = span(np.array([1, 8, 2]), np.array([8, 4, 8]), 8, 32)
    assert inside.tolist() == [8, 1, 4] and nodes.tolist() == [1, 4, 2] and sharing.tolist() == [1, 8, 2]
    assert span(1, 6, 8, 6) == (6, 1, 1)
    assert span(1, 6, 8, 24)[1] == 2


WIRE = Link(name="wire", bytes_per_s=1e9, latency_s=1e-5)
FAST = Link(name="fast", bytes_per_s=1e11, latency_s=1e-6)


def test_rings_take_what_the_formula_says() -> None:
    flat = Fabric(inside=WIRE, outside=None, devices=4, cards=0)
    assert all_reduce_s(4e8, 4, 1, flat) == pytest.approx(2 * (0.75 * 0.4 + 3e-5))
    assert all_gather_s(4e8, 4, 1, flat) == pytest.approx(0.75 * 0.4 + 3e-5)
    assert all_to_all_s(4e8, 4, 1, flat) == pytest.approx(0.75 * 0.4 + 3e-5)
    assert send_s(4e8, 2, 1, flat) == pytest.approx(0.4 + 1e-5)
    assert all_reduce_s(4e8, 1, 1, flat) == 0.0


def test_groups_share_the_cards_of_a_node() -> None:
    fabric = Fabric(inside=FAST, outside=WIRE, devices=8, cards=4)
    alone, shared = all_gather_s(1e9, 1, 8, fabric, 1), all_gather_s(1e9, 1, 8, fabric, 8)
    assert shared == pytest.approx(2 * alone, rel=1e-3)  # eight devices on four cards
    whole = all_gather_s(1e9, 8, 8, fabric, 1)
    assert whole == pytest.approx(alone / 4, rel=0.2)  # eight members reach all four cards


def test_a_switch_that_sums_beats_the_ring() -> None:
    cluster = Cluster.parse("8xh100")
    busy = 2 * 7 / 8 * 1e9 / cluster.collective_s("all_reduce", 1e9, 1, 8)
    assert busy == pytest.approx(458e9, rel=0.05)  # bus bandwidth measured on such nodes


def test_a_mesh_gives_a_pair_its_own_wire_alone() -> None:
    mesh = Link(name="mesh", bytes_per_s=7e9, latency_s=1e-6, peers=7)
    fabric = Fabric(inside=mesh, outside=None, devices=8, cards=0)
    assert send_s(1e9, 2, 1, fabric) == pytest.approx(1.0, rel=1e-4)
    assert all_gather_s(1e9, 2, 1, fabric) == pytest.approx(0.5, rel=1e-4)
    assert all_gather_s(1e9, 8, 1, fabric) == pytest.approx(0.125, rel=1e-3)


def test_the_first_slow_link_is_what_counts() -> None:
    fast, mixed = Cluster.parse("16xh100").fabric(), Cluster.parse("8xh100+8xa100").fabric()
    assert mixed.inside.rate < fast.inside.rate
    assert mixed.outside is not None and mixed.outside.name == "infiniband-hdr"


def test_racks_join_nodes() -> None:
    assert Cluster.parse("72xgb200").span(1, 72) == (72, 1, 1)
    assert Cluster.parse("256xgb200").domain == 64
    assert Cluster.parse("144xgb200").span(72, 2) == (1, 2, 72)


def test_nonsense_is_refused() -> None:
    fabric = Cluster.parse("8xh100").fabric()
    with pytest.raises(ClusterError, match="did you mean 'all_reduce'"):
        collective_s("allreduce", 1.0, 8, 1, fabric)
    with pytest.raises(ClusterError, match="no network"):
        collective_s("all_reduce", 1.0, 8, 2, Fabric(inside=WIRE, outside=None, devices=8, cards=0))
