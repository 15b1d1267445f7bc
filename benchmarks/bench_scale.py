"""Seconds to plan and build one rank of thousands, on fake ranks and meta tensors, and the bytes that it holds.

    python benchmarks/bench_scale.py [gpt3|mixture ...] [--layout TEXT] [--ranks 0,2048,4095] [--json]
    python benchmarks/bench_scale.py mixture --cluster 16384xh100 --rows 8192 --ranks 0,9000     # the planner's layout

One process pretends to be each rank in turn: torch's fake process group answers for all others, and weights have shapes
but no memory. What runs is the code that a real rank runs: mesh, subgroups, stages, tensor and expert splits, FSDP2.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.cluster.cluster import Cluster
from meshwright.models.analysis.table import sharding_table
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.measure import measure_shape
from meshwright.parallel import build as builder
from meshwright.parallel.axis_group import TrafficLog
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.stage import copy_module
from meshwright.parallel.step_timer import StepTimer
from meshwright.planner.choose import choose
from meshwright.planner.cost.layout_batch import PricedJob
from meshwright.planner.memory import ModelParts, position_memory, rest_bytes
from meshwright.planner.question import Question
from meshwright.spec.end_units import EndUnits
from meshwright.spec.layout import Layout
from meshwright.train.model_analysis import ModelAnalysis, analyse_model
from meshwright.units import format_bytes, format_count

CASES = {
    # Source: Brown et al., GPT-3 (2020), table 2.1: 175 B.
    "gpt3": (
        ModelConfig(name="gpt2", layers=96, width=12288, heads=96),
        (50257, 2048),
        "pp=8,replicate=4,shard=16,tp=8,zero=1,microbatches=16,precision=bf16",
    ),
    "mixture": (
        ModelConfig(
            name="mixtral", layers=64, width=8192, heads=64, kv_heads=8, ffn=10240, experts=64, tie=False,
        ),
        (128000, 4096),
        "pp=8,replicate=8,shard=8,tp=8,ep=8,zero=1,microbatches=16,precision=bf16",
    ),
}  # fmt: skip
"""Model, (vocabulary, context), and a layout of 4,096 ranks."""


class Laps:
    """Seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._at = time.perf_counter()

    def lap(self, name: str) -> None:
        """Books the time since the last call."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._at
        self._at = now


def rank_bytes(built: BuiltModel, facts: ModelAnalysis, layout: Layout, rank: int, laps: Laps) -> dict[str, int]:
    """Builds one rank and returns the number of its weights and their bytes."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
    try:
        module = copy_module(built.module)
        laps.lap("copy the model")
        mesh = Mesh(layout, "cpu", TrafficLog())
        laps.lap("mesh")
        source = builder.ModelSource(
            module=module,
            layers=built.structure.layers,
            compute=lambda *_: (torch.empty(()), torch.empty(())),
            fill=lambda _, box: torch.empty([stop - start for start, stop in box], device="meta"),
            fill_buffers=lambda *_: None,
            ties=built.structure.ties,
            table=facts.table,
            layer_graph=facts.layer_graph,
            experts=facts.experts,
        )
        program = builder.build(source, layout, mesh, torch.device("meta"), StepTimer("cpu"))
        laps.lap("build")
        assert all(weight.local.is_meta for weight in program.weights)
        return {
            "weights": len(program.weights),
            "held": sum(weight.local.nbytes for weight in program.weights),
        }
    finally:
        dist.destroy_process_group()


def planned(built: BuiltModel, cluster: str, rows: int, sequence: int) -> Layout:
    """Returns the planner's layout."""
    job = PricedJob(shape=measure_shape(built), sequence=sequence, rows=rows)
    question = Question(job=job, cluster=Cluster.parse(cluster), base=Layout(precision="bf16"))
    return choose(question).best[0].layout


def measure(case: str, text: str, ranks: list[int], cluster: str = "", rows: int = 0) -> dict[str, Any]:
    """Returns what one model under one layout took, and what its ranks hold beside what was priced."""
    config, (vocab, context), usual = CASES[case]
    layout, laps = Layout.parse(text or usual), Laps()
    built = build_meta(config, vocab=vocab, context=context)
    laps.lap("model on meta")
    if cluster:
        layout = planned(built, cluster, rows, context)
        laps.lap("plan")
    facts = ModelAnalysis(table=sharding_table(built) if layout.degree("tp") > 1 else None)
    laps.lap("sharding table")
    facts = analyse_model(built, layout, facts)
    laps.lap("layer graph and experts")
    parts = ModelParts.of(
        built.module.named_parameters(remove_duplicate=False), built.structure.layers, built.structure.ties,
        facts.table, facts.layer_graph, facts.experts, ends=facts.trial.ends if facts.trial else EndUnits(),
    )  # fmt: skip
    positions = position_memory(layout, parts)
    priced = {rank: rest_bytes(layout, parts, rank) for rank in ranks}
    laps.lap("price")
    held = {rank: rank_bytes(built, facts, layout, rank, laps) | {"priced": priced[rank]} for rank in ranks}
    fullest = max(positions, key=lambda position: position.total_bytes)
    return {
        "case": case, "layout": str(layout), "world": layout.world, "parameters": parts.total, "seconds": laps.seconds,
        "ranks": held, "fullest": {"place": fullest.place, "memory": fullest.memory, "formula": fullest.formula},
    }  # fmt: skip


def show(found: dict[str, Any]) -> None:
    """Prints one result for people."""
    size = format_count(found["parameters"])
    print(f"{found['case']}: {size} parameters on {found['world']} ranks, {found['layout']}")
    for name, seconds in found["seconds"].items():
        print(f"  {name:<20}{seconds:8.2f} s")
    for rank, row in found["ranks"].items():
        held, priced = format_bytes(row["held"]), format_bytes(row["priced"])
        print(f"  rank {rank:<6} keeps {held} of master weights in {row['weights']} weights, priced {priced}")
    place = ", ".join(f"{name} {index}" for name, index in found["fullest"]["place"].items())
    for part, size in found["fullest"]["memory"].items():
        print(f"  fullest ({place}): {part:<11}{format_bytes(size):>11}  {found['fullest']['formula'][part]}")


def main() -> None:
    """Runs the cases that are named, or all."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("cases", nargs="*", default=list(CASES), help="of " + ", ".join(CASES))
    reader.add_argument("--layout", default="", help="instead of the case's own")
    reader.add_argument("--cluster", default="", help="let the planner choose for these machines")
    reader.add_argument("--rows", type=int, default=8192, help="of the global batch, with --cluster")
    reader.add_argument("--ranks", default="0,2048,4095", help="which ranks to be")
    reader.add_argument("--json", action="store_true")
    given = reader.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    builder.finalise_fsdp_shards = lambda module: None  # it gathers each unit once, which no fake rank can
    for case in given.cases:
        ranks = [int(rank) for rank in given.ranks.split(",")]
        found = measure(case, given.layout, ranks, given.cluster, given.rows)
        if given.json:
            print(json.dumps(found), flush=True)
        else:
            show(found)


if __name__ == "__main__":
    main()
