"""Streaming islands: fragments and delays equal a plain loop on one device, resume to the bit, hide their exchange."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.checkpoint.agreement import Agreement
from meshwright.checkpoint.config import CheckpointConfig
from meshwright.checkpoint.store import CheckpointStore
from meshwright.cli.main import main
from meshwright.cluster.cluster import Cluster
from meshwright.errors import ConfigError
from meshwright.parallel.axis_group import AxisGroup, TrafficLog
from meshwright.parallel.sync import known_exchanges
from meshwright.planner.islands import UPDATE_ACCESSES
from meshwright.proof import one_device
from meshwright.proof.plain_islands import OuterRecipe
from meshwright.proof.verify import random_batches, verify
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction
from meshwright.train.config import OptimizerConfig, OuterConfig, RecoveryConfig
from meshwright.train.fragments import check_fragments, fragment_index
from meshwright.train.health import Health
from meshwright.train.integrity import Integrity
from meshwright.train.island_checks import check_islands
from meshwright.train.optimizer import LocalAdamW
from meshwright.train.outer import OuterOptimizer
from meshwright.train.run_config import RunConfig
from meshwright.train.session import build_program
from tests.contract import test_pipeline_models as models
from tests.contract.test_islands import all_pass, events, train
from tests.faults.test_recovery_nodes import Nodes
from tests.ranks.group import run_ranks
from tests.runs import curve, rows, write_corpus
from tests.tiers import cases, seeds

STREAM = ("--outer.fragments", "2", "--outer.delay", "3")
"""With rounds of 4 steps: fragment 0 starts after 2, 6, 10 and arrives after 5, 9; fragment 1 after 4, 8 and 7, 11."""


def test_fragments_that_arrive_later_equal_a_plain_loop_on_one_device() -> None:
    stream = OuterRecipe(every=4, fragments=2, delay=1, mix=0.5)
    all_pass("llama", stream, 7, "islands=2", "islands=2,shard=2,zero=3")
    # Two transfers are under way at once, and the end finds both; before, islands take two steps as one.
    late = dataclasses.replace(stream, fragments=3, delay=3, mix=0.25, warmup=2)
    all_pass("llama", late, 9, "islands=2,tp=2")


@pytest.mark.extended("test_fragments_that_arrive_later_equal_a_plain_loop_on_one_device")
def test_fragments_of_stages_and_of_shards_that_arrive_later() -> None:
    stream = OuterRecipe(every=4, fragments=2, delay=1, mix=0.5)
    all_pass("llama", stream, 7, "islands=2,pp=2,microbatches=2")
    late = dataclasses.replace(stream, fragments=3, delay=3, mix=0.25, warmup=2)
    all_pass("llama", late, 9, "islands=2,shard=2,zero=3")


@pytest.mark.parametrize(("outer", "layout"), cases([
    (OuterRecipe(every=4, fragments=4, delay=2), "islands=2,cp=2"),
    (OuterRecipe(every=3, delay=2, mix=0.9, nesterov=False), "islands=4,microbatches=2"),
    (OuterRecipe(every=3, warmup=4), "islands=2,pp=2,microbatches=2"),
    (OuterRecipe(every=4, warmup=9), "islands=2,shard=2,zero=1"),
    (OuterRecipe(every=3, fragments=3), "islands=2,shard=2,zero=2"),
    (OuterRecipe(every=2, fragments=2, delay=1, lr=1.0, momentum=0.0), "islands=2,shard=2,zero=1"),
], ()))  # fmt: skip
def test_more_fragments_and_delays(outer: OuterRecipe, layout: str) -> None:
    all_pass("llama", outer, 8, layout)


def test_experts_may_be_spread_inside_an_island() -> None:
    outer = OuterRecipe(every=2, fragments=2, delay=1, mix=0.5, warmup=1)
    all_pass("mixtral", outer, 4, "islands=2,shard=2,ep=2,zero=1")


def verdict_of(monkeypatch: pytest.MonkeyPatch, text: str, **other: float) -> Any:
    """Returns the verdict where the plain loop on one device takes another outer step."""
    plain = one_device.train_islands_plainly

    def trained(*args: Any, **more: Any) -> Any:
        return plain(*args[:4], dataclasses.replace(args[4], **other), *args[5:], **more)

    monkeypatch.setattr(one_device, "train_islands_plainly", trained)
    batches = random_batches(3, 8, models.SEQUENCE, models.VOCAB, documents=True)
    outer = OuterRecipe(every=2, fragments=2, delay=1, mix=0.5)
    case = dataclasses.replace(models.case("llama"), batches=batches, outer=outer)
    (verdict,) = verify(case, [Layout.parse(text)])
    return verdict


@pytest.mark.parametrize(("text", "other"), cases([
    ("islands=2,precision=bf16", {"mix": 0.1}),
    ("islands=2,precision=bf16", {}),
    ("islands=2,precision=fp16", {}),
    ("islands=2,precision=float32", {"lr": 0.71}),
    ("islands=2,precision=bf16", {"lr": 1.0}),
    ("islands=2,precision=float64", {"mix": 0.5001}),
], (0, 1)))  # fmt: skip
def test_islands_are_proven_in_low_precision_too(
    text: str, other: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within what rounding explains; another mix or rate of the outer step is beyond it."""
    verdict = verdict_of(monkeypatch, text, **other)
    assert verdict.passed != bool(other) and not verdict.refused and not verdict.crashed, verdict


def test_what_cannot_stream_is_refused_by_name() -> None:
    two, sgd = Layout.parse("islands=2"), {"kind": "local_sgd", "topology": "ring"}
    with pytest.raises(ConfigError, match=r"write --outer\.topology all_reduce"):
        check_islands(RunConfig(outer=OuterConfig(**sgd, fragments=2)), two)  # type: ignore[arg-type]
    for outer, words in (
        (OuterConfig(every=3, fragments=4), "at most outer.every = 3"),
        (OuterConfig(every=3, delay=3), "under outer.every = 3"),
        (OuterConfig(mix=0.5), "write --outer.delay 1"),
        (OuterConfig(delay=1, mix=1.0), "under 1, or nothing would be taken"),
    ):
        with pytest.raises(ConfigError, match=words):
            outer.check()
    names = ["wte.weight", "h.0.mlp.weight", "h.1.experts.3.weight", "h.2.mlp.weight", "head.weight"]
    assert [fragment_index(name, 2) for name in names] == [1, 0, 1, 0, 1]
    check_fragments(names, 3)
    with pytest.raises(ConfigError, match=r"nearest that works: --outer.fragments 4"):
        check_fragments(names, 5)


class Accesses(TorchDispatchMode):
    """Counts the elements that operations read and write, but for collectives."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        given, made = (
            [item for item in tree_leaves(each) if isinstance(item, torch.Tensor)] for each in (args, result)
        )
        changes = name.endswith("_")
        places = {item.untyped_storage().data_ptr() for item in given}
        is_view = not changes and any(item.untyped_storage().data_ptr() in places for item in made)
        if not name.startswith("c10d") and "empty" not in name and not is_view:
            read = given[1:] if name.endswith(("copy_", "zero_")) else given
            self.count += sum(item.numel() for item in (*read, *made))
        return result


def waited(rank: int, built: Callable[[], Any]) -> tuple[list[float], list[float | None], float]:
    """Seconds of each step's end on a rank whose peer is 1.5 s late in the step in which an exchange starts.

    And the elements that a join without delay reads and writes for each that it joins, with the looks at the bounds of
    weights and moments before it and after it.
    """
    torch.set_num_threads(1)
    plan = Plan(
        layout=Layout.parse("islands=2,precision=float64"), prediction=Prediction(memory={}), ranks=2, reason="test"
    )
    program = build_program(built(), plan, torch.device("cpu"))
    outer, seconds, distances = OuterOptimizer(program, OuterConfig(every=3, delay=1), lambda: None), [], []
    for step in range(1, 5):
        for weight in program.weights:
            weight.local.add_(float(rank + 1))
        if step == 3:
            dist.barrier()
            time.sleep(1.5 * rank)
        began = time.monotonic()
        report = outer.after_step(step, 1.0 + rank, 1.0, last=False)
        seconds.append(time.monotonic() - began)
        distances.append(None if report is None else report.consensus_distance / math.sqrt(outer.bytes() / 3 / 8))
    outer = OuterOptimizer(program, OuterConfig(every=1), lambda: None)
    optimizer = LocalAdamW(program.weights, OptimizerConfig())
    optimizer.restored(1)  # has moments
    events = (lambda kind, **fields: None,) * 2
    integrity = Integrity(Health(RecoveryConfig()), program, optimizer, Agreement(None), None, *events)
    integrity.start(0)
    with Accesses() as accesses:
        assert integrity.may_join(1, {})
        outer.after_step(1, 1.0, 1.0, last=False)
        integrity.joined()
    return seconds, distances, accesses.count / sum(weight.local.numel() for weight in program.weights)


def test_the_step_that_starts_an_exchange_does_not_wait_for_it() -> None:
    (seconds, distances, accesses), _ = run_ranks(2, waited, models.case("llama").build)
    assert seconds[2] < 0.75 < seconds[3], seconds
    # Three steps of 1 and 2 an element: -3 and -6 from a mean of -5, weighted by tokens, as they were at the start.
    assert distances[:3] == [None] * 3 and distances[3] == pytest.approx(math.sqrt((2**2 + 1**2) / 2))
    assert accesses == pytest.approx(UPDATE_ACCESSES, rel=0.05)  # what plans price


def sent(rank: int, name: str) -> tuple[int, int]:
    """Bytes that a rank's peers get from it, counted by the log of the group, and what the exchange says."""
    group, values = AxisGroup("islands", dist.group.WORLD, TrafficLog()), torch.ones(600, dtype=torch.float32)
    pending = known_exchanges()[name].start(values, 1.0, group, 0)
    pending.finish()
    # An all-reduce also sums the weights of the mean: a number of 8 bytes.
    extra = 2 * 8 * 3 // 4 if known_exchanges()[name].global_mean else 0
    return sum(total.bytes for total in group.log.drain()) - extra, pending.sent_bytes


@pytest.mark.parametrize("name", list(known_exchanges()))
def test_an_exchange_says_its_bytes(name: str) -> None:
    by_hand = {"all_reduce": 2 * 3 * 2400 // 4, "ring": 2 * 2400, "exponential": 2400}
    assert run_ranks(4, sent, name) == [(by_hand[name], by_hand[name])] * 4


def planned(capsys: pytest.CaptureFixture[str], *more: str) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Returns a plan's answer, the join of its best layout, and the seconds of a step without it."""
    sizes = "layers=24,width=2048,heads=16,vocab=32000"
    assert main(["plan", "--sizes", sizes, "--cluster", "4x8xa100-80", "--batch", "128", "--json", *more]) == 0
    report = json.loads(capsys.readouterr().out)
    price = report["best"][0]["price"]
    return report, report["best"][0]["join"], price["step_s"] - price["parts"]["join"]


def test_each_topology_is_priced_by_its_own_bytes_and_a_delay_hides_steps(capsys: pytest.CaptureFixture[str]) -> None:
    fix = ("--fix", "islands=4,shard=8,zero=2", "--outer", "local_sgd")
    report, mean, step_s = planned(capsys, *fix)
    size = 4 * report["model"]["parameters"] / 8
    assert mean["sent_bytes"] == pytest.approx(2 * 3 / 4 * size) and mean["exposed_s"] == mean["exchange_s"]
    # Each of a node's 8 ranks sends at once, to one or two of its peers, over its share of the cards.
    network = Cluster.parse("4x8xa100-80").fabric().network(1.0, 8)
    device = Cluster.parse("4x8xa100-80").device
    memory_rate = device.bandwidth_bytes_per_s * device.memory_share
    for topology, peers in (("ring", 2), ("exponential", 1)):
        _, join, _ = planned(capsys, *fix, "--outer.topology", topology)
        assert join["sent_bytes"] == pytest.approx(peers * size)
        assert join["exchange_s"] == pytest.approx(peers * size / network, rel=0.1)
    for every, fragments, delay in ((30, 4, 0), (30, 4, 1), (2, 1, 1)):
        options = ("--outer.every", str(every), "--outer.fragments", str(fragments), "--outer.delay", str(delay))
        report, join, step_s = planned(capsys, *fix, *options)
        exposed_s = max(0.0, join["exchange_s"] - delay * step_s)
        assert (join["sent_bytes"], join["exposed_s"]) == pytest.approx((mean["sent_bytes"] / fragments, exposed_s))
        parts = report["best"][0]["price"]["parts"]
        # The outer step moves each value of the fragment through the device's memory, whatever hides the wire.
        assert join["update_s"] == pytest.approx(UPDATE_ACCESSES * size / fragments / memory_rate)
        assert parts["join"] == pytest.approx(fragments * (exposed_s + join["update_s"]) / every)
        assert any(f"in {every} steps islands exchange" in note for note in report["notes"])


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_corpus(tmp_path / "corpus.txt", 60)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("layout", cases(["islands=2,pp=2", "islands=2,shard=2,zero=2"]))
def test_a_run_goes_on_to_the_bit_while_exchanges_are_under_way(root: Path, layout: str) -> None:
    """From memory after a killed rank, and from the disk of a run that ended; evaluated at outer weights in between."""
    more = (*STREAM, "--evaluation.every", "3")
    whole = train(root, "whole", layout, 12, 4, *more)
    kill = ("--recovery.faults", "kill:rank=3,step=7,phase=snapshot", "--recovery.snapshot-every", "1")
    assert train(root, "killed", layout, 12, 4, *more, *kill) == whole
    assert events(root, "killed", "restored")[0]["step"] == 6
    ends = ("--recovery.faults", "kill:rank=3,step=7", "--recovery.no-enabled")
    train(root, "ended", layout, 12, 4, *more, *ends, fails=True)
    store = CheckpointStore(root / "ended" / "checkpoints", CheckpointConfig())
    found = store.find()
    assert found is not None and found.step == 6
    state = dict(store.read_full(found))
    counters = json.loads(bytes(state["island0/counters"].numpy()).decode())
    assert [started for *_, started in counters["rounds"]] == [6, 4]
    assert train(root, "ended", layout, 12, 4, *more, "--recovery.no-enabled") == whole
    for run in ("killed", "ended"):
        joins = [[row["outer"] for row in rows(root / name) if row["outer"]] for name in ("whole", run)]
        assert [[join["fragments"], join["consensus_distance"]] for join in joins[0]] == [
            [join["fragments"], join["consensus_distance"]] for join in joins[1]
        ]
        losses = [
            {event["step"]: event["loss"] for event in events(root, name, "evaluated")} for name in ("whole", run)
        ]
        assert losses[0] == losses[1] and sorted(losses[0]) == [3, 6, 9, 12]


@pytest.mark.slow
def test_other_islands_go_on_from_a_state_with_exchanges_under_way(root: Path) -> None:
    ends = ("--recovery.faults", "kill:rank=1,step=7", "--recovery.no-enabled")
    train(root, "run", "islands=2", 9, 2, *STREAM, *ends, fails=True)
    for steps, layout, devices in ((11, "islands=4", 4), (14, "islands=2", 2), (16, "replicate=1", 1)):
        losses = train(root, "run", layout, steps, devices, *STREAM)
        assert len(losses) == steps and losses[-1][0] < losses[0][0]
    assert [(event["saved"], event["islands"]) for event in events(root, "run", "islands_changed")] == [
        (2, 4), (4, 2), (2, 1)
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("stream", "step"), cases([((), 4), (STREAM, 5), (STREAM, 4)], (0,), extended=(1,)))
def test_a_flip_in_one_of_an_islands_copies_is_found_before_it_is_joined(
    stream: tuple[str, ...], step: int, root: Path
) -> None:
    """Far too small for any bound; with a delay the copies are compared when the exchange arrives, after 5 or 7."""
    layout, more = "islands=2,replicate=2", ("--recovery.snapshot-every", "1", *stream)
    # Nothing else compares: no checkpoint, snapshots' own comparisons come after the join.
    whole = train(root, "whole", layout, 8, 4, *more)
    flip = f"flip:rank=1,step={step},phase=join,of=weights,bit=20,seed=4"
    assert train(root, "flipped", layout, 8, 4, "--recovery.faults", flip, *more) == whole
    (damaged,), (repaired,) = events(root, "flipped", "damaged"), events(root, "flipped", "damage_repaired")
    assert f"copies of the state differ after step {step}: ranks 0, 1 hold different" in damaged["why"]
    assert "in island0/weights/" in damaged["why"] and repaired["damaged"] == [1]


@pytest.mark.slow
def test_islands_over_two_nodes_are_those_of_one(root: Path) -> None:
    """An island a node, whose joins cross the network: the third round ends with the run."""
    more = ("--outer.every", "4", "--schedule.shape", "constant", *STREAM)
    whole = train(root, "whole", "islands=2,shard=2,zero=2", 12, 4, *more)
    options = ("--model.heads", "4", "--train.steps", "12", *more)
    run = Nodes(root, "nodes", 2, "islands=2,shard=2,zero=2", *options, ranks=4).start()
    run.finish()
    assert list(curve(root / "nodes").values()) == whole


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(range(20), 3))
def test_ranks_of_islands_killed_at_random_steps(seed: int, root: Path) -> None:
    """The run ends as the undisturbed one to the bit; where a device stays away its island is left out by an event."""
    draw = random.Random(seed)
    islands, every, steps = draw.choice((2, 3)), draw.choice((3, 4, 5)), 14
    fragments, delay = draw.randint(1, min(3, every)), draw.randint(0, every - 1)
    layout = f"islands={islands}" + draw.choice(("", ",shard=2,zero=2") if islands == 2 else ("",))
    ranks, shrinks = Layout.parse(layout).world, draw.random() < 0.3
    phase = draw.choice(("forward", "backward", "reduce", "join", "snapshot"))
    step, rank = draw.randint(2, steps - 1), draw.randrange(ranks)
    options = ("--outer.every", str(every), "--outer.fragments", str(fragments), "--outer.delay", str(delay))
    snapshot_every = draw.choice((1, 2))
    options += ("--train.batch", "12", "--recovery.snapshot-every", str(snapshot_every))
    if phase == "snapshot":
        step -= step % snapshot_every
        # A checkpoint's copy is the snapshot of its step.
        options += ("--checkpoint.every", "0")
    # Killed before, as and after islands part.
    options += ("--outer.warmup", str(draw.choice((0, 3, 8))))
    kill = ("--recovery.faults", f"kill:rank={rank},step={step},phase={phase}")
    began = time.monotonic()
    whole = train(root, "whole", layout, steps, ranks, *options)
    undisturbed_s = time.monotonic() - began
    killed = train(root, "killed", layout, steps, ranks, *options, *kill,
                   *(("--recovery.on-death", "shrink") if shrinks else ()))  # fmt: skip
    # A second start of ranks, and no wait as long as the limit of a collective.
    assert time.monotonic() - began < 3 * undisturbed_s + 60
    lost = events(root, "killed", "rank_lost")
    assert len(lost) == 1, (layout, options, kill)
    if shrinks:
        changes = [(change["saved"], change["islands"]) for change in events(root, "killed", "islands_changed")]
        # Where no state was whole yet, those that are left begin anew.
        went_on = bool(events(root, "killed", "restored"))
        assert changes == [(islands, islands - 1)] * went_on and (went_on or step <= snapshot_every + 1)
    else:
        assert killed == whole, (layout, options, kill)
