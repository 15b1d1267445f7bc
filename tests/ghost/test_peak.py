"""The peak of memory that a run tells is that of its own tensors, not of what was measured before it began."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ghost.runs import has_ghost, train
from tests.runs import rows

pytestmark = [pytest.mark.skipif(not has_ghost(), reason="runs under the simulated GPU: make ghost")]
MOST = 150 << 20
"""Bytes: workspaces of the libraries, 32 MiB each, and a model of 300 KB; matrices of 8192 x 8192 take 805 MB."""


def test_the_peak_has_no_measurement_in_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Bytes are counted by torch's own cache, without which tensors are zero.
    monkeypatch.delenv("PYTORCH_NO_CUDA_MEMORY_CACHING", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    run = train(root, "peak", "llama", 1, layout="replicate=1", steps=2)
    assert run.status == 0, run.text
    memory = rows(run.folder)[-1]["memory"]
    assert memory["parameters"] + memory["optimizer"] < memory["peak"] < MOST, memory
