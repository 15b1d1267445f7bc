"""What a practice run is taken to have lasted, and whom it teaches."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cluster.calibration import Calibration
from meshwright.jobs.machines import Machines, run_history_file
from meshwright.jobs.practice import steady_s
from meshwright.launch.devices import Devices
from meshwright.launch.machine import calibration_folder, machine_facts


def test_a_step_counts_at_the_speed_that_was_calibrated() -> None:
    calm, hurried = (1.0, 0.01, 0.9), (2.2, 0.02, 0.9)
    assert steady_s([[calm, hurried], [(0.9, 0.01, 0.8), (2.0, 0.02, 0.9)]], 0.01) == pytest.approx(1.0)
    assert steady_s([[hurried, hurried]], 0.01) == pytest.approx(1.1), "the machine was half as fast"
    assert steady_s([[hurried, calm]], 0.0) == pytest.approx(2.2), "as it is, where no pace is known"


def test_another_calibration_starts_to_learn_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    devices = Devices(kind="cpu", count=2, found=2, cores=2)
    names = [run_history_file(Machines(devices=devices, ranks=2))[1]]
    for launch_s in (1e-3, 2e-3):
        Calibration(machine=machine_facts(devices, 2), ranks=2, launch_s=launch_s).save(calibration_folder())
        names.append(run_history_file(Machines(devices=devices, ranks=2))[1])
    assert len(set(names)) == 3
