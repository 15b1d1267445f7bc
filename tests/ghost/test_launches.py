"""A step launches as few kernels as the same step by hand with FSDP2, model by model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ghost.fsdp_loop import ROWS, TOKENS, VOCAB
from tests.ghost.runs import has_ghost, train

pytestmark = [pytest.mark.skipif(not has_ghost(), reason="runs under the simulated GPU: make ghost")]
LAYERS = 8
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


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, int], int]]:
    """Yields what returns the launches of a step of `fsdp_loop`; its loops are forks of one process."""
    command = [sys.executable, "-m", "tests.ghost.fsdp_loop", str(LAYERS), str(tmp_path_factory.mktemp("stores"))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, start_new_session=True) as loops:  # type: ignore[call-overload]
        assert loops.stdin is not None and loops.stdout is not None

        def launches(family: str, ranks: int) -> int:
            print(family, ranks, file=loops.stdin, flush=True)
            # Within the limit of a test, pytest's own.
            return int(loops.stdout.readline())

        try:
            yield launches
        finally:
            # With its ranks, which a loop that hangs would leave.
            os.killpg(loops.pid, signal.SIGKILL)


@pytest.mark.parametrize("name", CASES)
def test_a_step_launches_as_few_as_the_same_by_hand(root: Path, by_hand: Callable[[str, int], int], name: str) -> None:
    family, ranks, layout = CASES[name]
    model = family if family in ("gpt2", "mixtral") else "llama"
    words = ("--model", family, "--model.layers", str(LAYERS), "--model.vocab", str(VOCAB))
    words += ("--model.experts", "4") if family == "mixtral" else ()
    words += ("--data.sequence", str(TOKENS), "--train.batch", str(ROWS))
    run = train(root, name, model, ranks, *words, layout=layout, steps=4)
    assert run.status == 0, run.text
    own, least = run.steps[-1]["launches"], by_hand(family, ranks)
    print(f"{name}: {own} launches, {least} by hand")
    assert own <= MOST[ranks] * least, run.steps[-1]
