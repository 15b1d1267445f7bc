"""What every contender trains: the same model, rows, schedule and record. Nothing here is about parallelism."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

VOCABULARY, CONTEXT, LAYERS, WIDTH, HEADS = 24000, 256, 6, 384, 6
LEARNING_RATE, FLOOR, WARMUP, CLIP, DECAY, BETAS = 1e-3, 0.1, 1, 1.0, 0.1, (0.9, 0.95)


@dataclass(frozen=True)
class Task:
    """What one process is asked to do."""

    tokens: str
    """File of token ids, little-endian uint16."""
    rows: int
    """Rows of the global batch."""
    sequence: int
    steps: int
    started: float
    """Unix time at which the whole contender was started."""
    mode: str
    """Which of its modes the script runs."""
    micro: int
    """Micro-batches of a step."""
    reference: str
    """Folder with the llama, its first weights and every step's rows; empty for the GPT-2 and rows of its own."""


def read_task() -> Task:
    """Reads the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", required=True)
    for name in ("rows", "sequence", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--started", type=float, default=time.time())
    parser.add_argument("--mode", default="")
    parser.add_argument("--micro", type=int, default=1)
    parser.add_argument("--reference", default="")
    return Task(**vars(parser.parse_args()))


def build_model() -> GPT2LMHeadModel:
    """Returns a GPT-2 of 20M parameters, embedding and head tied, no dropout, with the weights of one seed."""
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=CONTEXT,
        n_layer=LAYERS,
        n_embd=WIDTH,
        n_head=HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def build_llama(folder: str, **settings: Any) -> LlamaForCausalLM:
    """Returns the llama that a folder holds, in float32, with the weights that meshwright starts from.

    Args:
        folder: in Hugging Face format.
        settings: more for ``from_pretrained``.
    """
    config = LlamaConfig.from_pretrained(folder)
    config.use_cache = False
    return LlamaForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32, **settings).train()


def model_of(task: Task) -> torch.nn.Module:
    """Returns the model that the task names."""
    return build_llama(task.reference) if task.reference else build_model()


def decay_groups(model: torch.nn.Module) -> list[dict]:
    """Returns AdamW's groups: matrices decay, vectors don't."""
    weights = list(model.parameters())
    return [
        {"params": [weight for weight in weights if weight.dim() >= 2], "weight_decay": DECAY},
        {"params": [weight for weight in weights if weight.dim() < 2], "weight_decay": 0.0},
    ]


def build_optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    """Returns fused AdamW over `decay_groups`."""
    return torch.optim.AdamW(decay_groups(model), lr=LEARNING_RATE, betas=BETAS, fused=True)


def rate_factor(step: int, steps: int) -> float:
    """Returns the learning rate of a step (from 0) as a share of the peak: one warm-up step, then half a cosine."""
    if step < WARMUP:
        return (step + 1) / (WARMUP + 1)
    done = (step - WARMUP) / max(1, steps - 1 - WARMUP)
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * done))


def windows(task: Task, rank: int, world: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields this rank's (tokens, targets), each (rows / world, S) int64: random windows of the token file."""
    tokens = np.memmap(task.tokens, dtype="<u2", mode="r")
    random = np.random.default_rng(1000 + rank)
    while True:
        starts = random.integers(0, len(tokens) - task.sequence - 1, task.rows // world)
        rows = torch.from_numpy(np.stack([tokens[i : i + task.sequence + 1] for i in starts]).astype(np.int64))
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def batches_of(task: Task, index: int = 0, count: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields a reader's (tokens, targets) of each step: the reference's rows, the same in meshwright, or random ones.

    Args:
        task: what to train.
        index: of the reader.
        count: of readers.
    """
    if not task.reference:
        yield from windows(task, index, count)
    share = task.rows // count
    for step in np.load(Path(task.reference) / "rows.npy", mmap_mode="r"):
        rows = torch.from_numpy(step[:, index * share : (index + 1) * share].astype(np.int64))
        yield rows[0], rows[1]


class Record:
    """Times of steps; call `lap` at the end of each, with its loss as a number."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.step_s: list[float] = []
        self.losses: list[float] = []
        self.cpu_s: list[float] = []
        self.first_step_s = 0.0
        self._at, self._cpu_at = time.perf_counter(), time.process_time()

    def begin(self) -> None:
        """Starts the first step's time."""
        self._at, self._cpu_at = time.perf_counter(), time.process_time()

    def lap(self, loss: float) -> None:
        """Ends a step; the next begins here."""
        now, cpu = time.perf_counter(), time.process_time()
        self.step_s.append(now - self._at)
        self.cpu_s.append(cpu - self._cpu_at)
        self.losses.append(loss)
        self._at, self._cpu_at = now, cpu
        if len(self.step_s) == 1:
            self.first_step_s = time.time() - self.task.started

    def show(self, model: torch.nn.Module, sharded: bool = False) -> None:
        """Prints one JSON line from rank 0; refuses to when a model that should be sharded is held whole."""
        import torch.distributed as dist

        ranks: list = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (peak_bytes(), self.cpu_s, self.losses))
        if dist.get_rank() == 0:
            held, whole = held_bytes(model), sum(4 * weight.numel() for weight in model_of(self.task).parameters())
            if sharded and held > 0.75 * whole:
                raise RuntimeError(f"holds {held} of {whole} bytes of parameters: nothing was sharded")
            found = {
                "step_s": self.step_s,
                "cpu_s": [sum(one) for one in zip(*(cpu_s for _, cpu_s, _ in ranks))],
                "loss": [sum(one) / len(ranks) for one in zip(*(losses for _, _, losses in ranks))],
                "first_step_s": self.first_step_s,
                "peak_bytes": [peak for peak, _, _ in ranks],
                "parameter_bytes": held,
            }
            print("RESULT " + json.dumps(found), flush=True)


def peak_bytes() -> int:
    """Returns the most memory that was resident in this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def held_bytes(model: torch.nn.Module) -> int:
    """Returns the bytes of parameters that this rank holds now: tells whether a contender shards at all."""
    total = 0
    for weight in model.parameters():
        part = getattr(weight, "ds_tensor", getattr(weight, "_local_tensor", weight))
        total += part.nbytes
    return total
