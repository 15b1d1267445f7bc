"""Commands that only start or watch a run elsewhere import no torch, which takes seconds of a core on each node."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        assert name != "torch", "torch was imported"
sys.meta_path.insert(0, Watch())
from meshwright.cli.main import main
status = main(sys.argv[1:])
assert status == 0, status
"""
TRAIN = "train recipes/first.toml --run {root}/new --on"
COMMANDS = {
    "submission to Slurm": f"{TRAIN} slurm --slurm.nodes 2 --slurm.cpus-per-node 1 --dry-run",
    "submission to Kubernetes": f"{TRAIN} kubernetes --kubernetes.mount {{root}} --kubernetes.image x:1 "
    "--kubernetes.claim c --kubernetes.nodes 2 --kubernetes.gpus-per-node 1 --dry-run",
    "status": "status {run}",
    "logs": "logs {run}",
    "runs": "runs {root}",
    "cleaning": "runs clean {root}",
}
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "127.0.0.1,127.0.0.2"}
STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "127.0.0.1,127.0.0.2",
}
PLACES = {"the batch script": JOB | {"SLURM_TASK_PID": "12"}, "a node's keeper": JOB | STEP | {"SLURM_NODEID": "0"}}


def finish_without_torch(script: str, argv: list[str], environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script, *argv], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("name", list(COMMANDS))
def test_torch_is_not_imported(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "launch").mkdir(parents=True)
    (run / "launch" / "slurm-1.out").write_text("step 1\n")
    (run / "config.toml").write_text('layout = "replicate=2"\n[model]\nname = "gpt2"\n[train]\nsteps = 3\n')
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "step_s": 0.1, "tokens": 8, "tokens_total": 8}\n')
    argv = COMMANDS[name].format(run=run, root=tmp_path).split()
    finish_without_torch(SCRIPT, argv)


@pytest.mark.parametrize("name", list(PLACES))
def test_torch_is_not_imported_in_a_job_but_by_supervisors(name: str, tmp_path: Path) -> None:
    """Slurm's commands do nothing here, and what a keeper starts says that it was, and ends.

    The batch script says with 1 that the run isn't finished.
    """
    started = tmp_path / "started"
    for command in ("srun", "scontrol", "squeue", "scancel", "sacct", "supervisor"):
        program = tmp_path / command
        program.write_text(f'#!/bin/sh\necho "$0 $*" >> {started}\n')
        program.chmod(0o755)
    environment = os.environ | PLACES[name] | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    argv = ["train", "recipes/first.toml", "--run", str(tmp_path / "run"), "--devices", "2", "--slurm.nodes", "2"]
    script = SCRIPT.replace("status =", f'sys.executable = "{tmp_path / "supervisor"}"\nstatus =', 1)
    if name == "the batch script":
        script = script.replace("status == 0", "status == 1")
    finish_without_torch(script, [*argv, "--slurm.cpus-per-node", "1", "--on", "slurm"], environment)
    wanted = "supervisor -m meshwright train" if name == "a node's keeper" else "srun"
    assert wanted in started.read_text()
