"""One object for pipeline, data, tensor and expert parallel: `strategy.step(batch)` on a mesh of four named dims.

python examples/sketch_four_dims.py
"""

from __future__ import annotations

from typing import Any

import torch
from sketch_ranks import run
from torch.distributed.device_mesh import init_device_mesh
from transformers import MixtralConfig, MixtralForCausalLM

from meshwright import HybridParallelStrategy


def init_large_model() -> MixtralForCausalLM:
    """A small Mixtral of four experts, the same on every rank; its balancing loss is off."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"num_local_experts": 4, "intermediate_size": 48, "vocab_size": 61}
    return MixtralForCausalLM(MixtralConfig(**sizes, **more, experts_implementation="eager")).double()


def batches() -> list[dict[str, torch.Tensor]]:
    """Made-up rows."""
    rows = torch.randint(61, (3, 8, 13), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": item, "labels": item} for item in rows]


def on_one_device() -> list[float]:
    """The same training without ranks."""
    model, losses = init_large_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in batches():
        loss = model(batch["input_ids"], labels=batch["labels"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def work() -> None:
    """What every rank does; the ranks of an expert dim read rows of their own."""
    mesh = init_device_mesh("cpu", (2, 1, 2, 2), mesh_dim_names=("pp", "dp", "ep", "tp"))
    strategy = HybridParallelStrategy(
        data_parallel_dim=mesh["dp"],
        tensor_parallel_dim=mesh["tp"],
        pipeline_parallel_dim=mesh["pp"],
        expert_parallel_dim=mesh["ep"],
        zero=1,
    )
    model = init_large_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = strategy.shard(model, optimizer, microbatches=2)
    index, count = strategy.reader
    losses = [strategy.step(mine(batch, index, count)) for batch in batches()]
    if mesh.get_rank() == 0:
        torch.testing.assert_close(losses, on_one_device(), rtol=1e-6, atol=0.0)
        print(f"{strategy.layout}: losses of one device, {losses[0]:.4f} to {losses[-1]:.4f}")


def mine(batch: dict[str, Any], index: int, count: int) -> dict[str, Any]:
    """The rows of a batch that a rank reads."""
    return {key: value.chunk(count)[index] for key, value in batch.items()}


if __name__ == "__main__":
    run(8, work)
