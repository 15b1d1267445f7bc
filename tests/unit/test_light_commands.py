"""Commands that only start or watch a run elsewhere import no torch, which takes seconds of a core on each node."""

from __future__ import annotations

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


@pytest.mark.parametrize("name", list(COMMANDS))
def test_torch_is_not_imported(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "launch").mkdir(parents=True)
    (run / "launch" / "slurm-1.out").write_text("step 1\n")
    (run / "config.toml").write_text('layout = "replicate=2"\n[model]\nname = "gpt2"\n[train]\nsteps = 3\n')
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "step_s": 0.1, "tokens": 8, "tokens_total": 8}\n')
    argv = COMMANDS[name].format(run=run, root=tmp_path).split()
    done = subprocess.run([sys.executable, "-c", SCRIPT, *argv], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
