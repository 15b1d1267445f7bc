"""Sums with error feedback: torch's hook is low rank's peer, copies stay equal, runs resume, lose ranks, overflow."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from meshwright.errors import PlanError
from meshwright.models.analysis.objective_trial import try_forward
from meshwright.models.analysis.table import sharding_table
from meshwright.parallel.axis_group import AxisGroup, TrafficLog
from meshwright.parallel.block_codec import WeightBlocks
from meshwright.parallel.compression import RoundingKey
from meshwright.parallel.error_feedback import ErrorFeedback
from meshwright.parallel.live_bytes import LiveBytes
from meshwright.parallel.low_rank import LowRankCompressor
from meshwright.parallel.weights import Weight
from meshwright.proof.verify import random_batches
from meshwright.spec.compression import Compression
from meshwright.spec.layout import Layout
from meshwright.spec.placement import LocalShard
from meshwright.strategy import HybridParallelStrategy
from meshwright.train.config import OptimizerConfig
from meshwright.train.feed import MicroBatch
from meshwright.train.model_analysis import ModelAnalysis, analyse_model
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.scaler import LossScaler
from meshwright.train.step import Stepper
from tests.fake.recorder import build_rank
from tests.own_models import plain_model
from tests.ranks.group import run_ranks
from tests.ranks.test_compression import ROWS, TOKENS, VOCAB, firsts_along, gradients, model
from tests.runs import call, curve, events, words, write_corpus
from tests.tiers import cases, further

ROW_COUNT, COLUMN_COUNT, RANK = 30, 44, 3


class OneMatrix:
    """What torch's hook reads of a bucket of one matrix."""

    def __init__(self, grad: torch.Tensor) -> None:
        self.grad = grad

    def buffer(self) -> torch.Tensor:
        return self.grad.view(-1)

    def gradients(self) -> list[torch.Tensor]:
        return [self.grad]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def beside_torch(rank: int) -> list[float]:
    """Sums some gradients of a matrix by torch's hook and by ours; returns how far the sums are apart, relative."""
    weight = Weight(
        nn.Parameter(torch.zeros(ROW_COUNT, COLUMN_COUNT, dtype=torch.float64)),
        LocalShard.unsharded("matrix", (ROW_COUNT, COLUMN_COUNT), 2),
    )
    group = AxisGroup("replicate", dist.group.WORLD, TrafficLog())
    choice = Compression.parse(f"powersgd:{RANK}")
    ours = LowRankCompressor(choice, group, RoundingKey(0, 0))
    feedback = ours.error_feedback = ErrorFeedback([weight], choice, 2, rank, (), {}, LiveBytes())
    theirs = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
    theirs.iter = 2
    # Both begin from one basis.
    theirs.q_memory_dict[0] = feedback.errors["matrix"].used_basis(0).clone().view(-1)
    theirs.p_memory_dict[0] = torch.zeros(ROW_COUNT * RANK, dtype=torch.float64)
    theirs.error_dict[0] = torch.zeros(ROW_COUNT * COLUMN_COUNT, dtype=torch.float64)
    blocks, generator, apart = WeightBlocks(["matrix"], [ROW_COUNT * COLUMN_COUNT]), torch.Generator(), []
    for step in range(6):
        generator.manual_seed(10 * step + rank)
        grad = torch.randn(ROW_COUNT, COLUMN_COUNT, generator=generator, dtype=torch.float64)
        mean = powerSGD_hook.powerSGD_hook(theirs, OneMatrix(grad.clone())).wait()
        mean = mean[0] if isinstance(mean, (list, tuple)) else mean
        feedback.begin_step(1.0)
        ours.all_reduce(blocks, [grad]).wait()
        feedback.commit(torch.tensor(True))
        apart.append(float((grad.view(-1) - 2 * mean.view(-1)).norm() / grad.norm()))
    return apart


def test_sums_are_those_of_torchs_own_hook() -> None:
    """Errors of copies differ: torch's are against the mean of all; what all owe together, and so each sum, doesn't."""
    for apart in run_ranks(2, beside_torch):
        assert len(apart) == 6 and max(apart) < 1e-9, apart


METHODS = ("powersgd:2", "topk:40")
LAYOUTS = {
    2: ["replicate=2", "replicate=2,precision=bf16,microbatches=2"],
    4: ["replicate=4", "replicate=2,tp=2", "replicate=2,tp=2,sequence=true,precision=bf16", "replicate=2,cp=2",
        "replicate=2,shard=2,zero=1,microbatches=2", "replicate=2,shard=2,zero=2,microbatches=2,precision=bf16",
        "replicate=2,shard=2,zero=3"],
}  # fmt: skip
FURTHER = ("replicate=2,microbatches=2", "cp=2", "replicate=2,precision=fp16")


@pytest.mark.parametrize("world", cases([2, 4]))
def test_copies_stay_equal_and_first_steps_exact(world: int) -> None:
    check_sums(world, LAYOUTS[world])


@pytest.mark.extended("test_copies_stay_equal_and_first_steps_exact")
def test_copies_of_more_layouts_stay_equal_and_first_steps_exact() -> None:
    check_sums(2, FURTHER)


def check_sums(world: int, texts: Sequence[str]) -> None:
    """Holds sums of each method under some layouts against exact ones, and ranks that hold the same against another."""
    # As a run analyses one layout after another: what doesn't depend on the layout is read once.
    known = ModelAnalysis(table=sharding_table(model(False), 2), trial=try_forward(model(False)))
    facts = {text: analyse_model(model(False), Layout.parse(text), known) for text in texts}

    def work(rank: int) -> dict[tuple[str, str], Any]:
        torch.set_num_threads(1)
        results = {}
        for text in texts:
            plain = gradients(Layout.parse(text), facts[text], rank, False, steps=3)
            for method in METHODS:
                rounded, again, exact = (
                    gradients(Layout.parse(f"{text},compress={method}{first}"), facts[text], rank, False, steps=3)
                    for first in ("", "", ":3")
                )
                results[text, method] = plain, rounded, again, exact
        return results

    ranks = run_ranks(world, work, timeout=500)
    for text, method in ((text, method) for text in texts for method in METHODS):
        for rank in range(world):
            plain, rounded, again, exact = ranks[rank][text, method]
            for key in ("gradients", "weights"):
                assert all(torch.equal(rounded[key][name], again[key][name]) for name in plain[key]), (text, rank)
                assert all(torch.equal(exact[key][name], plain[key][name]) for name in plain[key]), (text, rank)
            (total,) = [item for item in rounded["comm"] if item.rounding_error]
            assert 0.3 < total.rounding_error < 1 and 4 * total.bytes < total.raw_bytes
            sums = ("all_reduce", "all_gather")
            raw_bytes, plain_bytes = (
                sum(item.raw_bytes for item in run["comm"] if item.axis == total.axis and item.op in sums)
                for run in (rounded, plain)
            )
            assert abs(raw_bytes - plain_bytes) < 64, (text, method)
        for axis in ("replicate", "cp", "tp"):
            for rank, first in firsts_along(axis, Layout.parse(text)).items():
                mine, theirs = ranks[rank][text, method][1], ranks[first][text, method][1]
                for key in ("gradients", "weights"):
                    names = mine["whole_over_tp"] if axis == "tp" else mine[key]
                    assert all(torch.equal(mine[key][name], theirs[key][name]) for name in names), (text, axis, rank)


def overflowed(rank: int, text: str, facts: ModelAnalysis) -> list[tuple[float, bool, float]]:
    """Trains four steps, rank 1's gradient infinite in the third; returns (finite, whether errors changed, size)."""
    layout = Layout.parse(text)
    program = build_rank(model(False), layout, facts)
    scaler = LossScaler(True)
    stepper = Stepper(program, LocalAdamW(program.weights, OptimizerConfig()), scaler, clip=1.0, seed=0)
    first, last = layout.span(rank, ROWS)
    assert program.error_feedback is not None
    found = []
    for step, batch in enumerate(random_batches(4, ROWS, TOKENS, VOCAB, documents=False)):
        items = program.error_feedback.errors.values()
        before = [tensor.clone() for item in items for tensor in (item.error, *item.shared_state().values())]
        scale = scaler.scale
        if step == 2 and rank == 1:
            scaler.scale = float("inf")
        micro = [MicroBatch(batch.tokens[first:last], batch.targets[first:last], None)]
        finite = stepper.run(step, micro, int((batch.targets != -100).sum()), 1e-3, 0.0).read()["finite"]
        scaler.scale = scale
        scaler.update(bool(finite))
        after = [tensor for item in items for tensor in (item.error, *item.shared_state().values())]
        changed = any(not torch.equal(old, new) for old, new in zip(before, after))
        found.append((finite, changed, float(max(item.error.abs().max() for item in items))))
    return found


@pytest.mark.parametrize("method", METHODS)
def test_a_step_that_overflows_owes_nothing_and_the_scale_leaves_the_errors(method: str) -> None:
    text = f"replicate=2,precision=fp16,compress={method}"
    facts = analyse_model(model(False), Layout.parse(text), ModelAnalysis(table=sharding_table(model(False), 2)))
    for found in run_ranks(2, overflowed, text, facts):
        assert [item[:2] for item in found] == [(1.0, True), (1.0, True), (0.0, False), (1.0, True)]
        # Unscaled gradients of a mean loss: no trace of a scale of 65536.
        assert all(size < 1.0 for *_, size in found), found


def own_loop(rank: int) -> str:
    strategy = HybridParallelStrategy("replicate=2,compress=powersgd:2")
    with pytest.raises(PlanError) as error:
        strategy.shard(plain_model())
    return str(error.value)


def test_a_loop_of_ones_own_is_refused() -> None:
    assert all("compress=int8" in text for text in run_ranks(2, own_loop))


CHOICES = ("compress=powersgd:2:1,precision=float64", "compress=topk:20:1,precision=float64")
OPTIONS = ("--train.steps", "8", "--train.batch", "12", "--checkpoint.every", "4")


def run(folder: Path, name: str, layout: str, *more: str) -> dict[int, tuple[float, float]]:
    """Trains eight steps; returns the curve of the run."""
    argv = words(folder, name, *OPTIONS, *more, layout=layout, devices=Layout.parse(layout).world)
    status, text = call(argv, folder / f"{name}.log")
    assert status == 0, text
    return curve(folder / name)


@pytest.mark.slow
@pytest.mark.parametrize("choice", further(CHOICES))
def test_a_resume_is_to_the_bit_and_other_numbers_of_copies_owe_the_same(choice: str, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.txt")

    whole, exact = (
        run(tmp_path, name, f"replicate=2,{text}") for name, text in (("whole", choice), ("exact", "precision=float64"))
    )
    assert whole[1] == exact[1] and whole[2][0] == exact[2][0]
    assert all(whole[step][0] != exact[step][0] for step in range(3, 9))
    resumed = {}
    layouts = {
        "same": f"replicate=2,{choice}",
        "more": f"replicate=3,{choice}",
        "none": "replicate=2,precision=float64",
    }
    for name, layout in layouts.items():
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoints" / "step-00000008")
        resumed[name] = run(tmp_path, name, layout)
        assert events(tmp_path / name, "resumed")[0]["step"] == 4
    assert resumed["same"] == whole
    for step in range(5, 9):
        # Sums in low rank follow from what all copies owe together, so three copies go on as two would have. Of the
        # largest values three copies send others, whose norm is another.
        if "powersgd" in choice:
            assert resumed["more"][step] == pytest.approx(whole[step], rel=1e-12)
        assert resumed["more"][step][0] == pytest.approx(whole[step][0], rel=1e-12 if step == 5 else 0.02)
        assert resumed["none"][step] != pytest.approx(whole[step], rel=1e-6)


def owed(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Returns what all copies owe together of each weight, read off a checkpoint by torch's own tool."""
    torch_file = run / f"{step}.pt"
    dcp_to_torch_save(run / "checkpoints" / f"step-{step:08d}", torch_file)
    totals: dict[str, torch.Tensor] = {}
    for name, tensor in torch.load(torch_file, weights_only=True).items():
        copy, _, weight = name.partition("/errors/")
        if weight and copy.startswith("copy"):
            totals[weight] = totals.get(weight, torch.zeros_like(tensor)) + tensor
    return totals


@pytest.mark.slow
@pytest.mark.parametrize("method", cases(["powersgd:2", "topk:20"]))
def test_shards_owe_under_any_layout_what_they_owed(method: str, tmp_path: Path) -> None:
    """Steps that sum exactly leave debts as they are, so a later checkpoint of another layout shows what arrived."""
    write_corpus(tmp_path / "corpus.txt")
    double, backend = "precision=float64", ("--checkpoint.backend", "dcp")

    sharded = f"replicate=2,shard=2,zero=2,compress={method},{double}"
    whole = run(tmp_path, "whole", sharded, *backend)
    before = owed(tmp_path / "whole", 4)
    assert before and all(total.abs().max() > 0 for total in before.values())
    layouts = {
        "same": sharded,
        "copies": f"replicate=3,compress={method}:100,{double}",
        "level": f"replicate=2,shard=2,zero=3,compress={method}:100,{double}",
    }
    for name, layout in layouts.items():
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoints" / "step-00000008")
        resumed = run(tmp_path, name, layout, *backend)
        if name == "same":
            assert resumed == whole
            continue
        after = owed(tmp_path / name, 8)
        assert after.keys() == before.keys()
        for weight, total in before.items():
            torch.testing.assert_close(after[weight], total, rtol=1e-12, atol=1e-15)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "choice", "options"),
    cases(
        [
            ("replicate=2", CHOICES[0], ()),
            ("replicate=3", CHOICES[0], ("--recovery.on-death", "shrink")),
            ("replicate=2", CHOICES[1], ()),
            ("replicate=2,shard=2,zero=1", CHOICES[0], ()),
        ],
        (0,),
        extended=(2,),
    ),
)
def test_a_run_that_loses_a_rank_owes_what_it_owed(
    layout: str, choice: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    write_corpus(tmp_path / "corpus.txt")
    count = Layout.parse(layout).world
    kill = ("--recovery.snapshot-every", "1", "--recovery.back-s", "10000", "--recovery.faults")
    fault = f"kill:rank={count - 1},step=5,phase=backward,generation=0"
    common = ("--train.steps", "8", "--train.batch", "12", "--checkpoint.every", "0")
    curves = []
    for name, more in (("whole", ()), ("broken", (*options, *kill, fault))):
        argv = words(tmp_path, name, *common, *more, layout=f"{layout},{choice}", devices=count)
        status, text = call(argv, tmp_path / f"{name}.log")
        assert status == 0, text
        curves.append(curve(tmp_path / name))
    whole, broken = curves
    assert events(tmp_path / "broken", "restored") and sorted(broken) == list(range(1, 9))
    if not options:
        assert broken == whole
    for step in whole:
        assert broken[step] == pytest.approx(whole[step], rel=1e-12)
