"""Context parallel by hand: each rank has a run of every row's tokens, and gathers keys and values for attention.

torch's own ``context_parallel`` doesn't run on the CPU (2.13: ``_scaled_dot_product_flash_attention_for_cpu`` has no
sharding rule, and the math kernel mixes tensors and DTensors), so its place is taken by what one would write without
it: transformers' place for an attention function, with torch's differentiable gather in it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from task import CLIP, Record, batches_of, build_llama, build_optimizer, rate_factor, read_task
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import AttentionInterface

task = read_task()
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
run = task.sequence // ranks
places = torch.arange(rank * run, (rank + 1) * run)
allowed = torch.arange(task.sequence) <= places.unsqueeze(1)


def gathered(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
    """Attention of this rank's queries (B, H, S / cp, E) to all keys and values."""
    key, value = torch.cat(all_gather(torch.stack([key, value]).contiguous()), dim=3).unbind()
    out = scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=module.scaling)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("gathered", gathered)
model = build_llama(task.reference, attn_implementation="gathered")
optimizer = build_optimizer(model)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, task.steps))
batches = batches_of(task)
record = Record(task)
record.begin()
for _ in range(task.steps):
    tokens, targets = (whole[:, rank * run : (rank + 1) * run].contiguous() for whole in next(batches))
    output = model(input_ids=tokens, position_ids=places.unsqueeze(0), use_cache=False)
    loss = cross_entropy(output.logits.flatten(0, 1), targets.view(-1)) / ranks
    loss.backward()
    gradients = [weight.grad for weight in model.parameters()]
    flat = torch.cat([gradient.view(-1) for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, total in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
        gradient.copy_(total.view_as(gradient))
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    logged = loss.detach()
    dist.all_reduce(logged)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad(set_to_none=True)
    record.lap(logged.item())
record.show(model)
dist.destroy_process_group()
