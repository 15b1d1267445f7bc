"""The same training through transformers' own tensor parallelism: ``DistributedConfig`` with the llama's own plan.

The plan splits the layers and the head, gathers the logits, and leaves the embedding whole on every rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from norms import clip_shards
from task import BETAS, CLIP, LEARNING_RATE, Record, batches_of, build_llama, decay_groups, rate_factor, read_task
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from transformers.distributed import DistributedConfig

task = read_task()
dist.init_process_group("gloo")
ranks = dist.get_world_size()
model = build_llama(task.reference, distributed_config=DistributedConfig(tp_size=ranks, tp_plan="auto"))


def optimizer_of() -> torch.optim.AdamW:
    """Returns fused AdamW as in the other scripts; DTensors and tensors can't be in one group of it."""
    groups = []
    for group in decay_groups(model):
        for split in (True, False):
            chosen = [weight for weight in group["params"] if isinstance(weight, DTensor) == split]
            groups += [group | {"params": chosen}] if chosen else []
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)


optimizer = optimizer_of()
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, task.steps))
batches = batches_of(task)
record = Record(task)
record.begin()
for _ in range(task.steps):
    tokens, targets = next(batches)
    loss = cross_entropy(model(input_ids=tokens).logits.flatten(0, 1), targets.view(-1))
    loss.backward()
    clip_shards(model, CLIP)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad(set_to_none=True)
    record.lap(loss.item())
record.show(model, sharded=True)
dist.destroy_process_group()
