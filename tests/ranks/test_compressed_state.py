"""Rounded sums beside the rest of a run: loss scales, buffers that are freed, pipelines, checkpoints, a lost rank."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from meshwright.jobs import layouts
from meshwright.jobs.machines import Machines
from meshwright.models.analysis.objective_trial import try_forward
from meshwright.models.analysis.table import sharding_table
from meshwright.parallel.data_parallel import LateGradientReducer
from meshwright.proof.verify import random_batches
from meshwright.spec.layout import Layout
from meshwright.strategy import HybridParallelStrategy, PipelineEngine
from meshwright.train.config import OptimizerConfig
from meshwright.train.feed import MicroBatch
from meshwright.train.model_analysis import ModelAnalysis, analyse_model
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.run_config import RunConfig
from meshwright.train.scaler import LossScaler
from meshwright.train.step import Stepper
from tests.fake.recorder import build_rank
from tests.own_models import gpt2, mean_loss, plain_model, rows
from tests.ranks.group import run_ranks
from tests.ranks.test_compression import ROWS, TOKENS, VOCAB, model
from tests.runs import call, curve, events, words, write_corpus
from tests.tiers import further


def overflowed(rank: int, text: str, facts: ModelAnalysis) -> list[tuple[float, float, bool]]:
    """Trains three steps, rank 1's gradient infinite in the second; returns (finite, scale, whether weights moved)."""
    layout = Layout.parse(text)
    program = build_rank(model(False), layout, facts)
    scaler = LossScaler(True)
    stepper = Stepper(program, LocalAdamW(program.weights, OptimizerConfig()), scaler, clip=1.0, seed=0)
    first, last = layout.span(rank, ROWS)
    found = []
    for step, batch in enumerate(random_batches(3, ROWS, TOKENS, VOCAB, documents=False)):
        before = [weight.local.clone() for weight in program.weights]
        if step == 1 and rank == 1:
            scaler_value, scaler.scale = scaler.scale, float("inf")
        micro = [MicroBatch(batch.tokens[first:last], batch.targets[first:last], None)]
        finite = stepper.run(step, micro, int((batch.targets != -100).sum()), 1e-3, 0.0).read()["finite"]
        if step == 1 and rank == 1:
            scaler.scale = scaler_value
        scaler.update(bool(finite))
        moved = any(not torch.equal(old, weight.local) for old, weight in zip(before, program.weights))
        found.append((finite, scaler.scale, moved))
    return found


def test_an_infinity_skips_the_step_and_halves_the_scale_on_every_rank() -> None:
    text = "replicate=2,precision=fp16,compress=int8"
    facts = analyse_model(model(False), Layout.parse(text), ModelAnalysis(table=sharding_table(model(False), 2)))
    ranks = run_ranks(2, overflowed, text, facts)
    scale = LossScaler(True).scale
    assert ranks[0] == ranks[1] == [(1.0, scale, True), (0.0, scale / 2, False), (1.0, scale / 2, True)]


def buffered(rank: int, texts: list[str], experts: bool, facts: dict[str, ModelAnalysis]) -> dict[str, Any]:
    """Trains a step under each layout; returns bytes of buffers that live after it, and whether hooks may wait."""
    found = {}
    for text in texts:
        layout = Layout.parse(text)
        program = build_rank(model(experts), layout, facts[text])
        stepper = Stepper(program, LocalAdamW(program.weights, OptimizerConfig()), LossScaler(False), 1.0, seed=0)
        (batch,) = random_batches(1, ROWS, TOKENS, VOCAB, documents=False)
        first, last = layout.span(rank, ROWS)
        pairs = zip(*(item[first:last].chunk(layout.microbatches) for item in (batch.tokens, batch.targets)))
        micro = [MicroBatch(tokens, targets, None) for tokens, targets in pairs]
        stepper.run(0, micro, int((batch.targets != -100).sum()), 1e-3, 0.0).read()
        assert program.mesh is not None
        buffers = program.mesh.log.buffers
        syncs = [sync for stage in program.stages for sync in stage.gradient_syncs]
        waits = {sync._waits_in_backward for sync in syncs if isinstance(sync, LateGradientReducer)}
        found[text] = sum(buffers._live.values()), buffers.total_peak, waits
    return found


BUFFERED = {
    False: [
        "replicate=2,cp=2,compress=int8", "replicate=4,compress=int8:2", "replicate=2,shard=2,zero=3,compress=bf16",
    ],
    True: ["replicate=2,shard=2,ep=2,zero=2,compress=int8", "replicate=2,cp=2,ep=2,compress=fp8"],
}  # fmt: skip


@pytest.mark.parametrize("experts", further([False, True], (1,)))
def test_buffers_are_freed_and_hooks_that_exchange_tokens_do_not_wait(experts: bool) -> None:
    texts = BUFFERED[experts]
    # As a run analyses one layout after another: what doesn't depend on the layout is read once.
    known = ModelAnalysis(table=sharding_table(model(experts), 2), trial=try_forward(model(experts)))
    facts = {text: analyse_model(model(experts), Layout.parse(text), known) for text in texts}
    for found in run_ranks(4, buffered, texts, experts, facts, timeout=250):
        for text, (live, peak, waits) in found.items():
            assert live == 0 < peak, text
            # A rank that waits for a rounded sum in backward while others wait for its tokens would wait for ever.
            assert waits == (set() if "zero" in text else {"cp" not in text}), text


def engine_run(rank: int, text: str, folder: str) -> list[Any]:
    """Trains two steps of a pipeline, saves, trains one; loads what was saved and trains that one again."""
    engine = PipelineEngine(gpt2(), text, mean_loss, functools.partial(torch.optim.SGD, lr=0.1))
    index, count = engine.reader
    batch = tuple(item.chunk(count)[index] for item in rows()[0])
    losses = [engine.step(*batch) for _ in range(2)]
    dcp.save(engine.state_dict(), checkpoint_id=folder)
    losses += [engine.step(*batch) for _ in range(2)]
    state = engine.state_dict()
    step = int(state["random"]["step"]) if "random" in state else None
    dcp.load(state, checkpoint_id=folder)
    return [losses, [engine.step(*batch) for _ in range(2)], step]


def test_a_pipeline_rounds_by_its_step_and_a_resume_draws_what_it_would_have(tmp_path: Path) -> None:
    text = "pp=2,replicate=2,microbatches=2"
    exact = run_ranks(4, engine_run, text, str(tmp_path / "exact"))
    for rank, (losses, again, step) in enumerate(
        run_ranks(4, engine_run, f"{text},compress=int8", str(tmp_path / "c"))
    ):
        assert step == 4 and again == losses[2:]
        off = [abs(one - two) / two for one, two in zip(losses, exact[rank][0])]
        assert off[0] < 1e-9 and 0 < max(off[1:]) < 0.02, off


def old_checkpoint(rank: int, text: str, old: str) -> list[Any]:
    """Trains; saves a checkpoint without a count of roundings, which then loads in part."""
    strategy = HybridParallelStrategy(text)
    net = strategy.shard(plain_model())
    optimizer = strategy.optimizer(torch.optim.SGD, lr=0.1)
    index, count = strategy.reader
    losses = []
    for x, y in rows():
        loss = mean_loss(net(x.chunk(count)[index]), y.chunk(count)[index])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(strategy.mean(loss))
    state = strategy.state_dict(optimizer)
    # As a release before rounding wrote it.
    dcp.save({key: value for key, value in state.items() if key != "random"}, checkpoint_id=old)
    refused = ""
    try:
        dcp.load(strategy.state_dict(optimizer), checkpoint_id=old)
    except CheckpointException as error:
        refused = str(error)
    dcp.load(strategy.state_dict(optimizer), checkpoint_id=old, planner=DefaultLoadPlanner(allow_partial_load=True))
    return [losses, refused, sorted(state.get("random", {}))]


def test_checkpoints_from_before_rounding_load_in_part(tmp_path: Path) -> None:
    text = "replicate=2"
    exact = run_ranks(2, old_checkpoint, text, str(tmp_path / "exact"))
    rounded = run_ranks(2, old_checkpoint, f"{text},compress=int8", str(tmp_path / "rounded"))
    for (plain, _, none), (losses, refused, names) in zip(exact, rounded):
        assert names == ["rounding_step"] and none == [] and "random.rounding_step" in refused
        off = max(abs(one - two) / two for one, two in zip(losses, plain))
        assert 0 < off < 0.02, off


@pytest.mark.slow
def test_a_run_that_loses_a_rank_goes_on_rounding_among_fewer_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan_copies(config: RunConfig, model: Any, machines: Machines, *_: object) -> list[Any]:
        return layouts.make_plans(dataclasses.replace(config, layout=f"replicate={machines.ranks}"), model, machines)

    # The search's own choice follows the links of a machine that may be busy: a pipeline would have nothing to round.
    monkeypatch.setattr(layouts, "_planner_plans", plan_copies)
    write_corpus(tmp_path / "corpus.txt")
    options = ("--train.steps", "9", "--train.batch", "12", "--recovery.snapshot-every", "1", "--checkpoint.every", "0")
    faults = ("--recovery.on-death", "shrink", "--recovery.back-s", "10000", "--recovery.faults")
    kill = "kill:rank=2,step=4,phase=backward,generation=0"
    argv = words(tmp_path, "run", *options, *faults, kill, layout="replicate=3,compress=int8", devices=3)
    status, text = call(argv, tmp_path / "run.log")
    assert status == 0 and sorted(curve(tmp_path / "run")) == list(range(1, 10)), text
    (planned,) = events(tmp_path / "run", "planned")
    assert planned["layout"] == "replicate=2,compress=int8"
