"""Tensor parallel by hand: torch's ``parallelize_module`` on transformers' llama, as torch's tutorial has it.

``--mode`` is words joined by ``+``: ``plain``; ``loss`` keeps the logits split (``loss_parallel``); ``sequence`` splits
the tokens between the matrices; ``shard`` puts FSDP2 over the other half of four ranks.
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from norms import clip_shards
from rules import layer_rules
from task import CLIP, Record, batches_of, build_llama, build_optimizer, rate_factor, read_task
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy

task = read_task()
words = task.mode.split("+")
sequence, split_loss = "sequence" in words, "loss" in words
dist.init_process_group("gloo")
if "shard" in words:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("shard", "tp"))
else:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("shard", "tp"))
tp = mesh["tp"]
model = build_llama(task.reference)
between = Shard(1) if sequence else Replicate()


layer_plan = layer_rules(between)
if sequence:
    layer_plan |= {
        "input_layernorm": SequenceParallel(use_local_output=True),
        "post_attention_layernorm": SequenceParallel(use_local_output=True),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    }
for layer in model.model.layers:
    parallelize_module(layer, tp, layer_plan)
logits = {"output_layouts": Shard(-1), "use_local_output": False} if split_loss else {"output_layouts": Replicate()}
outside = {
    # The whole embedding comes out, since the model reads the number of tokens off it; the layers take their share.
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
    "lm_head": ColwiseParallel(input_layouts=between, **logits),
}
if sequence:
    outside["model.norm"] = SequenceParallel(use_local_output=True)
    outside["model.layers.0"] = PrepareModuleInput(
        input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
    )
parallelize_module(model, tp, outside)
if "shard" in words:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"], reshard_after_forward=False)
optimizer = build_optimizer(model)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, task.steps))
batches = batches_of(task, mesh["shard"].get_local_rank(), mesh["shard"].size())
record = Record(task)
record.begin()
for _ in range(task.steps):
    tokens, targets = next(batches)
    with loss_parallel() if split_loss else contextlib.nullcontext():
        loss = cross_entropy(model(input_ids=tokens).logits.flatten(0, 1), targets.view(-1))
        loss.backward()
    clip_shards(model, CLIP)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad(set_to_none=True)
    record.lap(loss.item())
record.show(model, sharded=True)
dist.destroy_process_group()
