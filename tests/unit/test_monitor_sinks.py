from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.errors import ConfigError
from meshwright.events import CommTotals, Event, StepRecord
from meshwright.monitor import retry
from meshwright.monitor.config import MonitorConfig
from meshwright.monitor.drift import compare, measure
from meshwright.monitor.sinks import JsonlSink, LineFile, Sink, read_lines, truncate_metrics
from meshwright.monitor.tensorboard import TensorBoardSink


def record(step: int, **changes) -> StepRecord:
    values = {
        "step": step, "loss": 2.5, "grad_norm": 1.0, "lr": 1e-3, "tokens": 100, "tokens_total": 100 * step,
        "tokens_per_s": 1000.0, "step_s": 0.1, "parts": {"forward": 0.04, "backward": 0.06},
        "memory": {"peak": 1000, "parameters": 400}, "layout": "replicate=2",
        "comm": (CommTotals(axis="replicate", op="all_reduce", calls=2, bytes=800, seconds=0.02, exposed_s=0.01),),
    }  # fmt: skip
    return StepRecord(**(values | changes))


def test_every_record_is_a_line_and_numbers_that_are_not_finite_become_null(tmp_path):
    sink: Sink = JsonlSink(tmp_path)
    sink.step(record(1))
    sink.step(record(2, grad_norm=math.inf, skipped=True))
    sink.event(Event(kind="evaluated", rank=0, data={"step": 2, "loss": math.nan, "path": Path("x")}))
    sink.close()
    sink.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0] == json.loads(json.dumps(record(1).to_json()))
    assert lines[0]["comm"] == [
        {
            "axis": "replicate", "op": "all_reduce", "calls": 2, "bytes": 800, "seconds": 0.02, "exposed_s": 0.01,
            "raw_bytes": 0, "rounding_error": 0.0, "latency_p50_s": 0.0, "latency_p99_s": 0.0, "bandwidth_p50": 0.0,
            "bandwidth_p99": 0.0,
        }
    ]  # fmt: skip
    assert lines[1]["grad_norm"] is None and lines[1]["skipped"] is True
    (event,) = read_lines(tmp_path / "events.jsonl")
    assert event["kind"] == "evaluated" and event["loss"] is None and event["path"] == "x"
    assert {"rank", "pid", "host", "time"} <= set(event)


def test_only_rank_zero_writes_metrics(tmp_path):
    sink = JsonlSink(tmp_path, metrics=False)
    sink.step(record(1))
    sink.event(Event(kind="rank_started", rank=1))
    sink.close()
    assert not (tmp_path / "metrics.jsonl").exists()
    assert len(list(read_lines(tmp_path / "events.jsonl"))) == 1


def test_four_processes_that_append_at_once_garble_no_line(tmp_path):
    children = []
    for rank in range(4):
        child = os.fork()
        if child == 0:
            sink = JsonlSink(tmp_path, metrics=False)
            for turn in range(200):
                text = chr(97 + rank) * (10 + 40 * turn)
                sink.event(Event(kind="noted", rank=rank, data={"turn": turn, "text": text}))
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    # A file that is opened while another process is inside a write looks cut short; the line ended then is empty.
    lines = (tmp_path / "events.jsonl").read_bytes().splitlines()
    events = [json.loads(line) for line in lines if line]
    assert len(events) == 800 and len(lines) <= 803
    for rank in range(4):
        own = [event for event in events if event["rank"] == rank]
        assert [event["turn"] for event in own] == list(range(200))
        assert all(event["text"] == chr(97 + rank) * (10 + 40 * event["turn"]) for event in own)


def test_truncation_keeps_the_steps_up_to_the_resumed_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert truncate_metrics(path, 3) == 0
    sink = JsonlSink(tmp_path)
    for step in range(1, 7):
        sink.step(record(step))
    sink.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step":7,"lo')
    assert truncate_metrics(path, 4) == 3
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:4])
    assert truncate_metrics(path, 4) == 0
    assert [one.name for one in tmp_path.iterdir() if "metrics" in one.name] == ["metrics.jsonl"]


def test_a_line_cut_short_by_a_kill_spoils_no_other(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind":"a"}\n{"kind":"b","ti')
    lines = LineFile(path)
    lines.append({"kind": "c"})
    lines.close()
    assert [line["kind"] for line in read_lines(path)] == ["a", "c"]


def test_a_disk_that_stays_full_ends_nothing_and_says_so(monkeypatch, capsys):
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    monkeypatch.setattr(retry, "LAST_S", 0.0)
    lines = LineFile(Path("/dev/full"))
    assert lines.append({"kind": "a"}) is None
    lines.close()
    assert "last 1 lines couldn't be written: No space left on device; free space" in capsys.readouterr().err


def read_tensorboard(folder: Path) -> tuple[dict[str, list[tuple[int, float]]], dict[str, str]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    scalars = {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    tensors = events.Tags()["tensors"]
    return scalars, {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in tensors}


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_what_the_sink_writes(tmp_path):
    sink: Sink = TensorBoardSink(tmp_path, every=2)
    for step in range(1, 7):
        # A join between two points is written all the same.
        outer = {"island_losses": [2.0, 3.0], "consensus_distance": 0.5, "sent_bytes": 8} if step in (3, 4) else {}
        sink.step(record(step, loss=float(step), grad_norm=math.nan if step == 4 else 1.0, mfu=0.5, outer=outer))
    sink.event(Event(kind="evaluated", rank=0, data={"step": 6, "loss": 1.5, "best": True}))
    sink.event(Event(kind="sampled", rank=0, data={"step": 6, "text": "To be\nor not"}))
    sink.close()
    resumed = TensorBoardSink(tmp_path, every=1, resumed_step=3)
    resumed.step(record(4, loss=44.0))
    resumed.close()
    scalars, texts = read_tensorboard(tmp_path)
    assert scalars["train/loss"] == [(1, 1.0), (2, 2.0), (4, 44.0)]
    assert scalars["islands/loss_1"] == [(3, 3.0)] and scalars["islands/sent_bytes"] == [(3, 8.0)]
    assert scalars["comm_bytes_per_s/replicate/all_reduce"][0] == (1, pytest.approx(40_000.0))
    assert {"train/accuracy", "train/learning_rate", "speed/tokens_per_s", "speed/mfu", "memory/peak_bytes",
            "step/backward_s", "comm_s/replicate/all_reduce", "evaluation/loss"} <= set(scalars)  # fmt: skip
    assert "evaluation/best" not in scalars
    assert texts["sample/text_summary"] == "    To be\n    or not"


def test_neither_the_config_nor_the_sinks_import_torch():
    code = (
        "import sys, meshwright.monitor.config; assert not {'numpy', 'rich', 'tensorboard'} & set(sys.modules);"
        "import meshwright.monitor.monitor; assert not {'torch', 'tensorboard'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250)


def test_drift_compares_what_both_know():
    plan = {"prediction": {"step_s": 0.1, "parts": {"forward": 0.05, "wait": 1.0}, "memory": {"parameters": 400},
                           "traffic": {"replicate": 400, "shard": 9}}}  # fmt: skip
    steps = [record(step, step_s=9.0 if step == 1 else 0.1).to_json() for step in range(1, 30)]
    measured = measure(steps)
    assert measured["memory"] == {"peak": 1000, "parameters": 400} and measured["traffic"] == {"replicate": 800}
    found = {drift.part: drift for drift in compare(plan, measured, 0.25)}
    assert list(found) == ["memory.parameters", "step_s", "parts.forward", "traffic.replicate", "traffic.shard"]
    assert found["traffic.shard"].measured == 0.0 and found["traffic.shard"].beyond, "planned, and never sent"
    assert found["traffic.replicate"].relative == 1.0 and found["traffic.replicate"].beyond
    assert found["parts.forward"].relative == pytest.approx(-0.2) and not found["parts.forward"].beyond
    (nothing,) = compare({"traffic": {"shard": 0}}, {"traffic": {"shard": 5}}, 0.25)
    assert nothing.relative == math.inf and nothing.beyond
    assert compare({}, measure([]), 0.25) == []


@pytest.mark.parametrize("values", [{"every": 0}, {"wait_s": 0.0}, {"drift_bound": -1.0}, {"display": "loud"}])
def test_settings_that_cannot_be_are_refused(values):
    with pytest.raises(ConfigError):
        MonitorConfig.from_dict(values).check()
