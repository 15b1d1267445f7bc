"""The same training through Hugging Face accelerate: ``--mode ddp``, ``zero2`` or ``zero3`` (both its FSDP2).

On the CPU accelerate (1.15) drops an FSDP plugin without a word and trains copies; so its state is told by hand what it
is told by itself on a GPU, which runs its FSDP2 code as it is.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from task import CLIP, VOCABULARY, Record, build_model, build_optimizer, rate_factor, read_task, windows
from torch.nn.functional import cross_entropy

task = read_task()
if task.mode == "ddp":
    settings = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[settings])
else:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=task.mode == "zero3",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["GPT2Block"],
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
plain = build_model()
model, optimizer = accelerator.prepare(plain, build_optimizer(plain))
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: rate_factor(step, task.steps))
batches = windows(task, accelerator.process_index, accelerator.num_processes)
record = Record(task)
record.begin()
for _ in range(task.steps):
    tokens, targets = next(batches)
    loss = cross_entropy(model(input_ids=tokens).logits.view(-1, VOCABULARY), targets.view(-1))
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    record.lap(loss.item())
record.show(model, sharded=task.mode != "ddp")
accelerator.end_training()
