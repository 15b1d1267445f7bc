"""The same training through DeepSpeed: ``--mode zero0`` to ``zero3``, with torch's own fused AdamW."""

from __future__ import annotations

import deepspeed
import torch
import torch.distributed as dist
from task import CLIP, VOCABULARY, Record, build_model, build_optimizer, rate_factor, read_task, windows
from torch.nn.functional import cross_entropy

task = read_task()
deepspeed.init_distributed("gloo")
world = dist.get_world_size()
model = build_model()
optimizer = build_optimizer(model)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, task.steps))
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=optimizer,
    lr_scheduler=schedule,
    config={
        "train_batch_size": task.rows,
        "train_micro_batch_size_per_gpu": task.rows // world,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": int(task.mode[-1])},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    },
)
batches = windows(task, dist.get_rank(), world)
record = Record(task)
record.begin()
for _ in range(task.steps):
    tokens, targets = next(batches)
    loss = cross_entropy(engine(input_ids=tokens).logits.view(-1, VOCABULARY), targets.view(-1))
    engine.backward(loss)
    engine.step()
    record.lap(loss.item())
record.show(engine, sharded=task.mode == "zero3")
dist.destroy_process_group()
