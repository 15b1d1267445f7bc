"""Sharded data parallel by hand: torch's fully_shard (FSDP2), layer by layer, as its tutorial has it.

``--mode zero3`` gathers each layer again for backward, ``--mode zero2`` keeps it gathered.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from task import CLIP, VOCABULARY, Record, build_model, build_optimizer, rate_factor, read_task, windows
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

task = read_task()
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = build_model()
for layer in model.transformer.h:
    fully_shard(layer, mesh=mesh, reshard_after_forward=task.mode != "zero2")
fully_shard(model, mesh=mesh, reshard_after_forward=False)
optimizer = build_optimizer(model)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, task.steps))
batches = windows(task, dist.get_rank(), dist.get_world_size())
record = Record(task)
record.begin()
for _ in range(task.steps):
    tokens, targets = next(batches)
    loss = cross_entropy(model(input_ids=tokens).logits.view(-1, VOCABULARY), targets.view(-1))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad(set_to_none=True)
    record.lap(loss.item())
record.show(model, sharded=True)
dist.destroy_process_group()
