"""A mixture of experts over four axes: copies, shards, split attention, and experts on the ranks that tokens travel to.

python examples/four_dims_with_experts.py

`replicate`, `shard` and `tp` are dims of the mesh; `ep` divides the ranks of shard x tp once more, for experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import MixtralConfig, MixtralForCausalLM

from meshwright import HybridParallelStrategy, launch_ranks

LAYOUT, RANKS, VOCAB = "replicate=2,shard=2,zero=3,tp=2,ep=4", 8, 61


def build() -> MixtralForCausalLM:
    """A small Mixtral of four experts, the same on every rank."""
    torch.manual_seed(0)
    config = MixtralConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        intermediate_size=48,
        vocab_size=VOCAB,
    )
    return MixtralForCausalLM(config)


def on_one_device(batches: list[torch.Tensor]) -> list[float]:
    """The same training without ranks."""
    model, losses = build(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for rows in batches:
        loss = cross_entropy(model(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def work(context: Any) -> None:
    """What every rank does."""
    batches = list(torch.randint(VOCAB, (4, 8, 13), generator=torch.Generator().manual_seed(1)))
    wanted = on_one_device(batches) if context.rank == 0 else []

    strategy = HybridParallelStrategy(LAYOUT)
    model = strategy.shard(build())
    optimizer = strategy.optimizer(torch.optim.AdamW, lr=1e-2)
    index, count = strategy.reader
    losses = []
    for batch in batches:
        rows = batch.chunk(count)[index]
        loss = cross_entropy(model(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(strategy.mean(loss))
    if context.rank == 0:
        assert all(abs(loss - other) < 1e-4 for loss, other in zip(losses, wanted)), (losses, wanted)
        share = strategy.bytes / sum(item.nbytes for item in build().parameters())
        print(f"{LAYOUT}: losses of one device to 1e-4, last {losses[-1]:.4f}; {share:.0%} of the weights a rank")


if __name__ == "__main__":
    launch_ranks(work, RANKS, kind="cpu", timeout_s=100)
