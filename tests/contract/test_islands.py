"""Islands: any layout of them equals a plain outer loop on one device; resumption, refusals and prices of islands."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from meshwright.checkpoint.config import CheckpointConfig
from meshwright.checkpoint.store import CheckpointStore
from meshwright.cli.main import main
from meshwright.errors import ConfigError, PlanError
from meshwright.jobs.layouts import check_fallback_layouts, plan_for_fewer_ranks
from meshwright.parallel.axis_group import AxisGroup, TrafficLog
from meshwright.parallel.compression import RoundingKey
from meshwright.parallel.program import Program
from meshwright.parallel.sync import known_exchanges
from meshwright.proof import one_device
from meshwright.proof.plain_islands import OuterRecipe
from meshwright.proof.verify import random_batches, verify
from meshwright.spec.axis import Holds
from meshwright.spec.groups import gradient_axes, island_index, loss_axes, reader, round_axes, row_axes, state_axes
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction
from meshwright.strategy.mesh import layout_of_dims
from meshwright.train.config import OuterConfig
from meshwright.train.feed import MicroBatch
from meshwright.train.island_checks import check_islands
from meshwright.train.joint_gradients import JointGradients
from meshwright.train.outer import OuterOptimizer
from meshwright.train.run_config import RunConfig
from meshwright.train.scaler import LossScaler
from meshwright.train.session import build_program
from meshwright.train.state import saved_islands
from meshwright.train.step import Stepper
from tests.contract import test_pipeline_models as models
from tests.ranks.group import run_ranks
from tests.runs import call, rows, words, write_corpus
from tests.tiers import further


def all_pass(name: str, outer: OuterRecipe, steps: int, *texts: str) -> None:
    batches = random_batches(steps, 8, models.SEQUENCE, models.VOCAB, documents=True)
    case = dataclasses.replace(models.case(name), batches=batches, outer=outer)
    verdicts = verify(case, models.layouts(*texts))
    assert [(each.layout, each.refused, each.crashed, each.wrong) for each in verdicts if not each.passed] == []
    assert all(verdict.worst.error < 1e-9 for verdict in verdicts)


def test_diloco_on_islands_equals_a_plain_loop_on_one_device() -> None:
    all_pass(
        "llama",
        OuterRecipe(),
        5,
        "islands=2",
        "islands=2,shard=2,zero=2,microbatches=2",
        "islands=2,pp=2,microbatches=2",
    )


@pytest.mark.extended("test_diloco_on_islands_equals_a_plain_loop_on_one_device")
def test_diloco_on_islands_of_other_axes_equals_a_plain_loop_on_one_device() -> None:
    all_pass(
        "llama",
        OuterRecipe(),
        5,
        "islands=4,microbatches=2",
        "islands=2,replicate=2",
        "islands=2,shard=2,zero=1",
        "islands=2,shard=2,zero=3",
        "islands=2,tp=2",
        "islands=2,cp=2",
    )


def test_a_plain_momentum_and_a_mean_of_weights_are_proven_too() -> None:
    all_pass("llama", OuterRecipe(every=1, lr=1.0, momentum=0.0), 3, "islands=2")
    all_pass("llama", OuterRecipe(every=3, momentum=0.5, nesterov=False), 5, "islands=2,shard=2,zero=2")


def test_the_proof_finds_another_outer_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One device that looks ahead by another momentum differs in the weights, and in no loss before the first join."""
    plain = one_device.train_islands_plainly

    def other(*args: Any, **more: Any) -> Any:
        outer = dataclasses.replace(args[4], momentum=args[4].momentum * 1.001)
        return plain(*args[:4], outer, *args[5:], **more)

    monkeypatch.setattr(one_device, "train_islands_plainly", other)
    batches = random_batches(2, 8, models.SEQUENCE, models.VOCAB, documents=True)
    case = dataclasses.replace(models.case("llama"), batches=batches)
    (verdict,) = verify(case, models.layouts("islands=2"))
    assert not verdict.passed and verdict.loss_error < 1e-9 and verdict.weight_error > 1e-9


class PlainSgd:
    """SGD without momentum, as the inner optimizer."""

    def __init__(self, program: Program) -> None:
        self._weights = program.weights

    def step(self, lr: float, factor: torch.Tensor) -> None:
        for weight in self._weights:
            assert weight.gradient is not None
            weight.local.sub_(weight.gradient * factor, alpha=lr)


def trained_by_sgd(rank: int, layout: Layout, steps: int, built: Callable[[], Any]) -> dict[str, torch.Tensor]:
    """Weights after steps of SGD, islands joining after each."""
    torch.set_num_threads(1)
    plan = Plan(layout=layout, prediction=Prediction(memory={}), ranks=layout.world, reason="test")
    program = build_program(built(), plan, torch.device("cpu"))
    stepper = Stepper(program, PlainSgd(program), LossScaler(False), clip=0.0, seed=0)  # type: ignore[arg-type]
    outer = None
    if layout.islands > 1:
        outer = OuterOptimizer(program, OuterConfig(kind="local_sgd", every=1), lambda: None)
    for step, batch in enumerate(random_batches(steps, 8, models.SEQUENCE, models.VOCAB, documents=True)):
        own = slice(*layout.span(rank, 8))
        assert batch.positions is not None
        mine = MicroBatch(batch.tokens[own], batch.targets[own], batch.positions[own])
        values = stepper.run(step, [mine], int((batch.targets != -100).sum()), 0.1, 0.0).read()
        if outer is not None:
            outer.after_step(step + 1, values["targets"], values["loss"], last=False)
    return {weight.name: weight.local.clone() for weight in program.weights}


def test_one_step_of_sgd_a_round_is_data_parallel() -> None:
    """The mean of weights after one step of SGD, by tokens, is the step along the mean gradient."""
    built = models.case("llama").build
    weights: list[Mapping[str, torch.Tensor]] = []
    for text in ("islands=4", "replicate=4"):
        layout = Layout.parse(f"{text},precision=float64")
        ranks = run_ranks(4, trained_by_sgd, layout, 3, built)
        for name, value in ranks[0].items():
            assert all(torch.equal(value, other[name]) for other in ranks[1:]), name
        weights.append(ranks[0])
    for name, value in weights[1].items():
        assert torch.allclose(weights[0][name], value, rtol=0, atol=1e-12 * float(value.abs().max())), name


def test_groups_of_a_step_stay_inside_an_island() -> None:
    assert round_axes() == ("islands",)
    assert "islands" not in (*loss_axes(), *gradient_axes(()), *state_axes(2), *row_axes(Holds.COPY))
    layout = Layout.parse("islands=2,pp=2,shard=2,zero=2")
    assert [reader(rank, layout.degrees) for rank in (0, 1, 2, 4, 5)] == [(0, 4), (1, 4), (0, 4), (2, 4), (3, 4)]
    assert [island_index(rank, layout.degrees) for rank in range(8)] == [0] * 4 + [1] * 4
    assert str(layout.within_island()) == "pp=2,shard=2,zero=2" and layout.islands == 2
    assert str(Layout.parse("islands=2,replicate=2,rows=3-1-2-2").within_island()) == "replicate=2,rows=3-1"


def test_what_islands_cannot_do_is_refused_by_name() -> None:
    two, one = Layout.parse("islands=2"), Layout.parse("replicate=2")
    with pytest.raises(ConfigError, match="replicate=2 has one; write islands=2"):
        check_islands(RunConfig(outer=OuterConfig(every=5)), one)
    with pytest.raises(ConfigError, match="replicate=2 has one; write islands=2"):
        check_islands(RunConfig(outer=OuterConfig(kind="diloco")), one)
    check_islands(RunConfig(), one)
    config = RunConfig()
    with pytest.raises(ConfigError, match=r"outer.warmup = 1000 leaves none of train.steps = 1000"):
        check_islands(RunConfig(outer=OuterConfig(warmup=1000)), two)
    with pytest.raises(ConfigError, match=r"outer.warmup = -1"):
        OuterConfig(warmup=-1).check()
    with pytest.raises(ConfigError, match=r"outer.warmup = 3 sums gradients between islands of one run"):
        check_islands(RunConfig(outer=OuterConfig(warmup=3, meet="10.0.0.1:29600")), one)
    with pytest.raises(ConfigError, match="on_sick = rewind"):
        check_islands(dataclasses.replace(config, recovery=dataclasses.replace(config.recovery, on_sick="rewind")), two)
    with pytest.raises(ConfigError, match="rebalance = 5 moves rows between ranks of all islands"):
        check_islands(dataclasses.replace(config, train=dataclasses.replace(config.train, rebalance=5)), two)
    with pytest.raises(ConfigError, match="'all_reduse' is not known; did you mean 'all_reduce'"):
        check_islands(RunConfig(outer=OuterConfig(topology="all_reduse")), two)
    with pytest.raises(ConfigError, match="write --outer local_sgd"):
        check_islands(RunConfig(outer=OuterConfig(topology="ring")), two)
    with pytest.raises(ConfigError, match="nearest that works: islands=4"):
        check_islands(RunConfig(outer=OuterConfig(topology="exponential")), Layout.parse("islands=6"))
    with pytest.raises(ConfigError, match="local_sgd takes the mean"):
        OuterConfig(kind="local_sgd", momentum=0.5).check()
    with pytest.raises(PlanError, match="a custom loop doesn't run; write replicate=2"):
        layout_of_dims({"islands": 2})


def test_fewer_islands_that_cannot_join_are_refused_as_a_plan() -> None:
    """So that fewer ranks are tried next, and a layout that the user named is refused before the start."""
    outer = OuterConfig(kind="local_sgd", topology="exponential")
    recovery = dataclasses.replace(RunConfig().recovery, layouts="islands=3")
    config = dataclasses.replace(RunConfig(), outer=outer, recovery=recovery)
    full, none = Layout.parse("islands=4"), cast(Any, SimpleNamespace(ranks=3))
    for named in (config, dataclasses.replace(config, recovery=RunConfig().recovery)):
        with pytest.raises(PlanError, match=r"islands=3.*nearest that works: islands=2"):
            plan_for_fewer_ranks(named, cast(Any, None), none, full)
    with pytest.raises(PlanError, match=r"islands=3.*nearest that works: islands=2"):
        check_fallback_layouts(config, cast(Any, None), full, cast(Any, None))


def exchanged(rank: int, name: str, times: int) -> list[float]:
    """What a rank holds after so many exchanges of the value 10 ** rank in a row."""
    values = torch.tensor([10.0**rank], dtype=torch.float64)
    group = AxisGroup("islands", dist.group.WORLD, TrafficLog())
    held = []
    for number in range(times):
        values = known_exchanges()[name].start(values.clone(), 1.0, group, number).finish()
        held.append(float(values))
    return held


@pytest.mark.parametrize("name", list(known_exchanges()))
def test_an_exchange_keeps_the_mean_and_brings_islands_together(name: str) -> None:
    """Of any topology: the weights of a mean sum to one; exponential is exact after log2 n."""
    held = run_ranks(4, exchanged, name, 8)
    mean = (1 + 10 + 100 + 1000) / 4
    for number in range(8):
        assert sum(rank[number] for rank in held) / 4 == pytest.approx(mean, rel=1e-12)
    assert max(abs(rank[7] - mean) for rank in held) < 0.01 * mean
    if name == "exponential":
        assert all(rank[1] == mean for rank in held)
    if name == "ring":
        assert [rank[0] for rank in held] == pytest.approx([1011 / 3, 111 / 3, 1110 / 3, 1101 / 3])


@pytest.mark.slow
@pytest.mark.parametrize("topology", further(["ring", "exponential"]))
def test_gossip_saves_and_evaluates_the_mean_and_goes_on_to_the_bit(root: Path, topology: str) -> None:
    more = ("--outer", "local_sgd", "--outer.topology", topology, "--evaluation.every", "3")
    whole = train(root, "whole", "islands=4", 10, 4, *more)
    kill = ("--recovery.faults", "kill:rank=3,step=7", "--recovery.snapshot-every", "1")
    assert train(root, "killed", "islands=4", 10, 4, *more, *kill) == whole
    # By step: a rank that was killed while a snapshot was written takes its step, and its evaluation, again.
    losses = [{event["step"]: event["loss"] for event in events(root, run, "evaluated")} for run in ("whole", "killed")]
    assert losses[0] == losses[1] and sorted(losses[0]) == [3, 6, 9, 10]
    reports = [row["outer"] for row in rows(root / "whole") if row["outer"]]
    assert all(report["pseudo_gradient_norm"] is None and report["consensus_distance"] > 0 for report in reports)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_corpus(tmp_path / "corpus.txt", 60)
    return tmp_path


def train(root: Path, run: str, layout: str, steps: int, devices: int, *more: str, fails: bool = False) -> list[Any]:
    options = ("--model.heads", "4", "--train.steps", str(steps), "--checkpoint.every", "2", "--outer.every", "4")
    command = words(root, run, *options, "--schedule.shape", "constant", *more, layout=layout, devices=devices)
    status, text = call(command, root / f"{run}.log")
    assert bool(status) == fails, text
    return [(row["loss"], row["grad_norm"]) for row in rows(root / run)]


def events(root: Path, run: str, kind: str) -> list[dict[str, Any]]:
    lines = (root / run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


@pytest.mark.slow
@pytest.mark.parametrize("layout", further(["islands=2", "islands=2,shard=2,zero=2"]))
def test_a_run_goes_on_to_the_bit_within_a_round(root: Path, layout: str) -> None:
    """From memory after a killed rank of the second island, and from the disk of a run that ended."""
    devices = Layout.parse(layout).world
    whole = train(root, "whole", layout, 10, devices)
    # Before its own snapshot of step 7, when the one of step 6 is complete on every rank.
    kill = ("--recovery.faults", f"kill:rank={devices - 1},step=7,phase=snapshot")
    assert train(root, "killed", layout, 10, devices, *kill, "--recovery.snapshot-every", "1") == whole
    assert events(root, "killed", "restored")[0]["step"] == 6
    ends = ("--recovery.faults", f"kill:rank={devices - 1},step=7", "--recovery.no-enabled")
    train(root, "ended", layout, 10, devices, *ends, fails=True)
    assert train(root, "ended", layout, 10, devices, "--recovery.no-enabled") == whole
    assert events(root, "ended", "resumed")[0]["step"] == 6
    reports = [row["outer"] for row in rows(root / "ended") if row["outer"]]
    assert [len(report["island_losses"]) for report in reports] == [2, 2, 2]


@pytest.mark.slow
def test_islands_take_first_steps_as_one(root: Path) -> None:
    """As copies do, at their bytes; a run that ends before islands part goes on to the bit."""
    more = ("--outer.warmup", "5", "--evaluation.every", "3")
    whole = train(root, "whole", "islands=2", 10, 2, *more)
    ends = ("--recovery.faults", "kill:rank=1,step=4", "--recovery.no-enabled")
    train(root, "ended", "islands=2", 10, 2, *more, *ends, fails=True)
    assert train(root, "ended", "islands=2", 10, 2, *more, "--recovery.no-enabled") == whole
    assert events(root, "ended", "resumed")[0]["step"] == 2
    # Islands are copies until they part: a moment that differs is seen before it moves a weight.
    flip = ("--recovery.faults", "flip:rank=1,step=4,phase=join,of=moments,bit=20,seed=3")
    assert train(root, "flipped", "islands=2", 10, 2, *more, *flip, "--recovery.snapshot-every", "1") == whole
    (damaged,) = events(root, "flipped", "damaged")
    assert damaged["step"] == 4 and "copies of the state differ after step 4" in damaged["why"], damaged
    options = ("--model.heads", "4", "--train.steps", "10", "--schedule.shape", "constant", "--evaluation.every", "3")
    status, text = call(words(root, "copies", *options, layout="replicate=2", devices=2), root / "copies.log")
    assert not status, text
    copies = [(row["loss"], row["grad_norm"]) for row in rows(root / "copies")]
    assert [loss for loss, _ in whole[:5]] == pytest.approx([loss for loss, _ in copies[:5]], rel=1e-5)
    assert [norm for _, norm in whole[:5]] == pytest.approx([norm for _, norm in copies[:5]], rel=1e-4)
    assert abs(whole[5][0] - copies[5][0]) > 1e-5, "island 0's own loss"
    rounded = train(root, "rounded", "islands=2", 10, 2, *more, "--outer.compress", "int8")
    assert [loss for loss, _ in rounded[:5]] == pytest.approx([loss for loss, _ in whole[:5]], rel=1e-3)
    assert rounded[0][0] == whole[0][0] and rounded[1][0] != whole[1][0]
    steps = rows(root / "whole")
    assert [row["step"] for row in steps if row["outer"]] == [9, 10]
    by_axis = [{entry["axis"]: entry["bytes"] for entry in row["comm"]} for row in steps]
    exact, joined = by_axis[0]["islands"], by_axis[8]["islands"]
    # A join sends as much, its weights' number, and the summary.
    assert all(axes["islands"] == exact for axes in by_axis[:5]) and exact < joined < 1.01 * exact
    assert all("islands" not in axes for axes in by_axis[5:8])
    sums = [entry for entry in rows(root / "rounded")[0]["comm"] if entry["axis"] == "islands"]
    assert 0.25 * exact < sum(entry["bytes"] for entry in sums) < 0.3 * exact
    assert max(entry["rounding_error"] for entry in sums) > 0 and not events(root, "rounded", "damaged")
    losses = {event["step"]: event["loss"] for event in events(root, "whole", "evaluated")}
    exact_losses = {event["step"]: event["loss"] for event in events(root, "copies", "evaluated")}
    assert losses[3] == pytest.approx(exact_losses[3], rel=1e-5), "evaluated at the weights of the step"


def rounded_sums(
    rank: int, text: str, built: Callable[[], Any]
) -> list[tuple[str, int, torch.Tensor, list[torch.Tensor]]]:
    """For each weight of this rank its island, its gradient, and the sums over islands of steps 1, 2 and 1 again."""
    torch.set_num_threads(1)
    plan = Plan(
        layout=Layout.parse(f"{text},precision=float64"), prediction=Prediction(memory={}), ranks=4, reason="test"
    )
    program = build_program(built(), plan, torch.device("cpu"))
    outer = OuterOptimizer(program, OuterConfig(compress="int8"), lambda: None)
    found: dict[str, tuple[str, int, torch.Tensor, list[torch.Tensor]]] = {}
    for weight in program.weights:
        # The same wherever an island holds the weight.
        draw = torch.Generator().manual_seed(2 * len(weight.name) + outer.island)
        own = torch.randn(weight.local.shape, generator=draw, dtype=torch.float64)
        scales = torch.logspace(-3, 0, own.shape[-1], dtype=torch.float64)
        found[weight.name] = (weight.name, outer.island, own * scales, [])
    for step in (1, 2, 1):
        program.rounding_key.step = step
        for index, weight in enumerate(program.weights):
            # Not all lie in memory row by row.
            gradient = found[weight.name][2]
            transposed = gradient.t().clone(memory_format=torch.contiguous_format).t()
            weight.parameter.grad = transposed if index % 2 else gradient.clone()
        outer.sum_gradients()
        for weight in program.weights:
            assert weight.gradient is not None
            found[weight.name][3].append(weight.gradient.clone())
    return list(found.values())


@pytest.mark.parametrize(
    ("name", "text"), further([("llama", "islands=2,replicate=2"), ("gpt2", "islands=2,pp=2,microbatches=2")])
)
def test_first_steps_are_summed_in_rounded_numbers_that_are_the_same_on_all_ranks(name: str, text: str) -> None:
    """Within one distance of each term's numbers and of the sum's, up or down by chance, otherwise in the next step.

    Replicas of an island hold all weights, and its stages a tied one.
    """
    holders: dict[str, list[tuple[int, torch.Tensor, list[torch.Tensor]]]] = {}
    for rank in run_ranks(4, rounded_sums, text, models.case(name).build):
        for weight, *held in rank:
            holders.setdefault(weight, []).append(held)  # type: ignore[arg-type]
    assert any(len(held) == 4 for held in holders.values()), "one weight on every rank"
    biases = []
    for weight, held in holders.items():
        _, _, (first, second, again) = held[0]
        for _, _, sums in held[1:]:
            assert all(torch.equal(*pair) for pair in zip(sums, (first, second, again), strict=True)), weight
        assert torch.equal(first, again) and not torch.equal(first, second), weight
        terms = [next(own for at, own, _ in held if at == island) for island in range(2)]
        assert not torch.equal(*terms), "two islands"
        flat = [torch.nn.functional.pad(values.reshape(-1), (0, -values.numel() % 256)) for values in (*terms, first)]
        one, other, total = (values.view(-1, 256) for values in flat)
        distance = sum(values.abs().amax(1, keepdim=True) / 126 for values in (one, other, total))
        error = total - one - other
        assert (error.abs() <= distance).all(), weight
        biases.append(error / distance)
    bias = torch.cat(biases)
    assert 0.1 < bias.std() < 0.4 and bias.mean().abs() < 4 * bias.std() / bias.numel() ** 0.5


@pytest.mark.slow
def test_damage_within_a_round_ends_the_ranks_before_it_is_joined(root: Path) -> None:
    more = ("--recovery.snapshot-every", "1", "--train.no-prove")
    whole = train(root, "whole", "islands=2", 8, 2, *more)
    flip = ("--recovery.faults", "flip:rank=1,step=4,phase=join;nan:rank=1,step=6,phase=reduce")
    assert train(root, "flipped", "islands=2", 8, 2, *flip, *more) == whole
    (damaged,), (repaired,) = events(root, "flipped", "damaged"), events(root, "flipped", "damage_repaired")
    assert "rank 1's state is damaged after step 4" in damaged["why"] and repaired["damaged"] == [1]
    # Island 1 alone computed this step again, and reports it.
    (repeated,) = events(root, "flipped", "step_repeated")
    assert (repeated["step"], repeated["rank"], repeated["island"]) == (6, 1, 1)


def joined_after_a_restart(rank: int, built: Callable[[], Any]) -> list[tuple[tuple[float, ...], float]]:
    """Votes and stop count of a join, of the processes that were asked and of those that restored their state."""
    torch.set_num_threads(1)
    layout = Layout.parse("islands=2,precision=float64")
    plan = Plan(layout=layout, prediction=Prediction(memory={}), ranks=2, reason="test")
    program, config = build_program(built(), plan, torch.device("cpu")), OuterConfig(every=2)
    asked, restored = (OuterOptimizer(program, config, lambda: None) for _ in range(2))
    for _ in range(3):
        asked.request_stop(float(rank == 0))
    asked.vote(checkpoint=1.0)
    asked.prepare_state({})
    name = f"island{rank}/counters"
    dict(restored.state())[name].copy_(dict(asked.state())[name])  # type: ignore[union-attr, arg-type]
    restored.read_counters()
    reports = [outer.after_step(2, 1.0, 1.0, last=False) for outer in (asked, restored)]
    return [(report.votes, report.stop_count) for report in reports if report is not None]


def test_a_request_to_stop_asks_the_processes_and_a_hooks_vote_the_run() -> None:
    for reports in run_ranks(2, joined_after_a_restart, models.case("llama").build):
        assert reports == [((0.0, 0.0, 2.0), 1.0), ((0.0, 0.0, 2.0), 0.0)]


@pytest.mark.slow
def test_a_checkpoint_of_islands_is_read_by_any_number_of_them(root: Path) -> None:
    train(root, "run", "islands=2", 6, 2)
    store = CheckpointStore(root / "run" / "checkpoints", CheckpointConfig())
    found = store.find()
    assert found is not None and found.step == 6 and saved_islands(found.manifest.tensors) == 2
    state = dict(store.read_full(found))
    # The last step joined the islands: theirs are the outer weights.
    for name in (name for name in state if name.startswith("weights/")):
        assert torch.equal(state[name], state[f"island0/{name}"]) and torch.equal(state[name], state[f"island1/{name}"])
    moment = next(name for name in state if name.startswith("island0/exp_avg/"))
    assert not torch.equal(state[moment], state[moment.replace("island0", "island1")])
    for steps, layout, devices, saved, islands in (
        (8, "replicate=1", 1, 2, 1),
        (10, "islands=4", 4, 1, 4),
        (12, "islands=2", 2, 4, 2),
    ):
        losses = train(root, "run", layout, steps, devices)
        assert len(losses) == steps and losses[-1][0] < losses[0][0]
        change = events(root, "run", "islands_changed")[-1]
        assert (change["saved"], change["islands"], change["step"]) == (saved, islands, steps - 2)


@pytest.mark.slow
def test_an_island_that_lost_a_device_is_left_out_as_a_whole(root: Path) -> None:
    more = ("--recovery.on-death", "shrink", "--recovery.snapshot-every", "1")
    layout = "islands=2,shard=2,zero=2"
    losses = train(root, "run", layout, 10, 4, "--recovery.faults", "kill:rank=3,step=7,phase=snapshot", *more)
    assert len(losses) == 10 and losses[-1][0] < losses[0][0]
    assert events(root, "run", "planned")[0]["layout"] == "shard=2,zero=2"
    change = events(root, "run", "islands_changed")[0]
    assert (change["saved"], change["islands"], change["step"]) == (2, 1, 6)
    assert [bool(row["outer"]) for row in rows(root / "run")] == [False] * 3 + [True] + [False] * 6


@pytest.mark.slow
def test_rounded_movements_take_fewer_bytes_and_leave_islands_equal(root: Path) -> None:
    """Copies of outer weights are compared to the bit in each checkpoint; the mean loss barely differs."""
    exact = train(root, "exact", "islands=3", 8, 3, "--train.batch", "9")
    for name, byte_share in (("bf16", 2 / 4), ("int8", 260 / 1024)):
        rounded = train(root, name, "islands=3", 8, 3, "--train.batch", "9", "--outer.compress", name)
        assert rounded[:4] == exact[:4] and rounded[4:] != exact[4:]
        assert rounded[-1][0] == pytest.approx(exact[-1][0], rel=5e-3)
        for report in (row["outer"] for row in rows(root / name) if row["outer"]):
            assert report["sent_bytes"] == pytest.approx(2 * report["raw_bytes"] * byte_share, rel=0.02)
        assert not events(root, name, "copies_rounded")


def test_a_join_is_priced_once_a_round_and_never_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    """Over a slow network islands win what data parallelism waits; the search takes them only where they are given."""
    sizes = "layers=24,width=2048,heads=16,vocab=32000"
    argv = ["plan", "--sizes", sizes, "--cluster", "2x8xa100-80", "--batch", "128", "--json"]
    assert main([*argv, "--fix", "islands=2", "--layout", "islands=2,shard=8,zero=2", "shard=16,zero=2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert all(each["layout"]["degrees"]["islands"] == 2 for each in report["best"])
    assert all(each["price"]["parts"]["join"] > 0 < each["price"]["memory"]["outer"] for each in report["best"])
    assert main(argv) == 0
    assert "islands" not in json.loads(capsys.readouterr().out)["plan"]


def test_gradients_of_first_steps_are_summed_without_a_copy_of_all() -> None:
    """A large one in place, others a few at a time: beside all gradients there is no room for as many bytes again."""
    draw = torch.Generator().manual_seed(3)
    shapes = [(400, 100), (3, 7), (50, 20), (1,), (30, 100), (0, 5)] * 4
    gradients = [torch.randn(shape, generator=draw) for shape in shapes] + [torch.randn(40, 30, generator=draw).t()]
    before = [gradient.clone() for gradient in gradients]
    own, copied = {gradient.data_ptr() for gradient in gradients}, []

    def all_reduce(values: torch.Tensor, what: str) -> Any:
        copied.append(0 if values.data_ptr() in own else values.nbytes)
        values.mul_(2.0)  # another island's are the same
        return SimpleNamespace(wait=lambda: None)

    weights = [SimpleNamespace(name="w", gradient=item) for item in (*gradients, None)]
    group: Any = SimpleNamespace(all_reduce=all_reduce)
    JointGradients(group, torch.device("cpu"), "none", RoundingKey()).sum(weights)  # type: ignore[arg-type]
    assert all(torch.equal(gradient, 2.0 * old) for gradient, old in zip(gradients, before))
    assert 0 < max(copied) < 0.2 * sum(gradient.nbytes for gradient in gradients)
