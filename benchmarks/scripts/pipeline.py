"""A pipeline by hand: torch's ``PipelineStage`` and schedules over transformers' llama, cut layer by layer.

``--mode`` is the schedule and the layers of each stage: ``1f1b:5-3``, ``gpipe:5-3``, ``interleaved:3-2-2-1``,
``zbv:2-3-2-1``; ``:tp`` at its end splits each stage's matrices over pairs of ranks. What differs from a tutorial is
the norm over all stages and the loss that every rank logs.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from norms import scale, squared_norm
from rules import layer_rules
from task import CLIP, Record, batches_of, build_llama, build_optimizer, rate_factor, read_task
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

KINDS = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
}


class Stage(torch.nn.Module):
    """Some layers of the llama, with the embedding before the first and norm and head after the last."""

    def __init__(self, whole: LlamaForCausalLM, first: int, stop: int) -> None:
        super().__init__()
        inner = whole.model
        self.embed_tokens = inner.embed_tokens if first == 0 else None
        self.layers = inner.layers[first:stop]
        last = stop == len(inner.layers)
        self.norm: torch.nn.Module | None = inner.norm if last else None
        self.lm_head: torch.nn.Module | None = whole.lm_head if last else None
        self.rotary_emb = inner.rotary_emb

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens (B, S) or hidden states (B, S, D) to hidden states or logits (B, S, V)."""
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        places = torch.arange(x.shape[1]).unsqueeze(0)
        rotation = self.rotary_emb(x, places)
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_ids=places, position_embeddings=rotation)
        return x if self.lm_head is None or self.norm is None else self.lm_head(self.norm(x))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of a micro-batch; the schedule takes the mean over micro-batches."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def numbers_of(kind: str, rank: int, ranks: int, stages: int) -> list[int]:
    """Returns the stages of a rank: around in a loop, or in a V."""
    if kind == "zbv":
        return [rank, 2 * ranks - 1 - rank]
    return list(range(rank, stages, ranks))


def split_matrices(stage: Stage, mesh: DeviceMesh) -> None:
    """Puts torch's tensor parallelism on a stage."""
    for layer in stage.layers:
        parallelize_module(layer, mesh, layer_rules(Replicate()))
    if stage.embed_tokens is not None:
        parallelize_module(stage, mesh, {"embed_tokens": RowwiseParallel(input_layouts=Replicate())})
    if stage.lm_head is not None:
        parallelize_module(stage, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})


task = read_task()
kind, cuts, *more = task.mode.split(":")
dist.init_process_group("gloo")
width = 2 if more else 1
mesh = init_device_mesh("cpu", (dist.get_world_size() // width, width), mesh_dim_names=("pp", "tp"))
line = mesh["pp"].get_group()
rank, ranks = dist.get_rank(line), dist.get_world_size(line)
sizes = [int(size) for size in cuts.split("-")]
bounds = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
whole = build_llama(task.reference)
numbers = numbers_of(kind, rank, ranks, len(sizes))
modules = [Stage(whole, bounds[number], bounds[number + 1]) for number in numbers]
del whole
if more:
    for one in modules:
        split_matrices(one, mesh["tp"])
model = torch.nn.ModuleList(modules)
stages = []
for one, number in zip(modules, numbers):
    stages.append(PipelineStage(one, number, len(sizes), torch.device("cpu"), group=line))
alone = stages if kind in ("interleaved", "zbv") else stages[0]
run = KINDS[kind](alone, n_microbatches=task.micro, loss_fn=loss_of)
optimizer = build_optimizer(model)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, task.steps))
batches = batches_of(task)
first, last = 0 in numbers, len(sizes) - 1 in numbers
record = Record(task)
record.begin()
for _ in range(task.steps):
    tokens, targets = next(batches)
    losses: list[torch.Tensor] = []
    run.step(*([tokens] if first else []), target=targets if last else None, losses=losses if last else None)
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    loss = torch.stack(losses).mean() if last else torch.zeros(())
    totals = torch.stack([loss.detach() / width, squared_norm(gradients, width)])
    dist.all_reduce(totals)
    scale(gradients, totals[1].sqrt(), CLIP)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad(set_to_none=True)
    record.lap(totals[0].item())
record.show(model, sharded=True)
dist.destroy_process_group()
