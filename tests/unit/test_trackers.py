"""Trackers get what TensorBoard gets, go on after a stop, and neither stop nor delay a run when they fail or hang."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.errors import ConfigError
from meshwright.events import Event
from meshwright.monitor import tracker_sink
from meshwright.monitor.config import MonitorConfig
from meshwright.monitor.display import RunHeader
from meshwright.monitor.monitor import Monitor
from meshwright.monitor.sinks import read_lines
from meshwright.monitor.trackers.registry import check_trackers
from tests.runs import words, write_corpus
from tests.unit.test_monitor_sinks import record

FAKE = """
import json, time

class Fake:
    def __init__(self, run):
        self.id = run.id or "first"
        self.path = run.run_dir / "fake.jsonl"
        self.write(made=run.id, name=run.name, project=run.project, config=dict(run.config))
        self.mode = run.config.get("mode")
        if self.mode == "broken":
            raise OSError("no route")
    def write(self, **values):
        with self.path.open("a") as file:
            file.write(json.dumps(values) + "\\n")
    def log(self, step, scalars):
        if self.mode == "hangs":
            time.sleep(3600)
        self.write(step=step, scalars=dict(scalars))
    def log_text(self, step, tag, text):
        self.write(tag=tag, text=text)
    def close(self, finished):
        self.write(finished=finished)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that gives the tracker ``fake``, and one whose package is missing, as installed ones."""
    folder = tmp_path / "site"
    metadata = folder / "fake_tracker-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "fake_tracker.py").write_text(FAKE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-tracker\nVersion: 1.0\n")
    entries = "[meshwright.trackers]\nfake = fake_tracker:Fake\ngone = not_installed_here:Tracker\n"
    (metadata / "entry_points.txt").write_text(entries)
    monkeypatch.syspath_prepend(str(folder))


def make_run(tmp_path: Path, mode: str = "") -> Path:
    run = tmp_path / "run"
    run.mkdir(exist_ok=True)
    (run / "config.toml").write_text(f'mode = "{mode}"\n[optimizer]\nlr = 0.5\n')
    return run


def monitor_of(run: Path, resumed_step: int | None = None, **settings: object) -> Monitor:
    config = MonitorConfig(display="none", tensorboard=False, report=False, every=10, **settings)  # type: ignore[arg-type]
    return Monitor.build(config, run, RunHeader(steps=40, rows={}, progress=run / "progress.bin"), 0, resumed_step)


def kinds(run: Path) -> list[str]:
    return [event["kind"] for event in read_lines(run / "events.jsonl")]


def test_a_tracker_of_another_package_gets_what_tensorboard_gets(tmp_path: Path, fake: None) -> None:
    run = make_run(tmp_path)
    with monitor_of(run, trackers=("fake",), project="mine") as monitor:
        for step in range(1, 21):
            monitor.step(record(step, grad_norm=math.inf if step == 20 else 1.0))
        monitor.event(Event(kind="evaluated", rank=0, data={"step": 20, "loss": 2.0}))
        monitor.continues = True
    told = list(read_lines(run / "fake.jsonl"))
    assert told[0] == {"made": None, "name": "run", "project": "mine", "config": {"mode": "", "optimizer": {"lr": 0.5}}}
    scalars = {row["step"]: row["scalars"] for row in told if "scalars" in row and "train/loss" in row["scalars"]}
    assert sorted(scalars) == [1, 10, 20] and "train/grad_norm" not in scalars[20]
    assert scalars[10]["step/forward_s"] == 0.04 and scalars[10]["comm_bytes/replicate/all_reduce"] == 800
    assert {"step": 20, "scalars": {"evaluation/loss": 2.0}} in told and told[-1] == {"finished": False}
    # The ranks that go on make the tracker again, which gets the same id and no new run.
    with monitor_of(run, 20, trackers=("fake",)) as monitor:
        monitor.step(record(30))
    again = list(read_lines(run / "fake.jsonl"))[len(told) :]
    assert again[0]["made"] == "first" and again[1]["step"] == 30 and again[-1] == {"finished": True}
    assert kinds(run) == ["evaluated"]


@pytest.mark.parametrize(("mode", "error"), [("broken", "OSError: no route"), ("hangs", "")])
def test_a_tracker_that_fails_or_hangs_costs_an_event(
    mode: str, error: str, tmp_path: Path, fake: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_sink, "MOST_QUEUED", 4)
    monkeypatch.setattr(tracker_sink, "HANDOVER_S", 0.2)
    monkeypatch.setattr(tracker_sink, "CLOSE_S", 0.2)
    run = make_run(tmp_path, mode)
    began = time.monotonic()
    with monitor_of(run, trackers=("fake",)) as monitor:
        for step in range(10, 200, 10):
            monitor.step(record(step))
    assert time.monotonic() - began < 5
    (event,) = read_lines(run / "events.jsonl")
    assert (event["kind"], event["tracker"]) == ("tracker_failed", "fake")
    assert event["error"] == error or "4 points behind" in event["error"]
    assert len(list(read_lines(run / "metrics.jsonl"))) == 19


def test_a_tracker_that_is_not_there_is_refused_before_a_rank_starts(
    tmp_path: Path, fake: None, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path / "corpus.txt")
    for names, message in (
        (["gone"], "the package not_installed_here isn't installed; pip install"),
        (["fakey"], "did you mean 'fake'?"),
        (["fake", "fake"], "give different names"),
        (["../x"], "give different names"),
    ):
        assert main(words(tmp_path, "run", "--monitor.trackers", *names)) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()
    check_trackers(["tensorboard", "fake"])


def test_two_trackers_of_a_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tmp_path / "other-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[meshwright.trackers]\nwandb = json:loads\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"several have this name \(json:loads\)"):
        check_trackers(["wandb"])


def test_a_damaged_id_begins_a_new_run(tmp_path: Path, fake: None) -> None:
    run = make_run(tmp_path)
    (run / "trackers").mkdir()
    for text in ("[" * 100_000, '{"id": 3}', '{"id": "a\\u001b[2J"}', "[]"):
        (run / "trackers" / "fake.json").write_text(text)
        with monitor_of(run, trackers=("fake",)) as monitor:
            monitor.step(record(10))
        assert json.loads((run / "trackers" / "fake.json").read_text()) == {"id": "first"}
    assert all(row["made"] is None for row in read_lines(run / "fake.jsonl") if "made" in row)


DRIVE = """
import sys
from pathlib import Path
from meshwright.events import Event
from tests.unit.test_monitor_sinks import record
from tests.unit.test_trackers import monitor_of
name, run = sys.argv[1], Path(sys.argv[2])
for first in (1, 21):
    with monitor_of(run, trackers=(name,), project="mine") as monitor:
        for step in range(first, first + 20):
            monitor.step(record(step, loss=step / 8))
        monitor.event(Event(kind="evaluated", rank=0, data={"step": first + 19, "loss": 2.0}))
        monitor.event(Event(kind="sampled", rank=0, data={"step": first + 19, "text": "and so on"}))
"""
READ = {
    "mlflow": """
import json, sys
from mlflow.tracking import MlflowClient
client = MlflowClient()
(experiment,) = client.search_experiments(filter_string="name = 'mine'")
runs = client.search_runs([experiment.experiment_id])
points = [(m.step, m.value) for m in client.get_metric_history(runs[0].info.run_id, "train/loss")]
print(json.dumps([len(runs), runs[0].info.status, sorted(points), runs[0].data.params]))
""",
    "trackio": """
import json
from trackio.sqlite_storage import SQLiteStorage
runs = SQLiteStorage.get_runs("mine")
rows = SQLiteStorage.get_logs("mine", runs[0])
points = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
print(json.dumps([len(runs), "FINISHED", sorted(points), SQLiteStorage.get_run_config("mine", runs[0])]))
""",
    "wandb": """
import json, sys
from pathlib import Path
from wandb.proto import wandb_internal_pb2
def records(data):
    # LevelDB's log behind 7 bytes: blocks of 32 KiB, records of checksum, length, type (1 whole, 2 first, 4 last).
    at, record = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record = (b"" if kind in (1, 2) else record) + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
ids, points, config = set(), [], {}
for path in sorted(Path(sys.argv[1]).rglob("*.wandb")):
    for data in records(path.read_bytes()):
        line = wandb_internal_pb2.Record()
        line.ParseFromString(data)
        if line.WhichOneof("record_type") == "run":
            ids.add(line.run.run_id)
            config |= {item.key: json.loads(item.value_json) for item in line.run.config.update}
        if line.WhichOneof("record_type") == "history":
            values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in line.history.item}
            if "train/loss" in values:
                points.append((values["step"], values["train/loss"]))
print(json.dumps([len(ids), "FINISHED", sorted(points), config]))
""",
}
"""What reads each tracker's own store back: runs, state, points of the loss, settings."""


@pytest.mark.parametrize("name", sorted(READ))
def test_the_true_tracker_has_one_run_with_every_point(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} isn't installed")
    run = make_run(tmp_path)
    local = {
        "WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": os.pathsep.join(sys.path),
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db", "HOME": str(tmp_path),
    }  # fmt: skip
    environment = os.environ | local

    def call(code: str, *arguments: str) -> str:
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert call(DRIVE, name, str(run)) == "", "standard output is the command's"
    assert kinds(run).count("tracker_failed") == 0, (run / "events.jsonl").read_text()
    runs, state, points, config = json.loads(call(READ[name], str(run)).splitlines()[-1])
    assert (runs, state) == (1, "FINISHED")
    assert points == [[step, step / 8] for step in (1, 10, 20, 30, 40)]
    assert float(config["optimizer"]["lr"] if "optimizer" in config else config["optimizer.lr"]) == 0.5
