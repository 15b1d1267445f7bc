"""A GPU is calibrated to the end: every table that prices a layout is there, and the host's launches beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cluster.calibration import FORMS, Calibration
from meshwright.cluster.cluster import Cluster
from tests.ghost.runs import command, has_ghost

pytestmark = [pytest.mark.skipif(not has_ghost(), reason="runs under the simulated GPU: make ghost")]
EVENT_S = 1e-3
"""Seconds between any two events of the simulated device."""


def test_a_quick_calibration_is_the_device_s_own_seconds(root: Path) -> None:
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
