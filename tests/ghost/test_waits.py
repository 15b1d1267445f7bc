"""Between steps that are saved or evaluated, the host never waits for what it has just queued: the GPU has work."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ghost.runs import has_ghost, train

pytestmark = [pytest.mark.skipif(not has_ghost(), reason="runs under the simulated GPU: make ghost")]
STEPS = 8
PLAIN = range(3, STEPS)
"""Steps, counted from 0, between two whose outcome is read at their end: the second and the last."""
QUIET = ("--checkpoint.every", "0", "--recovery.snapshot-every", "0", "--recovery.compare-every", "100")
LAYERS = {"llama": 4, "qwen3": 4, "gemma3_text": 4, "gpt2": 2}
CASES = {
    "llama": ("llama", 1, "precision=bf16"),
    "llama-sharded": ("llama", 2, "shard=2,zero=3,precision=bf16,microbatches=2"),
    "llama-tp": ("llama", 2, "tp=2,sequence=true"),
    "llama-tp-overlap": ("llama", 2, "tp=2,sequence=true,tp_overlap=2"),
    "llama-pipeline": ("llama", 2, "pp=2,microbatches=4,schedule=1f1b"),
    "qwen3": ("qwen3", 1, "precision=bf16"),
    "gemma3_text": ("gemma3_text", 1, "precision=bf16"),
    "gpt2": ("gpt2", 1, "precision=bf16"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_gpu_has_work_when_the_host_goes_on(root: Path, name: str) -> None:
    family, ranks, layout = CASES[name]
    words = ("--model", family, "--model.layers", str(LAYERS[family]), *QUIET)
    run = train(root, name, "gpt2" if family == "gpt2" else "llama", ranks, *words, layout=layout, steps=STEPS)
    assert run.status == 0, run.text
    waits = [(step["queued"], step["launches"]) for step in run.steps]
    print(f"{name}: {waits}")
    # What is waited for lies before forward and backward of the step that is queued, which are most of its kernels.
    assert all(2 * waits[step][0] > waits[step][1] for step in PLAIN), waits
