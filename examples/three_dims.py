"""A transformers model on three dims: two stages, two copies of each, every layer split over two ranks.

python examples/three_dims.py
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

from meshwright import PipelineEngine, device_mesh, launch_ranks

LAYOUT, RANKS, VOCAB = "pp=2,replicate=2,tp=2", 8, 61
CALM = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
ADAM = functools.partial(torch.optim.AdamW, lr=1e-2)


def build() -> GPT2LMHeadModel:
    """A small GPT-2, the same on every rank, in float64 so that rounding hides nothing."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4, n_embd=32, n_head=4, vocab_size=VOCAB, n_positions=16, bos_token_id=0, eos_token_id=0, **CALM
    )
    return GPT2LMHeadModel(config).double()


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over a micro-batch."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def on_one_device(batches: list[torch.Tensor]) -> float:
    """The same epoch without ranks: its mean loss."""
    model, total = build(), 0.0
    optimizer = ADAM(model.parameters())
    for batch in batches:
        loss = loss_of(model(batch[:, :-1]).logits, batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
    return total / len(batches)


def work(context: Any) -> None:
    """What every rank does."""
    draw = torch.Generator().manual_seed(1)
    batches = [torch.randint(VOCAB, (8, 13), generator=draw) for _ in range(3)]
    mesh = device_mesh(LAYOUT)
    engine = PipelineEngine(build(), LAYOUT, loss_of, ADAM, microbatches=2)
    index, count = engine.reader
    mine = [batch.chunk(count)[index] for batch in batches]
    mean = engine.train_epoch([(rows[:, :-1], rows[:, 1:]) for rows in mine])
    if context.rank == 0:
        wanted = on_one_device(batches)
        assert abs(mean - wanted) < 1e-9 * wanted, (mean, wanted)
        print(f"{mesh.mesh_dim_names} {tuple(mesh.shape)}: an epoch equal to one device, mean loss {mean:.4f}")


if __name__ == "__main__":
    launch_ranks(work, RANKS, kind="cpu", timeout_s=100)
