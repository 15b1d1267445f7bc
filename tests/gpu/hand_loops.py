"""Training loops by hand on one GPU, of transformers' llama: what `tests/gpu/parts/throughput.py` compares with.

Nothing in them is meshwright's: float32 weights under autocast, weights of bf16 alone, and FSDP2 with bf16 compute.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

LEARNING_RATE, CLIP, DECAY, BETAS, WARMUP = 3e-4, 1.0, 0.1, (0.9, 0.95), 1


@dataclass(frozen=True, kw_only=True)
class HandLoop:
    """A loop by hand."""

    style: str
    """``autocast``: float32 weights under autocast; ``bf16``: weights and moments of bf16 alone, which trains something
    else; ``fsdp2``: FSDP2 on a mesh of one rank, bf16 compute over float32 weights."""
    compile: bool
    """Compile each layer and the loss, as torchtitan does."""
    attention: str = "sdpa"
    """Implementation of transformers."""
    documents: bool = False
    """Tokens see their own document alone."""
    float8: bool = False
    """Convert the layers' linear modules by torchao, one scale a tensor."""


def build(loop: HandLoop, folder: Path, layers: int = 0) -> LlamaForCausalLM:
    """Returns the model of a folder in Hugging Face format, on the GPU; with ``layers`` so many, of weights drawn."""
    config = LlamaConfig.from_pretrained(folder, attn_implementation=loop.attention)
    config.use_cache = False
    config.num_hidden_layers = layers or config.num_hidden_layers
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    if not layers:
        model.load_state_dict(load_file(folder / "model.safetensors", device="cuda"))
    model.to(torch.bfloat16 if loop.style == "bf16" else torch.float32)
    if loop.float8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        settings = Float8LinearConfig.from_recipe_name("tensorwise")
        convert_to_float8_training(model.model.layers, config=settings)
    if loop.compile:
        for layer in model.model.layers:
            layer.compile()
    if loop.style == "fsdp2":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        # One rank gathers nothing: to keep what was cast is the fastest there.
        settings = {"mesh": init_device_mesh("cuda", (1,)), "mp_policy": policy, "reshard_after_forward": False}
        for layer in model.model.layers:
            fully_shard(layer, **settings)
        fully_shard(model, **settings)
    return model.train()


def run(loop: HandLoop, folder: Path, rows: Path, steps: int, result: Path, started: float, layers: int = 0) -> None:
    """Trains and writes ``step_s, loss, peak_bytes, first_step_s`` as JSON.

    Args:
        loop: what runs.
        folder: of the model.
        rows: an npz with ``tokens, targets, positions: (steps, B, S) int32``.
        steps: optimizer steps.
        result: file for the figures.
        started: Unix time at which the contender began.
        layers: as `build` takes them.
    """
    torch.cuda.set_device(0)
    if loop.style == "fsdp2":
        store = f"file://{result}.store"
        dist.init_process_group("nccl", init_method=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    model = build(loop, folder, layers)
    weights = list(model.parameters())
    groups = [
        {"params": [weight for weight in weights if weight.dim() >= 2], "weight_decay": DECAY},
        {"params": [weight for weight in weights if weight.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)
    # All rows lie on the device before the first step: reading them costs the loop nothing.
    data = {name: torch.from_numpy(values.astype(np.int64)).to("cuda") for name, values in np.load(rows).items()}
    loss_of = torch.compile(_mean_loss) if loop.compile else _mean_loss
    low = torch.autocast("cuda", torch.bfloat16) if loop.style == "autocast" else contextlib.nullcontext()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    losses, first_step_s = [], 0.0
    marks[0].record()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / (WARMUP + 1))
        index = step % len(data["tokens"])
        more: dict[str, Any] = {"position_ids": data["positions"][index]} if loop.documents else {}
        with low:
            logits = model(input_ids=data["tokens"][index], **more).logits
            loss = loss_of(logits, data["targets"][index])
        loss.backward()
        del logits
        torch.nn.utils.clip_grad_norm_(weights, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # Read at the end: a loop that logs needn't wait for what it has just queued.
        losses.append(loss.detach())
        marks[step + 1].record()
        if step == 0:
            torch.cuda.synchronize()
            first_step_s = time.time() - started
    torch.cuda.synchronize()
    figures = {
        "step_s": [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)],
        "loss": [float(loss) for loss in losses],
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "first_step_s": first_step_s,
    }
    result.with_suffix(".part").write_text(json.dumps(figures))
    os.replace(result.with_suffix(".part"), result)


def _mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross-entropy of (B, S, V) logits in float32; -100 marks positions without a target."""
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
