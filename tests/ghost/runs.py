"""Runs of meshwright on simulated GPUs: warm, counted, and their collectives compared."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import os
import pickle
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from meshwright.models.analysis.objective_trial import ForwardTrial
from meshwright.models.build import BuiltModel
from meshwright.train import model_analysis
from meshwright.train.step import Stepper
from tests.ghost.log import collectives, disagreements
from tests.runs import call, warm, warm_compiler, write_corpus

COUNTERS = ("launches", "syncs", "to_device", "to_host", "pageable")
LIMIT_S = 400.0
SHARED = Path("/dev/shm")
"""Where the simulated NCCL's messages lie."""
SIZES = ("--model.width", "64", "--model.heads", "4")
MODELS = {
    "llama": ("--model", "llama", *SIZES, "--model.layers", "2", "--model.kv-heads", "2", "--model.ffn", "128"),
    "mixtral": ("--model", "mixtral", *SIZES, "--model.layers", "2", "--model.kv-heads", "2", "--model.ffn", "128"),
    "gpt2": ("--model", "gpt2", *SIZES, "--model.layers", "2"),
    "own": (),
}


@dataclass(frozen=True, kw_only=True)
class GhostRun:
    """A finished command under the simulated GPU."""

    status: int
    """Its exit status."""
    text: str
    """What it printed."""
    folder: Path
    """Its run directory."""
    steps: list[dict[str, int]]
    """Counters of each step of rank 0: kernel launches, host synchronisations, copies to and from the device, those of
    a page or more of host memory that isn't pinned; ``largest``, the bytes of its largest allocation; and ``queued``,
    the fewest kernels that a real device would still have had to run when the host got what it had waited for, from
    the end of the step before to the end of this one."""
    disagreements: list[str]
    """What the ranks of a group asked of NCCL otherwise than their peers."""
    collectives: int
    """Collectives and transfers of all ranks."""


def has_ghost() -> bool:
    """Returns whether this process runs under the simulated GPU."""
    return hasattr(ctypes.CDLL(None), "ghost_count")


def prepare(root: Path) -> None:
    """Writes the text of all runs and imports what they need, without running the autograd engine."""
    write_corpus(root / "corpus.txt")
    warm()
    for name in ("llama", "mixtral"):
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    warm_compiler()
    _warm_triton()


@cache
def _warm_triton() -> None:
    """Imports Triton and has it hash its own 400 MB, the key of its cache: each rank would, for half a second."""
    importlib.import_module("triton.experimental.gluon")
    importlib.import_module("triton.runtime.cache").triton_key()


def train(root: Path, name: str, model: str, devices: int, *more: str, layout: str = "", steps: int = 3) -> GhostRun:
    """Trains a tiny model for a few steps.

    Args:
        root: holds the text; the run goes below it.
        name: of the run.
        model: one of `MODELS`; "own" is named in ``more``.
        devices: simulated GPUs, a rank each.
        more: further words of the command; they win.
        layout: named, or empty for the planner's choice.
        steps: optimizer steps.
    """
    argv = [
        *("train", *MODELS[model], "--data", str(root / "corpus.txt")),
        *("--data.tokenizer", "chars", "--data.sequence", "64", "--data.cache", str(root / "prepared")),
        *("--data.workers", "1", "--train.batch", "8", "--train.steps", str(steps), "--train.sample-tokens", "0"),
        *("--schedule.warmup", "1", "--evaluation.every", "0", "--checkpoint.every", "2"),
        *("--monitor.display", "none", "--monitor.no-tensorboard", "--monitor.no-report", "--train.no-prove"),
        *("--devices", str(devices), "--run", str(root / name), *(("--layout", layout) if layout else ()), *more),
    ]
    return command(root, name, argv, devices)


def command(root: Path, name: str, argv: list[str], devices: int) -> GhostRun:
    """Runs a command of meshwright with so many simulated GPUs and collects what was counted."""
    log, counts = root / f"{name}.nccl", root / f"{name}.counts"
    log.mkdir()

    def before() -> None:
        os.environ["GHOST_GPUS"] = str(devices)
        os.environ["GHOST_LOG"] = str(log)
        warnings.simplefilter("ignore")
        count_steps(counts)
        remember_trials(root)

    try:
        status, text = call(argv, root / f"{name}.txt", before=before, limit_s=LIMIT_S)
    finally:
        # Groups are named by the process that made them; another command's ranks may be under way.
        for rank in log.iterdir():
            for path in (*SHARED.glob(f"ghost_{rank.name}-*"), *SHARED.glob(f"ghost_split_{rank.name}-*")):
                path.unlink(missing_ok=True)
    steps = [json.loads(line) for line in counts.read_text().splitlines()] if counts.exists() else []
    found = disagreements(log)
    return GhostRun(
        status=status, text=text, folder=root / name, steps=steps, disagreements=found, collectives=collectives(log)
    )


def remember_trials(folder: Path) -> None:
    """Has runs that this process starts take from a file what the first of them tried of a model, before any layout."""
    try_forward = model_analysis.try_forward

    def remembered(built: BuiltModel) -> ForwardTrial:
        shapes = [(name, item.shape) for name, item in built.module.named_parameters()]
        path = folder / f"{hashlib.sha256(repr((built.config, shapes)).encode()).hexdigest()}.trial"
        if not path.exists():
            path.write_bytes(pickle.dumps(try_forward(built)))
        return pickle.loads(path.read_bytes())

    model_analysis.try_forward = remembered  # type: ignore[assignment]


def count_steps(path: Path) -> None:
    """Has rank 0 of the runs that this process starts write a line of counters for each step."""
    ghost = ctypes.CDLL(None)
    ghost.ghost_count.restype = ghost.ghost_largest.restype = ghost.ghost_least_queued.restype = ctypes.c_long
    run = Stepper.run

    def counts() -> list[int]:
        return [ghost.ghost_count(number) for number in range(len(COUNTERS))]

    def counted(self: Stepper, step: int, *args: Any, **kwargs: Any) -> Any:
        before = counts()
        ghost.ghost_largest()
        outcome = run(self, step, *args, **kwargs)
        if not (torch.distributed.is_initialized() and torch.distributed.get_rank()):
            line = {"step": step} | dict(zip(COUNTERS, (b - a for a, b in zip(before, counts()))))
            line |= {"largest": ghost.ghost_largest(), "queued": ghost.ghost_least_queued()}
            with path.open("a", encoding="ascii") as file:
                file.write(json.dumps(line) + "\n")
        return outcome

    Stepper.run = counted  # type: ignore[method-assign]
