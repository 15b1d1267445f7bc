"""A metered loop leaves what a run of `train` leaves, computes the same bits, and says where its time went."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import meshwright.monitor
from meshwright.cli.main import main
from meshwright.errors import ConfigError
from meshwright.jobs.run_control import run_status
from meshwright.monitor.config import MonitorConfig
from meshwright.monitor.prometheus import format_metrics
from meshwright.monitor.rundir import meter_runs, read_run
from meshwright.strategy import HybridParallelStrategy, PipelineEngine
from tests.ranks.group import run_ranks
from tests.runs import write_corpus

PAUSE_S = 0.03
WIDTH = 16


class Slow(nn.Module):
    """Two layers whose forward takes a while on the host."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(PAUSE_S)
        return self.layers(x)


def loop(rank: int, run: Path | None, steps: int) -> list[float]:
    """A loop under copies; with a run directory it is metered."""
    strategy = HybridParallelStrategy("replicate=2")
    model = strategy.shard(Slow(), example=torch.zeros(2, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = MonitorConfig(display="none", every=1)
    meter = meshwright.monitor.meter(run, strategy, steps=6, settings={"lr": 1e-2}, config=config) if run else None
    losses = []
    if meter is not None:
        meter.__enter__()
    for step in range(steps):
        torch.manual_seed(step * 2 + rank)
        time.sleep(2 * PAUSE_S)
        for _ in range(2):
            x = torch.randn(8, WIDTH)
            loss = mse_loss(model(x), x)
            loss.backward()
        norm = strategy.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(strategy.mean(loss))
        if meter is not None:
            meter.scalar("my/norm", float(norm))
            meter.step(loss=losses[-1], tokens=32, grad_norm=norm)
            assert rank or meter_runs(run)
    if meter is not None:
        meter.evaluated(0.5)
        meter.__exit__(None, None, None)
    return losses


def test_a_metered_loop_leaves_a_run_and_computes_the_same_bits(tmp_path: Path) -> None:
    run = tmp_path / "run"
    plain, metered = run_ranks(2, loop, None, 4)[0], run_ranks(2, loop, run, 4)[0]
    assert metered == plain
    files = read_run(run)
    assert [(line["step"], line["loss"], line["tokens_total"]) for line in files.steps] == [
        (step, loss, 32 * step) for step, loss in enumerate(plain, 1)
    ]
    for line in files.steps:
        parts = line["parts"]
        assert math.isclose(sum(parts.values()), line["step_s"], rel_tol=1e-6)
        # Two forwards, and the loader's pause, took at least what the host slept in them.
        assert parts["forward"] >= 2 * PAUSE_S and parts["data"] >= 2 * PAUSE_S
        assert parts["backward"] > 0 and parts["optimizer"] > 0
        (row,) = [row for row in line["comm"] if row["op"] == "all_reduce" and row["axis"] == "replicate"]
        assert 0 < row["latency_p50_s"] <= row["latency_p99_s"] <= row["seconds"] + 1e-9
        assert line["lr"] == 1e-2 and line["scalars"] == {"my/norm": line["grad_norm"]}
    numbers = 2 * (WIDTH * WIDTH + WIDTH)
    # Two ranks: an all-reduce sends as many bytes as its tensor has, here for each of two backward passes. After steps
    # 1, 2, 4 and so on the strategy compares the copies too.
    sent = [row["bytes"] for row in files.steps[2]["comm"] if row["axis"] == "replicate"]
    assert sent == [2 * 4 * numbers]
    assert files.steps[-1]["memory"]["parameters"] == files.steps[-1]["memory"]["gradients"] == 4 * numbers
    assert files.steps[-1]["memory"]["optimizer"] >= 8 * numbers
    status = run_status(run)
    assert (status.state, status.step, status.steps, status.layout) == ("finished", 4, 6, "replicate=2")
    text = format_metrics(files)
    assert 'meshwright_scalar{name="my/norm"}' in text and 'op="all_reduce",quantile="0.99"}' in text
    assert "my/norm" in (run / "report.html").read_text() and "latency p50" in (run / "report.html").read_text()
    assert list((run / "tensorboard").iterdir())
    # The same directory again goes on, and a loop of its own says from where.
    run_ranks(2, loop, run, 1)
    assert [line["step"] for line in read_run(run).steps] == [1, 2, 3, 4, 5]
    assert read_run(run).steps[-1]["tokens_total"] == 160
    with meshwright.monitor.meter(run, start=2) as meter:
        meter.step(tokens=1)
    assert [line["step"] for line in read_run(run).steps] == [1, 2, 3]
    assert main(["runs", "clean", str(run), "--whole", "--yes"]) == 0 and run.exists()


def engine_loop(rank: int, run: Path) -> None:
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(2)))
    engine = PipelineEngine(blocks, "pp=2", mse_loss, microbatches=2)
    # Built at its first batch, after the meter was opened.
    with meshwright.monitor.meter(run, engine) as meter:
        for _ in range(3):
            x = torch.ones(8, WIDTH)
            meter.step(loss=engine.step((x, x)))


def test_an_engine_times_its_own_steps(tmp_path: Path) -> None:
    run_ranks(2, engine_loop, tmp_path / "run")
    steps = read_run(tmp_path / "run").steps
    assert {"data", "pipeline", "reduce", "optimizer"} <= set(steps[-1]["parts"]) and steps[-1]["parts"]["pipeline"] > 0
    assert [row["axis"] for row in steps[-1]["comm"] if row["op"] == "send"] == ["pp"]
    assert steps[-1]["layout"].startswith("pp=2")


def test_how_a_loop_ends_is_recorded(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), meshwright.monitor.meter(tmp_path / "a") as meter:
        meter.step(loss=1 / 0)
    assert run_status(tmp_path / "a").state == "failed"
    code = (
        "import os, sys, meshwright\nwith meshwright.meter(sys.argv[1]) as m:\n m.step()\n print(flush=True)\n input()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "b")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert run_status(tmp_path / "b").state == "running"
        with pytest.raises(ConfigError, match="another loop"):
            meshwright.monitor.meter(tmp_path / "b").__enter__()
        os.kill(process.pid, signal.SIGKILL)
    assert run_status(tmp_path / "b").state == "ended"


def test_what_a_meter_refuses(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="holds files but no run"):
        meshwright.monitor.meter(tmp_path).__enter__()
    (tmp_path / "config.toml").write_text("[model]\nname = 'gpt2'\n")
    with pytest.raises(ConfigError, match="another kind of run"):
        meshwright.monitor.meter(tmp_path).__enter__()
    with pytest.raises(ConfigError, match="meshwright watch"):
        meshwright.monitor.meter(tmp_path, config=MonitorConfig(port=0))
    with pytest.raises(ConfigError, match="belongs into"):
        meshwright.monitor.meter(tmp_path / "new").step()
    with pytest.raises(ConfigError, match="letters, digits"):
        meshwright.monitor.meter(tmp_path / "new").scalar("a\nb", 1.0)


HOOKS = """
import sys
import meshwright
from meshwright import Request

def own(info):
    info.scalar("own/double", 2 * info.record.loss)
    return Request.NONE

def once(info):
    if info.step == 3:
        info.scalar("own/third", info.step)
    return Request.NONE

meshwright.train(meshwright.RunConfig.from_dict({
    "model": {"name": "gpt2", "layers": 1, "width": 16, "heads": 2},
    "data": {"paths": [sys.argv[1]], "tokenizer": "chars", "sequence": 16, "workers": 1, "cache": sys.argv[3]},
    "train": {"steps": 4, "batch": 4, "sample_tokens": 0, "prove": False}, "run": sys.argv[2], "devices": 2,
    "layout": "replicate=2", "monitor": {"display": "none", "every": 1},
}), hooks=[own, once])
"""


def test_hooks_of_train_have_scalars_of_their_own(tmp_path: Path) -> None:
    paths = [str(path) for path in (write_corpus(tmp_path / "corpus.txt"), tmp_path / "run", tmp_path / "prepared")]
    done = subprocess.run([sys.executable, "-c", HOOKS, *paths], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    steps = read_run(tmp_path / "run").steps
    assert [line["scalars"]["own/double"] for line in steps] == [2 * line["loss"] for line in steps]
    assert [line["step"] for line in steps if "own/third" in line["scalars"]] == [3]
    assert "own/double" in (tmp_path / "run" / "report.html").read_text()
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 4
