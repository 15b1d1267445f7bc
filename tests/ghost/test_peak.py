"""The peak of memory that a run tells is that of its own tensors, not of what was measured before it began."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ghost.runs import has_ghost, train
from tests.runs import rows

pytestmark = [pytest.mark.skipif(not has_ghost(), reason="runs under the simulated GPU: make ghost")]
MOST = 150 << 20
"""Bytes: workspaces of the libraries, 32 MiB each, and a model of 300 KB; matrices of 8192 x 8192 take 805 MB."""


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are counted by torch's own cache, without which tensors are zero."""
    monkeypatch.delenv("PYTORCH_NO_CUDA_MEMORY_CACHING", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")


def test_the_peak_has_no_measurement_in_it(root: Path) -> None:
    run = train(root, "peak", "llama", 1, layout="replicate=1", steps=2)
    assert run.status == 0, run.text
    memory = rows(run.folder)[-1]["memory"]
    assert memory["parameters"] + memory["optimizer"] < memory["peak"] < MOST, memory


def test_offload_takes_state_off_the_device(root: Path) -> None:
    """Moments; and masters, which the optimizer's offload leaves there. Of sums of micro-batches both leave all."""
    words, memories = ("--model.width", "256", "--model.layers", "8"), []
    for kind in ("replicate=1", "offload=optimizer", "offload=parameters"):
        layout = f"{kind},microbatches=2,precision=bf16"
        run = train(root, kind.replace("=", "-"), "gpt2", 1, *words, layout=layout, steps=2)
        assert run.status == 0, run.text
        memories.append(rows(run.folder)[-1]["memory"])
    masters = memories[0]["optimizer"] / 3
    left = [(memories[0]["peak"] - memory["peak"]) / masters for memory in memories[1:]]
    assert 1.9 < left[0] < 2.1 and 2.9 < left[1] < 3.1, left
