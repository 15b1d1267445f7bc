"""Data parallel by hand: torch's DistributedDataParallel, as one would write it for this model and no other."""

from __future__ import annotations

import torch
import torch.distributed as dist
from task import CLIP, Record, batches_of, build_optimizer, model_of, rate_factor, read_task
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

task = read_task()
dist.init_process_group("gloo")
model = DistributedDataParallel(model_of(task), gradient_as_bucket_view=True, broadcast_buffers=False)
optimizer = build_optimizer(model)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, task.steps))
batches = batches_of(task, dist.get_rank(), dist.get_world_size())
record = Record(task)
record.begin()
for _ in range(task.steps):
    tokens, targets = next(batches)
    loss = cross_entropy(model(input_ids=tokens).logits.flatten(0, 1), targets.view(-1))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad(set_to_none=True)
    record.lap(loss.item())
record.show(model)
dist.destroy_process_group()
