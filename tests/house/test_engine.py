"""The process that forks ranks never runs torch's autograd engine, whatever it is asked to do.

The engine is the only way that a backward pass starts from Python, so it is replaced by one that complains in the
commands' own process. On a machine with a GPU that process's children couldn't run a backward any more.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.autograd_helper import run_in_helper
from tests.runs import call, events, words, write_corpus

TINY = ("--model.layers", "2", "--model.width", "32", "--model.heads", "4")
LAYOUTS = ("tp=2", "tp=2,sequence=true", "cp=2", "cp=2,attention=gather", "pp=2", "replicate=2")


class _Engine:
    """The autograd engine, which one process must not run."""

    def __init__(self, log: Path) -> None:
        self._engine: Any = torch.autograd.Variable._execution_engine
        self._forker, self._log = os.getpid(), log

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        with self._log.open("a") as file:
            file.write("forker\n" if os.getpid() == self._forker else "other\n")
        assert os.getpid() != self._forker, "the process that forks ranks runs the autograd engine"
        return self._engine.run_backward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def watched(log: Path) -> Callable[[], None]:
    """Returns what replaces the engine in a process that is about to run a command."""

    def replace() -> None:
        torch.autograd.Variable._execution_engine = _Engine(log)
        assert not torch.cuda.is_initialized()

    return replace


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_corpus(tmp_path / "corpus.txt", 60)
    return tmp_path


def run(root: Path, argv: list[str], status: int = 0) -> str:
    """Runs a command; only processes beside its own may have run the engine, and some have."""
    log = root / "engine.log"
    found, text = call(argv, root / "log", before=watched(log))
    assert found == status, text
    ran = log.read_text().split() if log.exists() else []
    assert "forker" not in ran, text
    assert ran, "no process ran the engine, so nothing was seen"
    return text


def test_the_witness_sees_the_engine(tmp_path: Path) -> None:
    """In a process that runs it itself."""

    def backward() -> None:
        watched(tmp_path / "engine.log")()
        torch.ones(2, requires_grad=True).sum().backward()

    with pytest.raises(AssertionError, match="runs the autograd engine"):
        run_in_helper(backward)
    assert (tmp_path / "engine.log").read_text() == "forker\n"


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_under_a_named_layout(root: Path, layout: str) -> None:
    run(root, words(root, "named", "--train.steps", "4", *TINY, layout=layout, devices=2))


@pytest.mark.slow
def test_the_proof_before_training(root: Path) -> None:
    text = run(root, words(root, "proved", "--train.prove", "--train.steps", "4", *TINY, layout="tp=2", devices=2))
    assert "proved: " in text


@pytest.mark.slow
def test_training_with_experts(root: Path) -> None:
    more = ("--model", "mixtral", "--model.experts", "4", "--train.steps", "4", *TINY)
    run(root, words(root, "experts", *more, layout="shard=2,ep=2", devices=2))


@pytest.mark.slow
def test_the_planner_and_its_trials(root: Path) -> None:
    run(root, words(root, "auto", "--train.steps", "4", "--trials", "2", *TINY, layout="auto", devices=2))


@pytest.mark.slow
def test_planning_within_recovery(root: Path) -> None:
    """A device that fails again and again is left out, under a layout that the supervisor plans for those that stay."""
    faults = ";".join(f"kill:rank=2,step=3,generation={number}" for number in range(2))
    more = ("--train.steps", "6", "--train.batch", "12", "--recovery.faults", faults, *TINY)
    text = run(root, words(root, "fewer", *more, layout="replicate=3", devices=3))
    assert events(root / "fewer", "planned")[-1]["ranks"] == 2, text


@pytest.mark.slow
def test_verify(root: Path) -> None:
    layouts = ("--layout", "tp=2", "cp=2", "pp=2")
    run(root, ["verify", "--model", "llama", *layouts, "--steps", "1"])


@pytest.mark.slow
@pytest.mark.parametrize("verb", [["plan", "--devices", "4"], ["inspect", "--layout", "tp=2,pp=2"]])
def test_a_model_is_looked_at(root: Path, verb: list[str]) -> None:
    run(root, [verb[0], "--model", "gpt2", *TINY, *verb[1:]])
