"""One GPU: a snapshot copied beside the next update holds the state of its own step, in memory that the GPU writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from meshwright.checkpoint.snapshot import Segment, find_complete_states, read_snapshots
from meshwright.checkpoint.snapshot_writer import SnapshotWriter
from meshwright.checkpoint.tensor_shards import collect_local_shards, digest
from meshwright.launch.devices import count_gpus
from meshwright.parallel.weights import named_weights
from meshwright.train.config import OptimizerConfig
from meshwright.train.memory import StateSnapshots
from meshwright.train.optimizer import LocalAdamW

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not count_gpus(), reason="no GPU")]


def test_an_update_right_after_a_snapshot_is_not_in_it() -> None:
    # In a process of its own: one that has used a GPU can't fork ranks for the tests after it.
    words = [sys.executable, "-c", f"from {__name__} import check; check()"]
    done = subprocess.run(
        words, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def check() -> None:
    """Takes snapshots between updates that wait for nobody."""
    module = nn.Linear(4096, 4096, device="cuda")
    module.register_buffer("count", torch.zeros(5, device="cuda"))
    weights = named_weights(module, {}, 1)
    optimizer, segments = LocalAdamW(weights, OptimizerConfig()), [Segment(), Segment()]
    program = SimpleNamespace(
        weights=weights, frozen=(), error_feedback=None, buffers=lambda: iter([("count", module.count)])
    )

    def make(tensors: dict) -> SnapshotWriter:
        held = [part for part, _ in collect_local_shards(tensors)]
        kept = list(enumerate(held))
        return SnapshotWriter(
            segments,
            rank=0,
            generation=0,
            tensors=digest(held),
            local_shards=held,
            saved_shards=kept,
            changing="buffers/",
            device=torch.device("cuda:0"),
            threads=2,
        )

    aimed, wanted = StateSnapshots(make), []
    for step in range(1, 5):
        module.weight.grad, module.bias.grad = torch.randn_like(module.weight), torch.randn_like(module.bias)
        optimizer.step(1e-1, torch.ones((), dtype=torch.float64, device="cuda"))
        module.count += 1
        wanted.append((module.weight.detach().clone(), module.count.clone()))
        aimed.save(step, program, optimizer, {})  # type: ignore[arg-type]
        # What a forward does, without a wait.
        module.count += 100
        module.count -= 100
    module.weight.grad, module.bias.grad = torch.ones_like(module.weight), torch.ones_like(module.bias)
    optimizer.step(1.0, torch.ones((), dtype=torch.float64, device="cuda"))
    aimed.wait()
    state = find_complete_states(read_snapshots(segments))[0]
    found = state.tensors()
    assert state.step == 4
    assert torch.equal(found["weights/weight"], wanted[-1][0].cpu())
    assert torch.equal(found["buffers/count"], wanted[-1][1].cpu())
