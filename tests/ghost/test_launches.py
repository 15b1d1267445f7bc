"""A step launches as few kernels as the same step by hand with FSDP2, model by model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ghost.fsdp_loop import ROWS, TOKENS, VOCAB
from tests.ghost.runs import has_ghost, train

pytestmark = [pytest.mark.skipif(not has_ghost(), reason="runs under the simulated GPU: make ghost")]
LAYERS = 8
LIMIT_S = 240.0
MOST = {1: 0.95, 2: 1.05}
"""Most launches over those of the loop by hand, by ranks: one rank's weights go through no FSDP2."""
CASES = {
    "llama": ("llama", 1, "precision=bf16"),
    "llama-sharded": ("llama", 2, "shard=2,zero=3,precision=bf16"),
    "qwen3": ("qwen3", 1, "precision=bf16"),
    "gemma3_text": ("gemma3_text", 1, "precision=bf16"),
    "gpt2": ("gpt2", 1, "precision=bf16"),
    "mixtral": ("mixtral", 1, "precision=bf16"),
}


def by_hand(family: str, ranks: int, store: Path) -> int:
    """Returns the launches of a step of `fsdp_loop`."""
    environment = os.environ | {"GHOST_GPUS": str(ranks)}
    command = [sys.executable, "-m", "tests.ghost.fsdp_loop", family, str(LAYERS), str(store)]
    loops = [
        subprocess.Popen([*command, str(rank), str(ranks)], env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    try:
        printed = [loop.communicate(timeout=LIMIT_S)[0] for loop in loops]
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    return int(printed[0])


@pytest.mark.parametrize("name", CASES)
def test_a_step_launches_as_few_as_the_same_by_hand(root: Path, name: str) -> None:
    family, ranks, layout = CASES[name]
    model = family if family in ("gpt2", "mixtral") else "llama"
    words = ("--model", family, "--model.layers", str(LAYERS), "--model.vocab", str(VOCAB))
    words += ("--model.experts", "4") if family == "mixtral" else ()
    words += ("--data.sequence", str(TOKENS), "--train.batch", str(ROWS))
    run = train(root, name, model, ranks, *words, layout=layout, steps=4)
    assert run.status == 0, run.text
    own, least = run.steps[-1]["launches"], by_hand(family, ranks, root / f"{name}.store")
    print(f"{name}: {own} launches, {least} by hand")
    assert own <= MOST[ranks] * least, run.steps[-1]
