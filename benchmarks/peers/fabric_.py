"""The same training through Lightning Fabric: ``--mode ddp``, or ``zero2``/``zero3`` by its 2-D strategy (FSDP2)."""

from __future__ import annotations

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from task import CLIP, VOCABULARY, Record, build_model, build_optimizer, rate_factor, read_task, windows
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

task = read_task()


def shard(model: torch.nn.Module, mesh: torch.distributed.DeviceMesh) -> torch.nn.Module:
    """Shards layer by layer, as Fabric's guide has it."""
    mesh = mesh["data_parallel"]
    for layer in model.transformer.h:
        fully_shard(layer, mesh=mesh, reshard_after_forward=task.mode == "zero3")
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


if task.mode == "ddp":
    strategy = DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True)
else:
    strategy = ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
fabric.launch()
if task.mode == "ddp":
    plain = build_model()
    model, optimizer = fabric.setup(plain, build_optimizer(plain))
else:
    model = fabric.setup_module(build_model())
    optimizer = fabric.setup_optimizers(build_optimizer(model))
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, task.steps))
batches = windows(task, fabric.global_rank, fabric.world_size)
record = Record(task)
record.begin()
for _ in range(task.steps):
    tokens, targets = next(batches)
    loss = cross_entropy(model(input_ids=tokens).logits.view(-1, VOCABULARY), targets.view(-1))
    fabric.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    record.lap(loss.item())
record.show(model, sharded=task.mode != "ddp")
torch.distributed.destroy_process_group()
