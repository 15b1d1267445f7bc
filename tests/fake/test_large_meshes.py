"""512 ranks of the fake process group: the real wrapping code of any rank, on meta tensors, in one process."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.launch.contract import RankContext
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.parallel import build as builder
from meshwright.parallel.axis_group import TrafficLog
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.step_timer import StepTimer
from meshwright.planner.memory import StateSizes, state_memory
from meshwright.spec.layout import Layout
from tests.ranks.group import run_contexts

Box = tuple[tuple[int, int], ...]


def work(context: RankContext, text: str, rank: int) -> str:
    """Builds one rank in a process of its own, which nothing of it outlives; returns what it holds, as JSON."""
    warnings.simplefilter("ignore")
    layout = Layout.parse(text)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
    config = ModelConfig(name="llama", layers=2, width=512, heads=8, ffn=1024, tie=False)
    model = build_meta(config, vocab=2048, context=32)
    layers = model.structure.layers
    counts = [sum(item.numel() for item in model.module.get_submodule(layer).parameters()) for layer in layers]
    total = sum(item.numel() for item in model.module.parameters())
    builder.finalise_fsdp_shards = lambda module: None  # it gathers each unit once, which no fake rank can

    def fill(name: str, box: Box) -> torch.Tensor:
        return torch.empty([stop - start for start, stop in box], device="meta")

    source = builder.ModelSource(
        module=model.module, layers=layers, compute=None, fill=fill, fill_buffers=lambda *_: None
    )
    mesh = Mesh(layout, "cpu", TrafficLog())
    program = builder.build(source, layout, mesh, torch.device("meta"), StepTimer("cpu"))
    memory, _ = state_memory(layout, StateSizes(total=total, layers=tuple(counts)))
    return json.dumps({
        "held": sum(weight.local.nbytes for weight in program.weights),
        "planned": memory["optimizer"] // 3 if layout.zero else memory["parameters"],
        "copies": sorted({piece.copies for weight in program.weights for piece in weight.boxes}),
        "boxes": {weight.name: weight.boxes[0].global_box for weight in program.weights},
        "shapes": {weight.name: weight.shape for weight in program.weights},
        "meta": all(weight.local.is_meta for weight in program.weights),
        "axes": {name: axis_group.size for name, axis_group in mesh.axis_groups.items()},
        "index": mesh.axis_groups["shard"].index,
    })  # fmt: skip


def rank(text: str, number: int) -> dict:
    (found,) = run_contexts(1, work, text, number)
    return json.loads(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "number"),
    [("replicate=64,shard=8,zero=3", 511), ("replicate=8,shard=64,zero=1", 77), ("shard=512,zero=2", 300)],
)
def test_a_rank_of_512_holds_what_was_planned(text: str, number: int) -> None:
    found = rank(text, number)
    shard = found["axes"]["shard"]
    assert found["meta"] and found["index"] == number % shard
    assert found["copies"] == [512 // shard]
    assert found["held"] == pytest.approx(found["planned"], rel=0.02)
    for name, shape in found["shapes"].items():
        (start, stop), *rest = found["boxes"][name]
        assert [start, stop] == [found["index"] * shape[0] // shard, (found["index"] + 1) * shape[0] // shard]
        assert rest == [[0, size] for size in shape[1:]]


@pytest.mark.slow
def test_copies_over_512_ranks_hold_everything() -> None:
    found = rank("replicate=512", 511)
    assert found["held"] == found["planned"] and found["copies"] == [512]
