"""A GPU is calibrated to the end: every table that prices a layout is there, and the host's launches beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshwright.calibrate import clock
from meshwright.calibrate.host import host_times
from meshwright.cluster.calibration import FORMS, Calibration
from meshwright.cluster.cluster import Cluster
from meshwright.launch.devices import found_devices
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.work import measure_model
from meshwright.spec.model_shape import ModelWork
from tests.ghost.runs import command, has_ghost

pytestmark = [pytest.mark.skipif(not has_ghost(), reason="runs under the simulated GPU: make ghost")]
EVENT_S = 1e-3
"""Seconds between any two events of the simulated device."""


def test_a_quick_calibration_is_the_device_s_own_seconds(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The simulated device copies by this machine's cores, and what it says of time doesn't depend on sizes.
    monkeypatch.setattr(clock, "BLOCKER", 256)
    path = root / "measured.json"
    run = command(root, "calibrate", ["calibrate", "--quick", "--devices", "1", "--out", str(path)], 1)
    assert run.status == 0, run.text
    found = Calibration.load(path)
    assert {row[1] for row in found.matmul} == set(FORMS) and {row[0] for row in found.matmul} == {"bf16", "float32"}
    # A window of two events holds a run or more of each: no figure is the host's, which takes longer here or shorter.
    seconds = [row[-1] for row in (*found.matmul, *found.operations, *found.optimizer)]
    assert all((EVENT_S / value) == pytest.approx(round(EVENT_S / value)) for value in seconds)
    assert found.launch_s > 0 and found.launch_s != EVENT_S
    assert found.has_matmul("fp16") and Cluster.parse("1xh100").calibrated(found).device.source == "calibration"


def test_a_host_is_timed_with_what_is_offloaded_to_it() -> None:
    def work_of(model: ModelConfig, rows: int) -> ModelWork:
        return measure_model(build_meta(model), rows, int(model.context or 0), torch.float32)

    devices = found_devices(None)
    found = host_times(Calibration(machine={"kind": "cuda"}, ranks=1), devices.only([0]), work_of)
    made = Calibration(machine={"kind": "cuda", "device": "h100"}, ranks=1, host=found)
    host = Cluster.parse("1xh100").calibrated(made).host
    # A billion weights: 28 bytes each are updated, 4 read for a norm.
    assert host is not None and host.kernel_bytes_per_s == pytest.approx(28e9 / dict(found)["update"])
    assert host.norm_bytes_per_s == pytest.approx(4e9 / dict(found)["norm"])
