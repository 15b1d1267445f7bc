"""A pipeline's program: evaluation, shared weights after a load, lower precision, dropout, and what it sends."""

from __future__ import annotations

import dataclasses
import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from meshwright.checkpoint.config import CheckpointConfig
from meshwright.checkpoint.manifest import Origin
from meshwright.checkpoint.store import CheckpointStore
from meshwright.models.build import build_meta
from meshwright.models.config import ModelConfig
from meshwright.models.deferred import materialise
from meshwright.models.forward import model_forward
from meshwright.parallel.program import Program
from meshwright.parallel.stage_module import Stamp
from meshwright.proof.verify import random_batches
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction
from meshwright.train.config import OptimizerConfig
from meshwright.train.feed import MicroBatch
from meshwright.train.loss import cross_entropy_sums
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.scaler import LossScaler
from meshwright.train.session import build_program
from meshwright.train.state import load_state, save_state, state_tensors
from meshwright.train.step import Stepper
from tests.ranks.group import run_ranks
from tests.tiers import further

MODEL = ModelConfig(name="gpt2", layers=4, width=32)
VOCAB, SEQUENCE = 61, 8


def program_of(text: str, config: ModelConfig = MODEL) -> Program:
    layout = Layout.parse(text)
    plan = Plan(layout=layout, prediction=Prediction(memory={}), ranks=layout.world, reason="test")
    return build_program(build_meta(config, VOCAB, 16), plan, torch.device("cpu"))


def batches(count: int, rows: int = 2, sequence: int = SEQUENCE) -> list[MicroBatch]:
    return random_batches(count, rows, sequence, VOCAB, documents=False)


def summed(vectors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(vectors).sum(dim=0)


def plain_sums(batch: MicroBatch, change: float = 0.0) -> torch.Tensor:
    built = build_meta(MODEL, VOCAB, 16)
    module = materialise(built.module, built.recipe, MODEL.seed)
    with torch.no_grad():
        module.get_input_embeddings().weight.add_(change)
        logits = model_forward(module.eval(), built.structure, batch.tokens)
        return cross_entropy_sums(logits, batch.targets, 1.0)[1]


@pytest.mark.parametrize(
    "layout", further(["pp=2", "pp=2,schedule=zbv,microbatches=2", "pp=2,schedule=interleaved"], (1,))
)
def test_evaluation_takes_any_shape_and_follows_weights(layout: str) -> None:
    def work(rank: int) -> list[Any]:
        program = program_of(layout)
        found = [program.evaluate(batch) for batch in (*batches(1), *batches(1, 3, 5))]
        for weight in program.weights:
            if weight.name == "transformer.wte.weight":
                weight.local.add_(0.25)
        names = [weight.name for weight in program.weights]
        return [*found, program.evaluate(batches(1)[0]), names]

    ranks = run_ranks(2, work)
    wanted = [plain_sums(batches(1)[0]), plain_sums(batches(1, 3, 5)[0]), plain_sums(batches(1)[0], 0.25)]
    for place, sums in enumerate(wanted):
        assert torch.allclose(summed([rank[place] for rank in ranks]), sums, rtol=1e-5)
    assert all(len(rank[3]) == len(set(rank[3])) for rank in ranks)
    # The first stage alone has the embedding of positions; that of tokens is the head too, which a V has on rank 0.
    embeddings = {f"transformer.{name}.weight" for name in ("wte", "wpe")}
    head = set() if "zbv" in layout else {"transformer.wte.weight"}
    assert [embeddings.intersection(rank[3]) for rank in ranks] == [embeddings, head]


def test_bf16_stages_send_bf16_and_keep_wide_gradients() -> None:
    def work(rank: int) -> tuple[torch.Tensor, set[torch.dtype], int]:
        program = program_of("pp=2,microbatches=2,precision=bf16")
        program.mesh.log.drain()
        sums = program.forward_backward(batches(2), 1.0, (0, 0))
        kinds = {weight.gradient.dtype for weight in program.weights}
        program.mesh.log.drain()
        program.clear_gradients()
        program.forward_backward(batches(2), 1.0, (0, 0))
        sent = sum(row.bytes for row in program.mesh.log.drain() if (row.axis, row.op) == ("pp", "send"))
        return sums, kinds, sent

    ranks = run_ranks(2, work)
    wanted = summed([plain_sums(batch) for batch in batches(2)])
    assert torch.allclose(summed([rank[0] for rank in ranks])[:2], wanted[:2], rtol=2e-2)
    assert [rank[1] for rank in ranks] == [{torch.float32}] * 2
    assert [rank[2] for rank in ranks] == [2 * 2 * SEQUENCE * 32 * 2] * 2


def test_dropout_follows_seed_and_step() -> None:
    config = ModelConfig(name="gpt2", layers=2, width=32, dropout=0.3)

    def work(rank: int) -> list[Any]:
        program = program_of("pp=2,microbatches=2,recompute=full", config)
        found = []
        for key in ((0, 1), (0, 1), (5, 1), (0, 2)):
            program.clear_gradients()
            found.append(program.forward_backward(batches(2), 1.0, key))
        return found

    ranks = run_ranks(2, work)
    same, again, *others = (float(summed([rank[place] for rank in ranks])[0]) for place in range(4))
    assert same == again
    assert len({same, *others}) == 3


def test_a_checkpoint_names_each_weight_once_over_the_line() -> None:
    class NoState:
        outer = None

        def state(self) -> dict[str, torch.Tensor]:
            return {}

    def work(rank: int) -> list[str]:
        names = sorted(state_tensors(program_of("pp=2"), NoState()))  # type: ignore[arg-type]
        dist.barrier()  # Rank 0 holds the store by which the other one still makes its groups.
        return names

    first, last = (set(names) for names in run_ranks(2, work))
    weights = {f"weights/{name}" for name, _ in build_meta(MODEL, VOCAB, 16).module.named_parameters()}
    assert first | last >= weights
    assert {name for name in first & last if name.startswith("weights/")} == {"weights/transformer.wte.weight"}


def test_a_checkpoint_goes_on_under_another_layout(tmp_path: Path) -> None:
    def work(rank: int, text: str, resume: bool) -> list[float]:
        config = dataclasses.replace(MODEL, dropout=0.2)
        program = program_of(f"{text},microbatches=4,precision=float64", config)
        optimizer, scaler = LocalAdamW(program.weights, OptimizerConfig()), LossScaler(False)
        store = CheckpointStore.build(tmp_path, CheckpointConfig())
        origin = Origin(model="m", data="d", layout=Layout.parse(text), config={})
        stepper = Stepper(program, optimizer, scaler, clip=1.0, seed=0)
        if resume:
            assert load_state(store, program, optimizer, scaler, origin) is not None
        else:
            stepper.run(0, batches(4), 64, 1e-2, False)
            save_state(store, 1, program, optimizer, scaler, origin, 0)
        return [stepper.run(step, batches(4), 64, 1e-2, False).read()["loss"] for step in (1, 2)]

    wanted = run_ranks(2, work, "pp=2,schedule=zbv", False)
    assert wanted[0] == wanted[1]
    for text, ranks in (("replicate=1", 1), ("pp=2,schedule=zbv", 2)):
        for found in run_ranks(ranks, work, text, True):
            assert found == pytest.approx(wanted[0], rel=1e-9)


@pytest.mark.parametrize("layout", further(["pp=2,microbatches=4", "pp=2,schedule=interleaved,microbatches=4"]))
def test_receives_are_posted_before_a_step_computes(layout: str) -> None:
    """Gloo sends to nobody who hasn't said where to."""

    def work(rank: int) -> list[list[str]]:
        program: Any = program_of(layout)
        program.forward_backward(batches(4), 1.0, (0, 0))
        rows = program._current_run[1]._runtime.pipeline_order_with_comms
        return [[action.computation_type.value for action in rows[place]] for place in sorted(rows)]

    for kinds in run_ranks(2, work)[0]:
        count = sum(kind.startswith("RECV") for kind in kinds)
        assert count and all(kind.startswith("RECV") for kind in kinds[:count])


@pytest.mark.parametrize(
    "layout", further(["pp=2,schedule=1f1b,microbatches=4", "pp=2,schedule=interleaved,microbatches=4"])
)
def test_a_rank_that_stands_still_makes_no_other_hold_more(layout: str) -> None:
    """Of a step's most bytes, as torch's allocator counts them: what is early waits where it was to arrive anyway."""

    def most_bytes(program: Program, rank: int, late: tuple[int, str, int] | None) -> int:
        def stand_still(phase: str, microbatch: int) -> None:
            if (rank, phase, microbatch) == late:
                time.sleep(0.2)

        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
            program.forward_backward(batches(4, rows=8), 1.0, (0, 0), Stamp(phase=stand_still))
        program.clear_gradients()
        events = measured.profiler.kineto_results.events()  # type: ignore[union-attr]
        changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
        return max(itertools.accumulate(change for _, change in changes))

    def work(rank: int) -> list[int]:
        program = program_of(layout)
        most_bytes(program, rank, None)  # the first step finds its shapes
        places = [(place, phase, number) for place in (0, 1) for phase, number in (("forward", 1), ("backward", 2))]
        return [most_bytes(program, rank, late) for late in (None, *places)]

    for undisturbed, *disturbed in run_ranks(2, work):
        assert undisturbed > 100_000 and disturbed == [undisturbed] * 4
