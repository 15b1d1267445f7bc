"""The machine at hand is measured by real ranks; what comes of it is a whole calibration that a plan can ask."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cli.calibrate import CalibrateConfig, calibrate
from meshwright.cli.calibrated import told
from meshwright.cluster.calibration import FORMS, Calibration
from meshwright.cluster.cluster import Cluster
from meshwright.launch.devices import Devices
from meshwright.launch.machine import calibration_folder, machine_facts, this_cluster
from meshwright.measure import compute
from meshwright.measure.wires import KINDS, placements

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
}


def test_the_machine_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.measure.machine.QUICK", TINY)
    found = calibrate(CalibrateConfig(devices=2, quick=True, out=str(tmp_path / "mine.json")), quiet=True)
    assert found is not None
    measured, path = found
    assert Calibration.load(path) == measured and measured.ranks == 2
    for form in FORMS:
        for busy in (True, False):
            assert measured.matmul_s(8, 8, 8, "float32", form, busy) > 0
    for name in ("copy", "gelu", "gelu_backward", "layer_norm_backward", "cross_entropy", "embedding_backward"):
        assert measured.operation_s(name, 4096) > 0
    assert measured.attention_s(2, 16, 8, "float32", backward=True) > 0
    assert measured.optimizer_s(4096) > 0 and measured.launch_s > 0 and measured.overlap is not None
    for kind in KINDS:
        assert measured.covers(kind, 2)
    cluster = Cluster.detected(2, "cpu", cores=2).calibrated(measured)
    assert cluster.collective_s("all_reduce", 4096, 1, 2) == measured.collective_s("all_reduce", 4096, 2)
    assert any("all_reduce" in line for line in told(measured, path))


def test_this_machine_is_found_with_what_was_measured_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    devices = Devices(kind="cpu", count=2, found=2, cores=2)
    assert this_cluster(devices).calibration is None
    measured = Calibration(machine=machine_facts(devices, 2), ranks=2, launch_s=1e-3)
    measured.save(calibration_folder())
    cluster = this_cluster(devices)
    assert cluster.calibration == measured and cluster.device.launch_s == 1e-3
    assert this_cluster(devices, nodes=2).calibration is None


def test_every_axis_of_a_mesh_has_its_placement() -> None:
    assert placements(4, 4) == [(1, 4, 1), (1, 2, 1), (2, 2, 1)]
    assert placements(4, 2) == [(1, 4, 2), (1, 2, 1), (2, 2, 2)]
    assert len(placements(64, 8)) == 12 and placements(1, 1) == []


def test_fewer_sizes_keep_the_smallest() -> None:
    fewer = compute.CPU.fewer()
    assert fewer.tokens == (16, 1024) and fewer.widths == (32, 512) and fewer.messages == compute.CPU.messages
