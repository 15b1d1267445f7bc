"""Measured tables: what lies between their points, what they replace, how they are kept."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.cluster.calibration import Calibration, machine_key
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.health import shortfalls
from meshwright.errors import ClusterError

RATE = 5e10
SIZES = (16, 128, 1024)
TABLES = ("matmul", "attention", "operations")
MACHINE = {"kind": "cpu", "device": "some processor", "cores": 2, "ranks": 4, "nodes": 1}


def made(**changes: Any) -> Calibration:
    """A machine whose products run at one rate, and whose messages take 1 ms and a byte in a nanosecond."""
    products = [
        ("float32", form, True, m, n, k, 2.0 * m * n * k / RATE)
        for form in ("nt", "nn", "tn")
        for m in SIZES
        for n in SIZES
        for k in SIZES
    ]
    messages = [
        ("all_reduce", ranks, 1, before, size, 1e-3 + size * 1e-9)
        for ranks, before in ((2, 1), (2, 2), (4, 1))
        for size in (1e3, 1e5, 1e7)
    ]
    values: dict[str, Any] = {
        "machine": MACHINE,
        "ranks": 4,
        "launch_s": 1e-6,
        "matmul": products,
        "attention": [
            ("float32", True, 4, s, e, s * s * e * 1e-9, 2 * s * s * e * 1e-9) for s in (64, 256) for e in (32, 64)
        ],
        "operations": [("copy", "float32", True, count, count / 1e9) for count in (1000, 1000000)],
        "optimizer": [(1000, 1e-5), (1000000, 1e-2)],
        "collectives": messages,
    }
    return Calibration(**values | changes)


def test_between_points_a_constant_rate_stays_constant() -> None:
    found = made()
    sizes = np.array([16, 50, 300, 5000])
    assert found.matmul_s(sizes, 700, 33, "fp32") == pytest.approx(2.0 * sizes * 700 * 33 / RATE)
    assert found.matmul_s(1, 1, 1, "float32") == 1e-6  # a launch
    assert found.attention_s(4, 128, 48, "float32") == pytest.approx(128 * 128 * 48 * 1e-9)
    assert found.attention_s(8, 64, 32, "float32", backward=True) == pytest.approx(4 * 64 * 64 * 32 * 1e-9)
    assert found.operation_s("copy", 1e4) == pytest.approx(1e-5)
    assert found.bandwidth_bytes_per_s(4e5) == pytest.approx(8e9)
    assert found.optimizer_s(1e5) == pytest.approx(1e-3)


def test_messages_start_with_latency_and_end_with_the_last_rate() -> None:
    found = made()
    assert found.collective_s("all_reduce", 1, 4) == pytest.approx(1e-3, rel=1e-2)
    assert found.collective_s("all_reduce", 1e7, 4) == pytest.approx(1.1e-2)
    assert found.collective_s("all_reduce", 1e9, 4) == pytest.approx(1.1)
    assert found.collective_s("all_reduce", 1e9, 1) == 0.0
    times = found.collective_s("all_reduce", np.logspace(0, 9, 50), 2)
    assert (np.diff(times) >= 0).all()


def test_a_disturbed_short_message_is_not_believed() -> None:
    rows = [("send", 2, 1, 1, 1e3, 5e-2), ("send", 2, 1, 1, 1e6, 1e-3)]
    assert made(collectives=rows).collective_s("send", 1e3, 2) == pytest.approx(1e-3)


def test_what_was_not_measured_is_refused() -> None:
    found = made()
    assert found.covers("all_reduce", 2) and not found.covers("all_reduce", 2, 2) and not found.covers("send", 2)
    assert found.has_matmul("fp32") and not found.has_matmul("bf16") and not found.has_operation("gelu")
    for wrong in (
        lambda: found.matmul_s(1, 1, 1, "bf16"),
        lambda: found.collective_s("send", 1, 2),
        lambda: found.operation_s("gelu", 1),
        lambda: made(optimizer=()).optimizer_s(1),
    ):
        with pytest.raises(ClusterError, match="calibration has no"):
            wrong()
    assert found.matmul_s(16, 16, 16, "float32", busy=False) == found.matmul_s(16, 16, 16, "float32")


def test_it_is_kept_by_the_machine(tmp_path: Path) -> None:
    found = made()
    path = found.save(tmp_path / "cache")
    assert path.name == f"{machine_key(MACHINE)}.json" and Calibration.load(path) == found
    assert Calibration.find(tmp_path / "cache", dict(reversed(MACHINE.items()))) == found
    assert Calibration.find(tmp_path / "cache", MACHINE | {"ranks": 2}) is None


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"version": 0}, "version"),
        ({"speed": 1}, "unknown key 'speed'"),
        ({"matmul": [["float32", "nt", True, 1, 1]]}, "can't be read"),
        ({"matmul": [["float32", "nt", True, 1, 1, 1, 0.1], ["float32", "nt", True, 2, 2, 2, 0.1]]}, "full grid"),
        ({"collectives": [["send", 2, 1, 1, 8, -1.0]]}, "above 0"),
    ],
)
def test_a_damaged_file_is_refused(change: dict[str, Any], match: str, tmp_path: Path) -> None:
    path = tmp_path / "made.json"
    path.write_text(json.dumps(made().to_json() | change), encoding="utf-8")
    with pytest.raises(ClusterError, match=match):
        Calibration.load(path)


def test_ranks_of_a_node_share_its_quota_as_one_pool() -> None:
    """Ranks that share cores take turns; one that has half of a core to itself stands still meanwhile."""

    def alone_speedup(cores: float, ranks: int, nodes: int = 1, kind: str = "cpu") -> float:
        machine = MACHINE | {"cores": cores, "ranks": ranks, "nodes": nodes, "kind": kind}
        return Calibration(machine=machine, ranks=ranks, nodes=nodes).alone_speedup

    assert Calibration(machine=MACHINE, ranks=4).crowd == 2.0 == alone_speedup(2, 4)
    assert Calibration(machine=MACHINE | {"cores": 0.5}, ranks=4, nodes=4).crowd == 2.0
    assert alone_speedup(0.5, 4, nodes=4) == 1.0
    assert alone_speedup(4, 4) == alone_speedup(1, 4, kind="cuda") == 1.0
    # No rank takes more than a core of a quota, nor more than the quota.
    assert alone_speedup(1.0, 2) == 2.0 and alone_speedup(1.01, 2) == pytest.approx(2.0 / 1.01)
    assert alone_speedup(1.5, 2) == pytest.approx(4 / 3) and alone_speedup(0.5, 2) == 2.0
    assert alone_speedup(1.5, 4, nodes=2) == pytest.approx(4 / 3)


def test_a_cluster_takes_what_was_measured_on_it() -> None:
    plain = Cluster.parse("4xcpu")
    cluster = plain.calibrated(made())
    assert cluster.device.peak("float32") * cluster.device.share("float32") == pytest.approx(RATE)
    assert cluster.device.bandwidth_bytes_per_s * cluster.device.memory_share == pytest.approx(8e9)
    assert cluster.collective_s("all_reduce", 1e7, 1, 4) == pytest.approx(1.1e-2)
    found = cluster.seconds("all_reduce", 1e7, np.array([1, 2, 4]), 1)
    assert found == pytest.approx([0.0, 1.1e-2, 1.1e-2])
    # What no table covers goes by links that were fitted to the tables.
    assert cluster.collective_s("broadcast", 1e7, 1, 4) == pytest.approx(
        plain.collective_s("broadcast", 1e7, 1, 4), rel=9
    )
    assert cluster.fabric().inside.source == "calibration"
    smaller = cluster.restricted(2)
    assert smaller.collective_s("all_reduce", 1e7, 1, 2) != pytest.approx(1.1e-2, rel=1e-6)
    with pytest.raises(ClusterError, match="some processor"):
        Cluster.parse("8xh100").calibrated(made())


def test_a_sick_network_is_named() -> None:
    cluster = Cluster.parse("16xh100")
    healthy = cluster.collective_s("all_reduce", 1e9, 8, 2)
    rows = [
        ("all_reduce", 2, 2, 8, 1e9, healthy * 1.5),
        ("all_gather", 16, 2, 1, 1e9, 1.0),
        ("send", 2, 1, 1, 1e3, 1.0),
    ]
    found = list(shortfalls(made(collectives=rows), cluster))
    assert len(found) == 1 and "all_gather over 16 ranks on 2 nodes" in found[0] and "953.7 MiB/s" in found[0]


def test_rows_are_added_by_what_they_measured() -> None:
    more = dataclasses.replace(
        made(), matmul=(), collectives=(("send", 2, 1, 1, 1e3, 1e-3),), optimizer=((1000, 2e-5),)
    )
    both = made().merged(more)
    assert both.covers("send", 2) and both.covers("all_reduce", 4) and both.optimizer_s(1000) == pytest.approx(2e-5)


def test_on_a_gpu_one_of_two_16_bit_types_stands_for_the_other() -> None:
    rows = made(machine=MACHINE | {"kind": "cuda"}).to_json()
    rows |= {name: [[cell if cell != "float32" else "bf16" for cell in row] for row in rows[name]] for name in TABLES}
    on_gpu, on_cores = (Calibration.from_json(rows | {"machine": MACHINE | {"kind": kind}}) for kind in ("cuda", "cpu"))
    assert on_gpu.has_matmul("fp16") and on_gpu.has_attention("half") and on_gpu.has_operation("copy", "fp16")
    assert on_gpu.matmul_s(128, 128, 128, "fp16") == on_gpu.matmul_s(128, 128, 128, "bf16")
    assert on_gpu.attention_s(4, 128, 48, "fp16") == on_gpu.attention_s(4, 128, 48, "bf16")
    assert on_gpu.bandwidth_bytes_per_s(4e5, "fp16") == pytest.approx(4e9)
    assert not on_gpu.has_matmul("float32") and not on_cores.has_matmul("fp16")
