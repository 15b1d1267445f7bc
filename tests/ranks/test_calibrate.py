"""The machine at hand is measured by real ranks; what comes of it is a whole calibration that a plan can ask."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from pathlib import Path

import pytest
import torch

from meshwright import CalibrateConfig, NodeOptions, calibrate
from meshwright.calibrate import compute, host, machine
from meshwright.calibrate.clock import DeviceTimer
from meshwright.calibrate.collectives import KINDS, placements
from meshwright.calibrate.host import host_times
from meshwright.calibrate.machine import fastest
from meshwright.cli.calibrate_output import calibration_lines
from meshwright.cluster.calibration import FORMS, Calibration
from meshwright.cluster.cluster import Cluster
from meshwright.errors import ConfigError
from meshwright.jobs.machines import Machines, cluster_of_machines, run_history_file
from meshwright.jobs.progress import silently
from meshwright.launch.devices import Devices
from meshwright.launch.machine import calibration_folder, machine_facts, this_cluster
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.work import measure_model
from meshwright.spec.model_shape import ModelWork

TINY = {
    "tokens": (8, 16),
    "widths": (8,),
    "sequences": (16,),
    "heads": (2,),
    "head_sizes": (8,),
    "elements": (64, 4096),
    "messages": (256, 4096),
    "dtypes": ("float32",),
    "window_s": 0.0005,
    "passes": 2,
}


def test_the_machine_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "QUICK", TINY)
    found = calibrate(CalibrateConfig(devices=2, quick=True, out=str(tmp_path / "mine.json")), say=silently)
    assert found is not None
    measured, path = found.calibration, found.path
    assert Calibration.load(path) == measured and measured.ranks == 2
    for form in FORMS:
        for busy in (True, False):
            assert measured.matmul_s(8, 8, 8, "float32", form, busy) > 0
    for name in ("copy", "gelu", "gelu_backward", "layer_norm_backward", "cross_entropy", "embedding_backward"):
        assert measured.operation_s(name, 4096) > 0
    assert measured.attention_s(2, 16, 8, "float32", backward=True) > 0
    assert measured.optimizer_s(4096) > 0 and measured.launch_s > 0 and measured.overlap is not None
    for name in ("tanh", "sum", "fill", "loss"):
        assert measured.operation_s(name, 4096) > 0
    assert measured.pace_s > 0 and measured.pace_spread >= 0 and measured.host_s("wait") >= 0
    for kind in KINDS:
        assert measured.covers(kind, 2)
    cluster = Cluster.detected(2, "cpu", cores=2).calibrated(measured)
    assert cluster.collective_s("all_reduce", 4096, 1, 2) == measured.collective_s("all_reduce", 4096, 2)
    assert any("all_reduce" in line for line in calibration_lines(measured, path))


def test_this_machine_is_found_with_what_was_measured_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    devices = Devices(kind="cpu", count=2, found=2, cores=2)
    assert this_cluster(devices).calibration is None
    measured = Calibration(machine=machine_facts(devices, 2), ranks=2, launch_s=1e-3)
    measured.save(calibration_folder())
    cluster = this_cluster(devices)
    assert cluster.calibration == measured and cluster.device.launch_s == 1e-3
    two = this_cluster(devices, nodes=2)
    assert two.calibration == measured and two.devices == 4, "what a node computes is known; the network is not"
    over = Calibration(machine=machine_facts(devices, 4, 2), ranks=4, nodes=2, launch_s=2e-3)
    over.save(calibration_folder())
    assert this_cluster(devices, nodes=2).calibration == over


def test_a_run_is_planned_for_its_nodes_and_what_is_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    devices = Devices(kind="cpu", count=2, found=2, cores=2)
    machines = Machines(devices=devices, ranks=6, nodes=3, network="ethernet-1g")
    times = [
        cluster_of_machines(one).collective_s("all_reduce", 1e8, 1, one.ranks)
        for one in (machines, dataclasses.replace(machines, network="ethernet-100m"), machines.for_ranks(2))
    ]
    assert times[1] > 8 * times[0] > 8 * times[2]
    left = machines.for_ranks(5)
    assert (left.nodes, cluster_of_machines(left).devices) == (3, 5), "two full nodes, and half of another"
    assert machines.for_ranks(4).nodes == 2
    assert run_history_file(machines)[1] != run_history_file(dataclasses.replace(machines, nodes=1))[1]


def unasked_port() -> int:
    """Returns a free port below those that systems hand out by themselves, so that nobody is given it meanwhile."""
    for port in range(20000 + os.getpid() % 5000, 32000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


def test_nodes_measure_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "QUICK", TINY)
    # Each node would take all cores of the machine, and their threads would wait for each other's in circles.
    monkeypatch.setattr(Devices, "threads", lambda self, local_world: 1)
    meet = f"127.0.0.1:{unasked_port()}"

    def measure(node: int) -> None:
        words = NodeOptions(nodes=2, node=node, slots=None, meet=meet)
        calibrate(CalibrateConfig(devices=2, quick=True, out=str(tmp_path / f"{node}.json")), nodes=words, say=silently)

    pid = os.fork()
    if not pid:
        status = 1
        try:
            measure(1)
            status = 0
        finally:
            os._exit(status)
    measure(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    first, second = (Calibration.load(tmp_path / f"{node}.json") for node in range(2))
    assert first == second and (first.ranks, first.nodes) == (2, 2)
    assert first.covers("all_reduce", 2, 2) and not first.covers("all_reduce", 2, 1)
    with pytest.raises(ConfigError, match="as many ranks"):
        calibrate(CalibrateConfig(devices=3), nodes=NodeOptions(nodes=2, node=0, meet=meet))
    with pytest.raises(ConfigError, match="give address and port"):
        calibrate(CalibrateConfig(), nodes=NodeOptions(nodes=2, node=0, slots=1, meet="127.0.0.1"))


def test_every_axis_of_a_mesh_has_its_placement() -> None:
    assert placements(4, 4) == [(1, 4, 1), (1, 2, 1), (2, 2, 1)]
    assert placements(4, 2) == [(1, 4, 2), (1, 2, 1), (2, 2, 2)]
    assert len(placements(64, 8)) == 12 and placements(1, 1) == []


def test_fewer_sizes_keep_the_smallest() -> None:
    fewer = compute.CPU.thinned()
    assert fewer.tokens == (16, 512) and fewer.widths == (32, 512) and fewer.messages == compute.CPU.messages


def test_the_lesser_of_two_times_of_a_row_counts() -> None:
    first = {"operations": [("add", "float32", True, 8, 2.0), ("add", "bf16", True, 8, 5.0)], "launch_s": 1.0}
    again = {"operations": [("add", "float32", True, 8, 1.0)], "launch_s": 3.0}
    found = fastest(first, again)
    assert found["operations"] == [("add", "float32", True, 8, 1.0), ("add", "bf16", True, 8, 5.0)]
    assert found["launch_s"] == 1.0


def test_processor_time_counts_for_every_rank_of_a_core() -> None:
    def work() -> None:
        torch.ones(200_000).sum()

    alone, shared = (DeviceTimer(torch.device("cpu"), 0.01, sharing=ranks).seconds(work) for ranks in (1.0, 50.0))
    assert 0 < alone < shared


@pytest.mark.parametrize(("sharing", "counts"), [(0.0, 1.0), (1.0, 1.0), (2.2, 3.0)])
def test_the_middle_chunk_counts_where_a_rank_has_less_than_a_core(
    monkeypatch: pytest.MonkeyPatch, sharing: float, counts: float
) -> None:
    timer = DeviceTimer(torch.device("cpu"), 100.0, sharing=sharing)
    chunks = iter([9.0, 4.0, 1.0, 3.0, 2.0, 5.0])
    monkeypatch.setattr(DeviceTimer, "timed", lambda *_: next(chunks))
    assert timer.seconds(lambda: None) == counts
    long_runs = iter([300.0, 100.0, 300.0])
    monkeypatch.setattr(DeviceTimer, "timed", lambda *_: next(long_runs))
    assert timer.seconds(lambda: None) == 100.0 * counts


def test_what_the_runtime_takes_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Made(Calibration):
        def operation_s(self, *args: object, **options: object) -> float:
            return 0.0

        def matmul_s(self, *args: object, **options: object) -> float:
            return 0.0

        def attention_s(self, *args: object, **options: object) -> float:
            return 0.0

        def collective_s(self, *args: object, **options: object) -> float:
            return 0.0

    def work_of(model: ModelConfig, rows: int) -> ModelWork:
        return measure_model(build_meta(model), rows, 8, torch.float32)

    monkeypatch.setattr(host, "STEPS", 2)
    found = dict(host_times(Made(machine={}, ranks=2), Devices(kind="cpu", count=2, found=2, cores=2), work_of))
    assert {"operator_forward", "operator_backward", "shard_unit", "action", "step"} <= set(found)
    assert found["operator_forward"] > 0 and all(seconds >= 0 for seconds in found.values())
