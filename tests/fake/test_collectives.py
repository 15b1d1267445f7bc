"""The planner's list of collectives and its bytes of state are those of the real program, over the planner's space.

    python -m tests.fake.test_collectives [MODEL ...] [--devices 2,4,64] [--every N] [--ranks N]

runs as much of the space as is asked for (``--every 1``: all of it, hours) and prints what differs; the suite runs a
sample of each stratum: axes used, ZeRO level, schedule, recompute, split tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import random
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from meshwright.cluster.cluster import Cluster
from meshwright.errors import MeshwrightError
from meshwright.jobs.model_reading import model_parts
from meshwright.launch.contract import RankContext
from meshwright.models.analysis.table import sharding_table
from meshwright.models.build import BuiltModel, build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.measure import measure_shape
from meshwright.planner.cost.layout_batch import LayoutBatch, PricedJob
from meshwright.planner.cost.price import price
from meshwright.planner.memory import position_memory, rest_bytes
from meshwright.planner.question import Question
from meshwright.planner.space import cores, expand, layout_of
from meshwright.planner.traffic import step_collectives
from meshwright.spec.layout import Layout
from meshwright.train.model_analysis import ModelAnalysis, analyse_model, check_shapes
from tests.fake.recorder import build_rank, fake_rank, step_of
from tests.ranks.group import run_contexts
from tests.tiers import cases

VOCAB, TOKENS, ROWS, WIDTH = 128, 64, 64, 64
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 4, "ffn": 128, "tie": False},
    "tied": {"name": "llama", "kv_heads": 2, "ffn": 128, "tie": True},
    "gpt2": {},
    "unequal": {"name": "llama", "heads": 8, "kv_heads": 8, "ffn": 100, "tie": False},
    "mixtral": {"layers": 4, "kv_heads": 4, "ffn": 64, "experts": 8},
    "deepseek_v3": {"layers": 4, "ffn": 64, "experts": 8},
}
"""Dense, tied, fused, with a width that no degree divides, a mixture, and a mixture with latent attention."""
PRECISIONS = ("float32", "bf16")
DEVICES = (2, 4, 8, 16, 32, 64)


def config(name: str) -> ModelConfig:
    return ModelConfig(**({"name": name, "layers": 8, "width": WIDTH, "heads": 8} | SIZES[name]))


class Model:
    """One model, with what layouts need to know of it, each read once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.built: BuiltModel = build_meta(config(name), vocab=VOCAB, context=TOKENS)
        self.shape = measure_shape(self.built)
        self._facts: dict[Any, ModelAnalysis] = {}
        self._table = functools.cache(lambda degree: sharding_table(self.built, degree))

    def job(self, precision: str = "float32") -> PricedJob:
        return PricedJob(shape=self.shape, sequence=TOKENS, rows=ROWS, precision=precision)

    def facts(self, layout: Layout) -> ModelAnalysis:
        """What a layout needs; refused as `meshwright train` refuses it."""
        tp, cp = layout.degree("tp"), layout.degree("cp")
        key = tp, cp, layout.attention
        known = self._facts.get(key) or ModelAnalysis(table=self._table(tp * cp) if tp * cp > 1 else None)
        if self._facts and known.trial is None:
            # As in a run, what doesn't depend on how heads and tokens are split is tried out once.
            newest = next(reversed(self._facts.values()))
            known = dataclasses.replace(known, trial=newest.trial, layer_graph=newest.layer_graph)
        self._facts[key] = found = analyse_model(self.built, layout, known)
        check_shapes(found, layout, ROWS, TOKENS)
        return found

    def batch(self, devices: int, limits: dict[str, Any] | None = None) -> LayoutBatch:
        """All of the planner's space on so many devices, within limits."""
        cluster = Cluster.parse(f"{devices}xh100")
        question = Question(job=self.job(), cluster=cluster, base=Layout(), limits=limits or {})
        return expand(question.job, question.space, cores(question.job, question.space))

    def layout(self, batch: LayoutBatch, index: int) -> Layout:
        """One layout of a batch."""
        return layout_of(batch, index, Layout(), len(self.shape.blocks))

    def layouts(self, devices: int, limits: dict[str, Any] | None = None) -> list[Layout]:
        """The same as layouts."""
        batch = self.batch(devices, limits)
        return [self.layout(batch, index) for index in range(batch.count)]


def strata(batch: LayoutBatch) -> list[tuple[float, ...]]:
    """What of each layout of a batch decides which collectives there are."""
    degrees = (batch.pp, batch.replicate, batch.shard, batch.cp, batch.tp, batch.ep, batch.microbatches)
    choices = (batch.zero, batch.schedule, batch.recompute, batch.sequence)
    return list(zip(*((degree > 1).tolist() for degree in degrees), *(choice.tolist() for choice in choices)))


def sample(model: Model, devices: tuple[int, ...], count: int, seed: int = 0) -> list[Layout]:
    """Some layouts, each of another stratum; of the tens of thousands of the space these alone are built."""
    draw = random.Random(seed)
    batches = [model.batch(number) for number in devices]
    every = [(key, batch, index) for batch in batches for index, key in enumerate(strata(batch))]
    draw.shuffle(every)
    by_stratum = {key: (batch, index) for key, batch, index in every}
    found = [model.layout(*place) for place in draw.sample(list(by_stratum.values()), min(count, len(by_stratum)))]
    return [dataclasses.replace(item, precision=PRECISIONS[at % len(PRECISIONS)]) for at, item in enumerate(found)]


def compared(model: Model, layout: Layout, rank: int) -> str:
    """Returns what differs between plan and program on one rank; "" where nothing does."""
    facts = model.facts(layout)
    parts = model_parts(model.built, facts)
    with fake_rank(rank, layout.world):
        program = build_rank(model.built, layout, facts)
        held = sum(weight.local.nbytes for weight in program.weights)
        recorded = step_of(program, layout, rank, (ROWS, TOKENS, VOCAB, WIDTH))
    priced = rest_bytes(layout, parts, rank)
    told = [] if held == priced else [f"holds {held}, priced {priced}"]
    listed: dict[tuple[str, tuple[int, ...]], float] = {}
    for (group, kind), size in step_collectives(model.job(layout.precision), layout, parts, rank).bytes.items():
        if group.axis != "world":  # the trainer's, after the step
            key = kind, tuple(sorted(group.ranks))
            listed[key] = listed.get(key, 0.0) + size
    for key in sorted({*listed, *recorded}):
        planned, sent = listed.get(key, 0.0), recorded.get(key, 0)
        if abs(planned - sent) > 1e-6 * max(planned, sent):
            told.append(f"{key[0]} over {key[1]}: {sent} bytes, planned {planned:.0f}")
    return "; ".join(told)


def differences(model: Model, layouts: list[Layout], ranks: int, seed: int = 0) -> Iterator[tuple[str, int, str]]:
    """Yields (layout, rank, what differs or why it's refused) of some ranks of each layout; "" where all is equal."""
    draw = random.Random(seed)
    for layout in layouts:
        for rank in draw.sample(range(layout.world), min(ranks, layout.world)):
            try:
                yield str(layout), rank, compared(model, layout, rank)
            except MeshwrightError as error:
                yield str(layout), rank, f"refused: {error}"


def work(context: RankContext, name: str, count: int) -> str:
    """Runs a sample in a process of its own."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model = Model(name)
    return json.dumps(list(differences(model, sample(model, DEVICES, count), ranks=1)))


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(SIZES, ("tied",), extended=("mixtral",)))
def test_the_program_sends_and_holds_what_was_planned(name: str) -> None:
    (text,) = run_contexts(1, work, name, 6, timeout=250)
    found = json.loads(text)
    assert [row for row in found if row[2] and not row[2].startswith("refused")] == []
    assert sum(not row[2] for row in found) >= 3, found


def work_named(context: RankContext, name: str, texts: list[str]) -> str:
    """Runs layouts that are named, in a process of its own."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return json.dumps(list(differences(Model(name), [Layout.parse(text) for text in texts], ranks=1)))


@pytest.mark.slow
def test_weights_of_a_tokens_experts_travel_in_the_models_own_precision() -> None:
    texts = ["tp=2,sequence=true,precision=bf16", "tp=2,ep=2,precision=bf16"]
    (text,) = run_contexts(1, work_named, "mixtral", texts, timeout=120)
    assert [row[2] for row in json.loads(text)] == ["", ""]


@pytest.mark.slow
def test_each_rule_of_the_account_is_met_by_a_layout_that_is_named() -> None:
    """A scatter a micro-batch, gathers, masters of copies, tied stages, padded shards, what recompute sends again."""
    texts = [
        "shard=2,zero=2,microbatches=2",
        "replicate=2,shard=2,zero=3,microbatches=2,precision=bf16",
        "pp=2,tp=2,microbatches=2,sequence=true,recompute=full",
        "cp=2,shard=16,zero=1,attention=heads",
    ]
    (text,) = run_contexts(1, work_named, "tied", texts, timeout=120)
    assert [row[2] for row in json.loads(text)] == [""] * len(texts)


@pytest.mark.slow
@pytest.mark.parametrize("window", cases([0, 5, 20], (20,)))
def test_a_ring_sends_what_is_planned(window: int) -> None:
    """Of a row of 64 tokens: all that lies before a query, less than a run of 8, and parts of three runs."""
    name = "windowed" if window else "tied"
    if window:
        SIZES[name] = SIZES["llama"] | {"name": "mistral", "overrides": {"sliding_window": window}}
    texts = [
        "cp=4,tp=2,attention=ring,recompute=selective,precision=bf16",
        "shard=2,cp=4,zero=3,attention=ring,recompute=full,microbatches=2",
    ]
    (text,) = run_contexts(1, work_named, name, texts, timeout=120)
    SIZES.pop("windowed", None)
    assert [row[2] for row in json.loads(text)] == [""] * len(texts)


@pytest.mark.slow
def test_state_of_every_layout_of_a_mixture_is_priced_as_it_is_held() -> None:
    model, off = Model("mixtral"), []
    experts = analyse_model(model.built, Layout.parse("shard=2,ep=2"), ModelAnalysis()).experts
    parts = model_parts(model.built, ModelAnalysis(table=sharding_table(model.built, 8), experts=experts))
    layouts = model.layouts(16, {"fixed": {"pp": 1, "microbatches": 1}, "recomputes": ("none",), "offloads": ("none",)})
    # FSDP2 deals out rows: 8 experts lie on 8 of 16 ranks.
    assert any(layout.degree("ep") == 1 and layout.state_shards == 16 for layout in layouts)
    assert len(layouts) > 100
    for layout in layouts:
        places = position_memory(layout, parts)
        fullest = max(places, key=lambda place: place.total_bytes)
        one = price(model.job(), layout, Cluster.parse("16xh100"))
        if abs(one.memory["optimizer"] / fullest.memory["optimizer"] - 1) > 0.05:  # norms' few rows are rounded up
            off.append((str(layout), one.memory["optimizer"], fullest.memory["optimizer"]))
    assert off == []


def forwards(context: RankContext, texts: list[str]) -> str:
    """Returns, for each layout, how often each layer of rank 0 runs forward for a micro-batch."""
    torch.set_num_threads(1)
    built, found = build_meta(ModelConfig(name="gpt2", layers=4, width=32, heads=2), vocab=61, context=64), []
    for layout in map(Layout.parse, texts):
        with fake_rank(0, layout.world):
            program = build_rank(built, layout, analyse_model(built, layout, ModelAnalysis()))
            counts = [_counted(layer) for part in program.stages for layer in part.layers]
            step_of(program, layout, 0, (4, 8, 61, 32))
        # Two steps, and one forward that tries shapes out.
        found.append(sorted({(len(count) - 1) / layout.microbatches / 2 for count in counts}))
    return json.dumps(found)


def _counted(layer: Any) -> list[int]:
    calls: list[int] = []
    layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


def test_a_layer_that_recomputes_runs_forward_twice_under_every_schedule() -> None:
    zbv = "pp=2,microbatches=4,schedule=zbv"
    texts = [zbv, f"{zbv},recompute=selective:4", "pp=2,microbatches=4,schedule=zerobubble,recompute=full"]
    (text,) = run_contexts(1, forwards, texts, timeout=120)
    assert json.loads(text) == [[1.0], [2.0], [2.0]]


def main() -> int:
    """Compares a part of the space and prints what differs; exit status 1 where something does."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("models", nargs="*", default=list(SIZES))
    parser.add_argument("--devices", default=",".join(map(str, DEVICES)))
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=1)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    status = 0
    for name in given.models:
        model, counts = Model(name), {"equal": 0, "refused": 0, "differ": 0}
        for devices in map(int, given.devices.split(",")):
            for layout, rank, told in differences(model, model.layouts(devices)[:: given.every], given.ranks):
                kind = "equal" if not told else "refused" if told.startswith("refused") else "differ"
                counts[kind] += 1
                if kind == "differ":
                    status = 1
                    sys.stdout.write(f"{name} {layout} rank {rank}: {told}\n")
        sys.stdout.write(f"{name}: {counts}\n")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
