"""The usual tutorial's hybrid loop: a mesh of named dims, an optimizer made before, torch's clipping, a scheduler.

python examples/sketch_hybrid.py
"""

from __future__ import annotations

from typing import Any

import torch
from sketch_ranks import run
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2Config, GPT2LMHeadModel

from meshwright import HybridParallelStrategy

CALM = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


def init_large_model() -> GPT2LMHeadModel:
    """A GPT-2, small enough for a laptop, the same on every rank."""
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 61, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, **CALM, bos_token_id=0, eos_token_id=0)).double()


def batches() -> list[dict[str, torch.Tensor]]:
    """Made-up rows; a DistributedSampler of strategy.reader would deal them out."""
    rows = torch.randint(61, (4, 8, 13), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": item, "labels": item} for item in rows]


def train(model: Any, optimizer: Any, scheduler: Any) -> list[float]:
    """The loop, the same with and without ranks."""
    losses = []
    for batch in batches():
        outputs = model(batch["input_ids"], labels=batch["labels"])
        loss = outputs.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def start() -> tuple[Any, Any, Any]:
    """Model, optimizer and scheduler, as one device would make them."""
    model = init_large_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)


def work() -> None:
    """What every rank does."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    strategy = HybridParallelStrategy(data_parallel_dim=mesh["dp"], tensor_parallel_dim=mesh["tp"])
    model, optimizer, scheduler = start()
    model, optimizer = strategy.shard(model, optimizer)
    losses = train(model, optimizer, scheduler)
    if mesh.get_rank() == 0:
        torch.testing.assert_close(losses, train(*start()), rtol=1e-6, atol=0.0)  # its loss rounds to float32
        print(f"dp=2, tp=2: the loop equals one device, {losses[0]:.4f} to {losses[-1]:.4f}")


if __name__ == "__main__":
    run(4, work)
