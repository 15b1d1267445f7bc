"""Attention by documents reaches torch's kernel for variable lengths on GPUs, by the names of launched kernels."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from tests.ghost.runs import GhostRun, has_ghost, prepare, train

pytestmark = [pytest.mark.skipif(not has_ghost(), reason="runs under the simulated GPU: make ghost")]
FORWARD, BACKWARD, WITH_MASK = "flash_fwd", "flash_bwd", "fmha_cutlass"
"""Parts of the names of kernels: FlashAttention's, and those of SDPA that take a dense mask."""
RUNS = {
    "llama": ("llama", (), "shard=2,zero=3,precision=bf16"),
    "recompute": ("llama", (), "replicate=2,precision=fp16,recompute=selective"),
    "compile": ("llama", (), "replicate=2,precision=bf16,compile=true"),
    "heads": ("llama", (), "cp=2,attention=heads,precision=bf16"),
    "ring": ("llama", (), "cp=2,attention=ring,recompute=selective,precision=bf16"),
    "ring-gemma3": ("llama", ("--model", "gemma3_text", "--model.layers", "6", "--model.overrides", "sliding_window",
                              "16"), "cp=2,attention=ring,precision=bf16"),
    "pipeline": ("llama", ("--model.layers", "4"), "pp=2,microbatches=2,precision=bf16"),
    "qwen3": ("llama", ("--model", "qwen3"), "tp=2,precision=bf16"),
    "gemma3": ("llama", ("--model", "gemma3_text", "--model.layers", "6", "--model.overrides", "sliding_window", "16"),
               "shard=2,zero=2,precision=bf16"),
    "mixtral": ("mixtral", (), "ep=2,shard=2,zero=1,precision=bf16"),
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("attention")
    prepare(root)
    random.seed(0)
    texts = (" ".join(random.choices(["red", "green", "blue", "42"], k=random.randint(3, 20))) for _ in range(400))
    (root / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return root


def launched(root: Path, monkeypatch: pytest.MonkeyPatch, name: str, attention: str) -> tuple[GhostRun, Counter[str]]:
    """Trains on documents; returns the run, and how often each kind of attention kernel was launched in its steps.

    The evaluation after them has whole rows, for which transformers reads, here as zero, whether they need a mask.
    """
    kernels = root / f"{name}-{attention}.kernels"
    monkeypatch.setenv("GHOST_KERNELS", str(kernels))
    model, more, layout = RUNS[name]
    words = ("--data", str(root / "texts.jsonl"), "--model.attention", attention, *more)
    run = train(root, f"{name}-{attention}", model, 2, *words, layout=layout)
    assert run.status == 0, run.text
    found: Counter[str] = Counter()
    lines = kernels.read_text().splitlines()
    last = max((index for index, line in enumerate(lines) if "backward" in line or "_bwd" in line), default=len(lines))
    for line in lines[: last + 1]:
        found.update(part for part in (FORWARD, BACKWARD, WITH_MASK) if part in line)
    return run, found


@pytest.mark.parametrize("name", RUNS)
def test_the_kernel_computes_forward_and_backward(root: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, found = launched(root, monkeypatch, name, "auto")
    assert found[FORWARD] and found[BACKWARD] and not found[WITH_MASK], found
    assert not run.disagreements


def test_without_it_a_mask_is_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the names above are worth: the same run, as the model's author wrote it, launches other kernels."""
    _, found = launched(root, monkeypatch, "llama", "sdpa")
    assert found[WITH_MASK] and not found[BACKWARD], found
