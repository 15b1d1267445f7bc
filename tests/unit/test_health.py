"""Health of machines: what a simulated driver and file system report is sampled, told and shown."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.doctor import nvml
from meshwright.jobs.health import HealthSampler, find_worsened
from meshwright.monitor.energy import joules_per_token
from meshwright.monitor.health import health
from meshwright.monitor.prometheus import format_metrics
from meshwright.monitor.rundir import read_run
from tests.faults.test_doctor import FAKE_NVML, build
from tests.runs import call, events, rows, words, write_corpus
from tests.unit.test_monitor_report import make_run

SENSORS = r"""
static int hot = 0;
void heat(int to) { hot = to; }
struct rates { unsigned gpu, memory; };
int nvmlDeviceGetUtilizationRates(void *gpu, struct rates *r) { r->gpu = 75; r->memory = 3; return 0; }
int nvmlDeviceGetClockInfo(void *gpu, int type, unsigned *mhz) { *mhz = type == 1 ? (hot ? 345 : 1980) : 7; return 0; }
int nvmlDeviceGetPowerUsage(void *gpu, unsigned *mw) { *mw = 412500; return 0; }
int nvmlDeviceGetTotalEnergyConsumption(void *gpu, unsigned long long *mj) { *mj = hot ? 9000000 : 4000000; return 0; }
int nvmlDeviceGetTemperature(void *gpu, int sensor, unsigned *celsius) { *celsius = hot ? 91 : 60; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *gpu, unsigned long long *r) {
  *r = hot && gpu == (void *)1 ? 0x41 : 1; return 0; }
"""


def write(path: Path, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{value}\n")


def test_a_hot_gpu_a_faulty_wire_and_energy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = build(FAKE_NVML + SENSORS, tmp_path / "libnvidia-ml.so.1")
    monkeypatch.setattr(nvml, "LIBRARY", str(library))
    root = tmp_path / "root"
    write(root / "sys/class/net/eth0/statistics/rx_errors", 3)
    write(root / "sys/class/infiniband/mlx5_0/ports/1/counters/symbol_error", 0)
    zone = root / "sys/class/powercap/intel-rapl:0"
    write(zone / "energy_uj", 900_000_000)
    write(zone / "max_energy_range_uj", 1_000_000_000)
    write(root / "sys/class/powercap/intel-rapl:0:0/energy_uj", 5)
    sampler = HealthSampler(root)
    first = sampler.sample() | {"step": 10, "tokens": 1000}
    gpu = first["gpus"][0]
    assert [gpu[name] for name in ("utilisation", "celsius", "clock_hz", "watts", "joules")] == [
        0.75, 60, 1980e6, 412.5, 4000.0
    ]  # fmt: skip
    assert first["nics"] == {"eth0": 3, "mlx5_0:1": 0} and first["cpu_joules"] == 0.0
    # The third GPU of the simulated driver is lost, which is told once.
    assert [fields["device"] for _, fields in find_worsened(None, first)] == ["GPU 2"]
    ctypes.CDLL(str(library)).heat(1)
    write(root / "sys/class/net/eth0/statistics/rx_errors", 8)
    write(zone / "energy_uj", 100_000_000)  # wrapped around
    second = sampler.sample() | {"step": 20, "tokens": 6000}
    assert second["cpu_joules"] == pytest.approx(200.0)
    assert [(kind, fields["device"], fields["why"]) for kind, fields in find_worsened(first, second)] == [
        ("device_slowed", "GPU 0", "thermal slowdown"),
        ("device_errors", "network eth0", "5 more errors"),
    ]
    assert list(find_worsened(second, second)) == []
    # Three GPUs answer: 5,000 J each, and 200 J of the processor, over 5,000 tokens.
    assert joules_per_token({"node-0": [first, second]}) == pytest.approx(15_200 / 5000)
    run = make_run(tmp_path / "run", 20)
    (run / "health").mkdir()
    (run / "health" / "node-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (first, second)))
    (run / "health" / "node-1.jsonl").symlink_to("/etc/passwd")
    text = "".join(health(run))
    assert "thermal slowdown" in text and "345 MHz" in text and "3.04 J a token" in text and "network eth0" in text
    metrics = format_metrics(read_run(run))
    host = second["host"]
    assert f'meshwright_gpu_slowed{{host="{host}",gpu="0"}} 1.0' in metrics
    assert f'meshwright_network_errors_total{{host="{host}",device="eth0"}} 8.0' in metrics
    assert "meshwright_energy_joules_per_token 3.04" in metrics
    (run / "health" / "node-0.jsonl").write_text('{"gpus": 3, "nics": [1], "tokens": "x", "cpu_joules": {}}\n')
    assert health(run) == [] and "meshwright_gpu" not in format_metrics(read_run(run))


def test_a_run_samples_beside_its_ranks_and_leaves_no_process(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.txt")
    argv = words(tmp_path, "run", "--monitor.health-s", "1", "--train.steps", "6")
    status, text = call(argv, tmp_path / "out")
    assert status == 0, text
    (sample,) = rows(tmp_path / "run", "health/node-0.jsonl")[:1]
    assert "lo" in sample["nics"] and events(tmp_path / "run", "device_errors") == []
    assert main(words(tmp_path, "other", "--monitor.health-s", "0.1")) == 2
