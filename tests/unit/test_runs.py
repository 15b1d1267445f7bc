"""Runs of a folder: what is listed, how some differ, and what is removed, also where their files are hostile."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import tomli_w
import torch

from meshwright.checkpoint.store import CheckpointStore
from meshwright.cli.main import main
from meshwright.events import Event
from meshwright.jobs.runs import list_runs
from meshwright.models.config import ModelConfig
from meshwright.monitor.sinks import JsonlSink
from meshwright.resilience.run_lock import RunLock
from meshwright.train.run_config import RunConfig
from tests.unit.test_monitor_report import PLAN, make_run, parsed


def a_run(folder: Path, lr: float = 1e-3, steps: int = 40) -> Path:
    """A run directory with steps, events and a config that is one."""
    make_run(folder, steps)
    config = dataclasses.replace(RunConfig(model=ModelConfig(name="gpt2", layers=4)), run=str(folder)).to_dict()
    config["optimizer"]["lr"] = lr
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    return folder


def checkpoints(run: Path, *steps: int) -> list[Path]:
    store = CheckpointStore(run / "checkpoints")
    from_zero = [store.save(step, {"w": torch.arange(64.0) + step}, {}).path for step in steps]
    # The store keeps the newest two by itself; the others are copies under their own steps.
    return [path for path in from_zero if path.exists()]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_list_has_every_run_below_a_folder_and_what_it_is_at(tmp_path, capsys):
    a_run(tmp_path / "a")
    a_run(tmp_path / "sweep" / "lr=1", steps=9)
    (tmp_path / "not-a-run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert main(["runs", str(tmp_path), "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert sorted(rows) == ["a", "sweep/lr=1"]
    row = rows["a"]
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert (row["state"], row["step"], row["loss"]) == ("finished", 40, lines[-1]["loss"])
    assert (row["layout"], row["devices"]) == (PLAN["layout"]["text"], "4 cpu")
    assert row["tokens_per_s"] == pytest.approx(sum(sorted(line["tokens_per_s"] for line in lines)[19:21]) / 2)
    assert main(["runs", str(tmp_path)]) == 0
    text = capsys.readouterr().out.splitlines()
    assert len(text) == 3 and text[0].split()[:3] == ["run", "state", "step"] and len(set(map(len, text[:2]))) <= 2


def test_two_runs_side_by_side(tmp_path, capsys):
    runs = [str(a_run(tmp_path / "a")), str(a_run(tmp_path / "b", lr=3e-4))]
    page = tmp_path / "page.html"
    assert main(["runs", "compare", *runs, "--html", str(page), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["settings"] == {"optimizer.lr": ["0.001", "0.0003"]}
    assert told["figures"]["Steps"] == ["40", "40"]
    text, tags = parsed(page)
    assert tags.addresses == [] and "script" not in tags.found and "optimizer.lr" in text
    # Each chart has a curve of each run, in a colour of its own.
    assert tags.found.count("svg") == 6 and all(f'class="key"><i class="b{index}"' in text for index in (0, 1))
    assert main(["runs", "compare", *runs, "--html", str(page)]) == 0
    assert "0.0003" in capsys.readouterr().out
    assert main(["runs", "compare", runs[0]]) == 2
    assert main(["runs", "compare", runs[0], str(tmp_path)]) == 2


def test_runs_of_several_sizes_have_the_factors_of_their_speed(tmp_path, capsys):
    runs = []
    for name, layout, speeds in (
        ("two", "replicate=2", (90.0, 1000.0, 1010.0)),
        ("eight", "replicate=2,shard=4,zero=1", (5.0, 3000.0, 3600.0)),
    ):
        run = a_run(tmp_path / name, steps=3)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for line, speed in zip(lines, speeds, strict=True):
            line |= {"tokens_per_s": speed, "layout": layout}
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        plan = json.loads((run / "plan.json").read_text())
        plan["layout"] = {"text": layout}
        (run / "plan.json").write_text(json.dumps(plan))
        runs.append(str(run))
    assert main(["runs", "compare", *runs, "--html", str(tmp_path / "page.html"), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    # 1000 tokens/s on 2 devices are 500 of each; 3000 are 6 times one device's, on 8.
    assert figures["Tokens/s of one device, of 2"] == ["500", "500"] and figures["Devices"] == ["2", "8"]
    assert figures["Speed-up over one device"] == ["2.00", "6.00"] and figures["Efficiency"] == ["100.0%", "75.0%"]
    assert main(["runs", "compare", runs[0], runs[0], "--html", str(tmp_path / "page.html"), "--json"]) in (0, 2)
    assert "Efficiency" not in capsys.readouterr().out


def test_a_hostile_run_is_data(tmp_path, capsys):
    """Wrong types, huge numbers, deep nesting and commands to the terminal change a row, and end nothing."""
    run = a_run(tmp_path / "a")
    (run / "plan.json").write_text(json.dumps({"layout": {"text": "\x1b[2J<script>"}, "prediction": 7}))
    deep = "[" * 100_000
    huge = "1" + "0" * 400
    (run / "metrics.jsonl").write_text(
        f'{{"step": 1, "loss": {huge}, "parts": 3, "comm": "x", "tokens_per_s": {{}}}}\n{deep}\n{{"step": "2"}}\n'
    )
    (run / "events.jsonl").write_text('{"kind": "evaluated", "loss": [1], "time": "x"}\n{"kind": ["x"]}\n' + deep)
    (run / "owner").mkdir()
    (run / "owner" / "000001").write_text(deep)
    other = a_run(tmp_path / "b\x1b[31m")
    assert main(["runs", str(tmp_path)]) == 0
    assert "\x1b" not in capsys.readouterr().out
    page = tmp_path / "page.html"
    assert main(["runs", "compare", str(run), str(other), "--html", str(page)]) == 0
    assert "\x1b" not in capsys.readouterr().out and "<script>" not in page.read_text()
    pipe = a_run(tmp_path / "pipe")
    (pipe / "metrics.jsonl").unlink()
    os.mkfifo(pipe / "metrics.jsonl")
    secret = a_run(tmp_path / "secret")
    (secret / "events.jsonl").unlink()
    (secret / "events.jsonl").symlink_to("/etc/passwd")
    assert [row.name for row in list_runs(tmp_path)] == [other.name, "a"]


def test_the_newest_whole_checkpoint_stays(tmp_path, capsys):
    run = a_run(tmp_path / "runs" / "a")
    kept, damaged = checkpoints(run, 10, 20)
    older = run / "checkpoints" / "step-00000005"
    shutil.copytree(kept, older)
    (run / "checkpoints" / ".writing-step-00000030-x").mkdir()
    precious = tmp_path / "precious"
    shutil.copytree(kept, precious)
    (run / "checkpoints" / "step-00000001").symlink_to(precious)
    # One byte: its sizes are still those of the manifest.
    weights = next(path for path in damaged.rglob("*") if path.is_file() and path.name != "manifest.json")
    flipped = bytearray(weights.read_bytes())
    flipped[-1] ^= 1
    weights.write_bytes(flipped)
    before = names(run / "checkpoints")
    assert main(["runs", "clean", str(tmp_path / "runs")]) == 2, "nobody can be asked here"
    assert names(run / "checkpoints") == before
    assert main(["runs", "clean", str(tmp_path / "runs"), "--yes", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["kept"] for row in told] == [kept.name] and len(told[0]["paths"]) == 3
    assert names(run / "checkpoints") == ["step-00000001", kept.name], "a link stays, and what it leads to"
    assert names(precious) == names(kept)
    assert main(["runs", "clean", str(run), "--yes"]) == 0


def test_without_a_whole_checkpoint_all_stay(tmp_path):
    run = a_run(tmp_path / "a")
    for path in checkpoints(run, 10, 20):
        (path / "manifest.json").write_text("{}")
    before = names(run / "checkpoints")
    assert main(["runs", "clean", str(run), "--yes"]) == 0
    assert names(run / "checkpoints") == before


def hold(run: Path, held: object) -> None:
    with RunLock(run):
        held.set()  # type: ignore[attr-defined]
        time.sleep(60)


def test_a_run_under_way_and_what_is_no_run_stay(tmp_path, capsys):
    run = a_run(tmp_path / "a")
    checkpoints(run, 10, 20)
    fork = multiprocessing.get_context("fork")
    held = fork.Event()
    process = fork.Process(target=hold, args=(run, held))
    process.start()
    try:
        assert held.wait(20)
        assert list_runs(tmp_path)[0].state == "running"
        for words in (["--whole"], []):
            assert main(["runs", "clean", str(run), "--yes", *words]) == 0
            assert "it is running" in capsys.readouterr().err
        assert len(names(run / "checkpoints")) == 2
    finally:
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.toml").write_text("[mine]\nx = 1\n")
    (other / "plan.json").write_text("{}")
    assert main(["runs", "clean", str(other), "--whole", "--yes"]) == 0
    assert "unknown key 'mine'" in capsys.readouterr().err and names(other) == ["config.toml", "plan.json"]
    (tmp_path / "link").symlink_to(run)
    for path in (tmp_path, tmp_path / "link", tmp_path / "none"):
        assert main(["runs", "clean", str(path), "--whole", "--yes"]) == 2
    assert main(["runs", "clean", str(run), "--whole", "--yes"]) == 0
    assert names(tmp_path) == ["link", "other"]


def test_an_owner_that_ended_leaves_its_run_to_be_cleaned(tmp_path):
    """A killed command's lock doesn't keep its run for ever, and its state says that nobody trains."""
    run = a_run(tmp_path / "a")
    (run / "events.jsonl").unlink()
    sink = JsonlSink(run, metrics=False)
    sink.event(Event(kind="run_started", rank=0, data={"step": 0}))
    sink.close()
    assert list_runs(tmp_path)[0].state == "ended"
    checkpoints(run, 10, 20)
    assert main(["runs", "clean", str(run), "--yes"]) == 0
    assert names(run / "checkpoints") == ["step-00000020"]
