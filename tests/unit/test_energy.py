"""Joules of a token: simulated counters of NVML and RAPL, computed by hand; planned, and planned again."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import math
import threading
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.cluster.cluster import Cluster
from meshwright.data.config import DataConfig
from meshwright.doctor import nvml
from meshwright.jobs import health as health_job
from meshwright.jobs.health import HealthSampler
from meshwright.jobs.layouts import make_plans, replan_layout
from meshwright.jobs.machines import Machines
from meshwright.jobs.model_reading import read_model
from meshwright.launch.devices import Devices, count_cores
from meshwright.models.config import ModelConfig
from meshwright.monitor.energy import TOO_FEW, UNREPORTED, UNSAMPLED, token_energy
from meshwright.monitor.health import health
from meshwright.monitor.prometheus import format_metrics
from meshwright.monitor.report import main_figures, write_report
from meshwright.monitor.rundir import read_run
from meshwright.resilience.planning import ReplanRequest
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.train.config import TrainConfig
from meshwright.train.run_config import RunConfig
from tests.faults.test_doctor import build
from tests.runs import call, rows, words, write_corpus
from tests.unit.test_monitor_report import PLAN, make_run

TWO_GPUS = r"""
static unsigned long long spent[2];
void spend(int gpu, unsigned long long mj) { spent[gpu] += mj; }
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **gpu) { *gpu = (void *)(long)(i + 1); return 0; }
int nvmlDeviceGetMemoryInfo(void *gpu, unsigned long long *m) { m[0] = m[1] = m[2] = 1; return 0; }
int nvmlDeviceGetTotalEnergyConsumption(void *gpu, unsigned long long *mj) { *mj = spent[(long)gpu - 1]; return 0; }
"""
ZONE = "sys/class/powercap/intel-rapl:0"


class Node:
    """A node whose processor counts in a folder like sysfs."""

    def __init__(self, root: Path, wraps_at_uj: int = 1_000_000_000) -> None:
        self.zone, self.uj, self.wraps_at_uj = root / ZONE, 0, wraps_at_uj
        self.zone.mkdir(parents=True)
        (self.zone / "max_energy_range_uj").write_text(f"{wraps_at_uj}\n")
        self.spend(0)
        self.sampler = HealthSampler(root)

    def spend(self, joules: float) -> None:
        self.uj = (self.uj + int(joules * 1e6)) % self.wraps_at_uj
        (self.zone / "energy_uj").write_text(f"{self.uj}\n")

    def sample(self, tokens: int) -> dict[str, object]:
        return self.sampler.sample() | {"step": tokens // 100, "tokens": tokens}


def run_with(folder: Path, nodes: dict[str, list[dict[str, object]]], planned: float | None = None) -> Path:
    run = make_run(folder, 20)
    (run / "health").mkdir()
    for name, samples in nodes.items():
        (run / "health" / f"{name}.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    prediction = PLAN["prediction"] | {"joules_per_token": planned}
    (run / "plan.json").write_text(json.dumps(PLAN | {"prediction": prediction}))
    return run


def test_two_nodes_with_gpus_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library = build(TWO_GPUS, tmp_path / "libnvidia-ml.so.1")
    monkeypatch.setattr(nvml, "LIBRARY", str(library))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    gpus = ctypes.CDLL(str(library))
    gpus.spend.argtypes = [ctypes.c_int, ctypes.c_ulonglong]
    first, second = Node(tmp_path / "first"), Node(tmp_path / "second")
    samples: dict[str, list[dict[str, object]]] = {"node-0": [], "node-1": []}
    for tokens in (1000, 3000, 6000):
        samples["node-0"].append(first.sample(tokens))
        samples["node-1"].append(second.sample(tokens))
        # GPU 0 is another's: the run sees GPU 1 alone. The processor's counter wraps at 1000 J.
        gpus.spend(0, 77_000_000)
        gpus.spend(1, 2_000_000)
        first.spend(700.0)
        second.spend(50.0)
    # The second node's supervisor starts again: its count begins anew, and no tokens of that time count for it.
    second.sampler = HealthSampler(tmp_path / "second")
    samples["node-1"].append(second.sample(7000))
    run = run_with(tmp_path / "run", samples, planned=1.25)
    energy = token_energy(samples, read_run(run).plan)
    # Node 0: 2 x 2000 J over 5000 tokens. Node 1: the GPU's counter goes on, 3 x 2000 J over 6000.
    assert energy.devices == pytest.approx(4000 / 5000 + 6000 / 6000)
    # 2 x 700 J over 5000 tokens, 2 x 50 J over 5000.
    assert energy.processors == pytest.approx(1400 / 5000 + 100 / 5000)
    assert energy.measured == pytest.approx(1.8 + 0.3) and energy.planned == 1.25 and energy.unknown == ""
    text = "".join(health(run, read_run(run).plan))
    assert "2.1 J a token" in text and all(f">{joules} J<" in text for joules in (1.25, 1.8, 0.3))
    tile = next(entry for entry in main_figures(read_run(run)) if entry[0] == "Energy")
    assert tile == ("Energy", "2.1 J a token", "of devices and processors; planned 1.25 J")
    assert "2.1 J a token" in write_report(run).read_text()
    metrics = dict(line.rsplit(" ", 1) for line in format_metrics(read_run(run)).splitlines() if line[0] != "#")
    assert float(metrics["meshwright_energy_joules_per_token"]) == pytest.approx(2.1)
    assert float(metrics["meshwright_energy_planned_joules_per_token"]) == 1.25
    assert float(metrics['meshwright_energy_part_joules_per_token{part="devices"}']) == pytest.approx(1.8)
    assert float(metrics['meshwright_energy_part_joules_per_token{part="processors"}']) == pytest.approx(0.3)
    assert main(["runs", str(run), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["joules_per_token"] == pytest.approx(2.1) and row["planned_joules_per_token"] == 1.25
    assert main(["runs", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "J/token, planned" in shown.splitlines()[0] and "2.1, 1.25" in shown.splitlines()[1]


def test_tokens_do_not_count_while_a_gpus_counter_begins_again() -> None:
    counters = [(0.0, 0.0, 0), (30.0, 10.0, 100), (50.0, 1.0, 200), (70.0, 21.0, 300)]
    samples = [
        {"gpus": [{"index": 0, "joules": first}, {"index": 1, "joules": second}], "tokens": tokens}
        for first, second, tokens in counters
    ]
    # 40 J for the first hundred tokens and 40 J for the third.
    assert token_energy({"node": samples}, {}).devices == pytest.approx(80.0 / 200)


def test_what_cannot_be_measured_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    silent = HealthSampler(tmp_path / "nothing").sample() | {"step": 1, "tokens": 10}
    assert silent["cpu_joules"] is None
    unsampled = run_with(tmp_path / "unsampled", {}, planned=0.5)
    unreported = run_with(tmp_path / "unreported", {"node-0": [silent, silent | {"tokens": 20}]}, planned=0.5)
    first = run_with(tmp_path / "first", {"node-0": [Node(tmp_path / "node").sample(10)]})
    for run, why in ((unsampled, UNSAMPLED), (unreported, UNREPORTED), (first, TOO_FEW)):
        files = read_run(run)
        text = "".join(health(run, files.plan)).replace("&#39;", "'")
        assert f": {why}." in text, text
        assert ("Planned: 0.5 J a token" in text) == (run is not first)
        assert "energy_joules_per_token" not in format_metrics(files)
        assert all(name != "Energy" for name, _, _ in main_figures(files))
    assert main(["runs", str(tmp_path)]) == 0
    assert "J/token" not in capsys.readouterr().out


def test_a_run_reports_what_its_processors_took(tmp_path: Path) -> None:
    node = Node(tmp_path / "root", wraps_at_uj=10**15)
    write_corpus(tmp_path / "corpus.txt")
    ended = threading.Event()

    def keep_spending() -> None:
        while not ended.wait(0.02):
            node.spend(3.0)

    spender = threading.Thread(target=keep_spending)
    spender.start()
    try:
        argv = words(tmp_path, "run", "--monitor.health-s", "1", "--train.steps", "200", "--json")
        argv += ["--recovery.faults", "slow:rank=0,step=1,seconds=0.02"]
        sampler = functools.partial(HealthSampler, tmp_path / "root")
        status, text = call(argv, tmp_path / "out", lambda: setattr(health_job, "HealthSampler", sampler))
    finally:
        ended.set()
        spender.join()
    assert status == 0, text
    # The first line may come before a counter was read.
    lines = [line for line in rows(tmp_path / "run", "health/node-0.jsonl") if line["cpu_joules"] is not None]
    samples = [line for line in lines if line["tokens"]]
    spent, tokens = (samples[-1][name] - samples[0][name] for name in ("cpu_joules", "tokens"))
    assert len(samples) >= 2 and spent >= 3.0
    result = json.loads(text[text.index("\n{") :] if not text.startswith("{") else text)
    # What lies before the first step counts too, for the samples do; but for one from before the run had a line.
    every = [line for line in lines if line["tokens"] is not None]
    whole = (every[-1]["cpu_joules"] - every[0]["cpu_joules"]) / (every[-1]["tokens"] - every[0]["tokens"])
    # The catalogue's 8 W of each core, over 8 rows of 16 tokens.
    plan = read_run(tmp_path / "run").plan["prediction"]
    planned = 8 * count_cores() * plan["step_s"] / (8 * 16)
    measured = {"processors": pytest.approx(whole), "measured": pytest.approx(whole)}
    assert result["energy"] == measured | {"planned": pytest.approx(planned)}
    assert f"a token took {whole:.3g} J of processors" in text or "a token took" not in text
    assert 0.2 < (spent / tokens) / whole < 5.0


def test_a_plan_says_joules_and_another_time_another_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    # A processor of 65 W a rank, which the catalogue doesn't state.
    monkeypatch.setattr(Cluster, "watts", property(lambda cluster: 65.0 * cluster.devices))
    config = RunConfig(
        model=ModelConfig(name="gpt2", layers=4, width=64, heads=4, vocab=128, context=32),
        data=DataConfig(sequence=32), train=TrainConfig(batch=8, replan=True), layout="replicate=2",
    )  # fmt: skip
    devices = Devices(kind="cpu", count=2, found=2, cores=2)
    model, machines = read_model(config, None, 32), Machines(devices=devices, ranks=2)
    plan, _ = make_plans(config, model, machines)[0]
    step_s = plan.prediction.step_s
    assert step_s is not None
    # Two ranks of 65 W for the step, over 8 rows of 32 tokens.
    assert plan.prediction.joules_per_token == pytest.approx(2 * 65 * step_s / (8 * 32))
    assert Plan.from_json(json.loads(plan.dumps())) == plan
    older = json.loads(plan.dumps())
    del older["prediction"]["joules_per_token"]
    assert Plan.from_json(older).prediction.joules_per_token is None
    # One rank computes three times as long: the planner moves rows, and a step is measured at half a second.
    request = ReplanRequest(layout=Layout.parse("replicate=2"), busy_s=(0.15, 0.45), step_s=0.5)
    replan = replan_layout(dataclasses.replace(config, layout="auto"), model, machines, request)
    assert replan is not None
    expected_s = 0.5 * replan.step_ratio
    assert replan.plan.prediction.step_s == pytest.approx(expected_s)
    assert replan.plan.prediction.joules_per_token == pytest.approx(2 * 65 * expected_s / (8 * 32))
    low, high = replan.plan.prediction.step_range_s or (math.nan, math.nan)
    assert low < expected_s < high


def test_no_power_no_joules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cluster, "watts", 0.0)
    devices = Devices(kind="cpu", count=2, found=2, cores=2)
    config = RunConfig(
        model=ModelConfig(name="gpt2", layers=2, width=32, heads=4, vocab=64, context=16), data=DataConfig(sequence=16),
        train=TrainConfig(batch=8), layout="replicate=2",
    )  # fmt: skip
    plan, _ = make_plans(config, read_model(config, None, 16), Machines(devices=devices, ranks=2))[0]
    assert plan.prediction.joules_per_token is None and plan.prediction.rescaled(2.0).joules_per_token is None
