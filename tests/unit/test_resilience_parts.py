"""The parts of recovery, each alone: who is left out, what hangs, who is slow, what is planned ahead, what is sick."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import time
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.agreement import Agreement
from meshwright.checkpoint.config import CheckpointConfig
from meshwright.checkpoint.manifest import Origin
from meshwright.checkpoint.snapshot import Segment
from meshwright.checkpoint.snapshot_writer import SnapshotWriter
from meshwright.checkpoint.tensor_shards import TensorShard, digest
from meshwright.errors import ConfigError, LaunchError, PlanError
from meshwright.jobs.layouts import _similar_layouts, uneven_shares
from meshwright.launch.devices import Devices
from meshwright.monitor import progress as progress_module
from meshwright.monitor.progress import ProgressWriter, RankStamp, reset_progress
from meshwright.resilience import device_backoff as backoff_module
from meshwright.resilience import hang_watch as hang_module
from meshwright.resilience.device_backoff import DeviceBackoff
from meshwright.resilience.disk import DiskWriter
from meshwright.resilience.hang_watch import LEAST_LIMIT_S, UNLEARNED_LIMIT_S, HangError, HangWatch
from meshwright.resilience.helper import Helper
from meshwright.resilience.host_memory_budget import fit_local_copies, state_bytes
from meshwright.resilience.keeper import Keeper
from meshwright.resilience.orders import choose_snapshot_interval
from meshwright.resilience.planning import PlanPrefetcher
from meshwright.resilience.slow_ranks import SAMPLES, SlowRankWatch
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan, Prediction
from meshwright.train.config import RecoveryConfig
from meshwright.train.faults import Fault, Faults, ask, parse_faults
from meshwright.train.health import LEAST, Health
from meshwright.train.memory import RankMemory, RecoveryMemory
from meshwright.train.supervisor_requests import SupervisorRequests


class Clock:
    """A clock that stands unless it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which stamps are made and judged, and devices left out."""
    clock = Clock()
    for module in (hang_module, progress_module, backoff_module):
        monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_device_is_left_out_at_its_second_failure_and_longer_each_time(clock: Clock) -> None:
    backoff, devices, device = DeviceBackoff(RecoveryConfig(back_s=5.0)), [(0, 0), (0, 1), (0, 2)], (0, 1)
    assert backoff.record_failure(device) is None and backoff.left_out == []
    assert backoff.record_failure(device) == 5.0 and backoff.left_out == [device]
    assert backoff.remaining_s(devices) == 5.0 and backoff.expired(devices) == []
    clock.now += 6.0
    assert backoff.expired(devices) == [device] and backoff.expired([(0, 0)]) == []
    backoff.readmit([device])
    assert backoff.left_out == [] and backoff.remaining_s(devices) == 0.0
    assert backoff.record_failure(device) == 10.0 and backoff.remaining_s([(0, 0)]) == 0.0
    at_once = DeviceBackoff(RecoveryConfig(on_death="shrink"))
    assert at_once.record_failure((0, 0)) is not None


def test_a_node_of_some_devices() -> None:
    devices = Devices(kind="cuda", count=4, found=4, cores=8).only([0, 2, 3])
    assert [devices.name(rank) for rank in range(3)] == ["cuda:0", "cuda:2", "cuda:3"] and devices.count == 3


def test_a_rank_that_computes_for_ever_is_blamed_and_one_that_waits_is_not(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "progress.bin"
    reset_progress(path, 2)
    watch = HangWatch(path, 3, 2, 2.0, lambda rank: f"rank {rank}: replicate {rank}")
    writers = [ProgressWriter(path, rank, 3) for rank in range(2)]
    writers[0].stamp("backward", 5, 0, "all_reduce over replicate")
    writers[1].stamp("forward", 5)
    for _ in range(3):
        assert len(watch.poll()) == 2
        clock.now += 0.7
    with pytest.raises(HangError, match=r"rank 1: replicate 1 made no progress in forward of step 5 for 2.1 s") as told:
        watch.poll()
    assert told.value.rank == 1 and "rank 0 [replicate 0] waits in backward of step 5 for all_reduce" in str(told.value)
    writers[1].stamp("done")
    writers[0].stamp("done")
    for _ in range(4):
        clock.now += 0.7
        watch.poll()


def test_who_slept_meanwhile_blames_nobody(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "progress.bin"
    reset_progress(path, 1)
    watch = HangWatch(path, 0, 1, 2.0)
    ProgressWriter(path, 0, 0).stamp("forward", 5)
    clock.now += 30.0
    assert len(watch.poll()) == 1, "the whole machine may have been stopped"
    for _ in range(2):
        clock.now += 0.9
        watch.poll()
    clock.now += 0.9
    with pytest.raises(HangError, match=r"for 32\.7 s"):
        watch.poll()


@pytest.mark.parametrize("limit_s", [None, 5.0])
def test_a_first_step_that_compiles_may_take_longer_than_any_later_one(
    limit_s: float | None, tmp_path: Path, clock: Clock
) -> None:
    """Layer after layer is compiled: that one's forward ended says nothing of the next one's."""
    path = tmp_path / "progress.bin"
    reset_progress(path, 1)
    watch, writer = HangWatch(path, 1, 1, limit_s, compiles=True), ProgressWriter(path, 0, 1)
    watch._check_processes = lambda found, now: None  # type: ignore[method-assign]
    first = [(41, "start", 0.1), (41, "forward", 0.1), (41, "backward", 0.1), (41, "forward", 90.0)]

    def pass_time(seconds: float) -> None:
        for _ in range(60):
            watch.poll()
            clock.now += seconds / 60

    for step, phase, seconds in [*first, (42, "forward", 0.1), (42, "backward", 0.1)]:
        writer.stamp(phase, step)
        pass_time(seconds)
    writer.stamp("forward", 43)
    with pytest.raises(HangError, match="forward of step 43"):
        pass_time(90.0)


def test_stamps_of_an_earlier_generation_say_nothing(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "progress.bin"
    reset_progress(path, 1)
    watch = HangWatch(path, 1, 1, 2.0)
    ProgressWriter(path, 0, 0).stamp("forward", 5)
    for _ in range(5):
        assert watch.poll() == []
        clock.now += 0.7


def test_no_rank_writes_over_a_snapshot_before_all_have_the_next_one() -> None:
    """Each waits for its own last one before the sum that ends the step after which another is taken."""

    class Slow:
        waited = 0

        def wait(self) -> None:
            self.waited += 1

    control = SupervisorRequests()
    memory = RankMemory(RecoveryMemory(segments=(), disk=(), control=control, every=4), 0, 0, Agreement(None))
    memory.complete_snapshot(4)
    memory._writer = slow = Slow()  # type: ignore[assignment]
    for step in range(1, 9):
        memory.complete_snapshot(step)
        assert slow.waited == step // 4
    control.request_reconfiguration()
    memory.complete_snapshot(9)
    assert slow.waited == 3, "an end that was asked for takes one as well"
    control.close()


def looks(busy: dict[int, float]) -> list[list[RankStamp]]:
    """Looks at ranks that compute for a share of the time."""
    return [
        [
            RankStamp(
                rank=rank, pid=1, generation=0, step=9, micro=0, phase="forward", since=0.0,
                waits_for="" if (at * 0.618) % 1 < share else "all_reduce over replicate",
            )
            for rank, share in busy.items()
        ]
        for at in range(SAMPLES)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("busy", "stages", "found"),
    [
        ({0: 0.5, 1: 0.95, 2: 0.5, 3: 0.5}, [0, 0, 0, 0], [1]),
        ({0: 0.9, 1: 0.95, 2: 0.9, 3: 0.92}, [0, 0, 0, 0], []),
        ({0: 0.5, 1: 0.5, 2: 0.95, 3: 0.95}, [0, 0, 1, 1], []),
        ({0: 0.05, 1: 0.3}, [0, 0], []),
    ],
)
def test_a_rank_is_slow_against_those_who_do_the_same(busy: dict, stages: list[int], found: list[int]) -> None:
    watch = SlowRankWatch(lambda rank: stages[rank])
    told = [slow for look in looks(busy) for slow in watch.poll(look)]
    assert [slow.rank for slow in told] == found


def polled(watch: SlowRankWatch, busy: dict[int, float], polls: int, polls_per_step: int, seed: int) -> list[int]:
    """Returns the steps in which a verdict named somebody; each poll is an independent draw of each rank."""
    draw, steps = random.Random(seed), []
    for poll in range(polls):
        stamps = [
            RankStamp(
                rank=rank, pid=1, generation=0, step=9 + poll // polls_per_step, micro=0, phase="forward", since=0.0,
                waits_for="" if draw.random() < share else "all_reduce over replicate",
            )
            for rank, share in busy.items()
        ]  # fmt: skip
        if watch.poll(stamps):
            steps.append(poll // polls_per_step)
    return steps


def test_a_straggler_is_named_within_twenty_steps() -> None:
    for seed in range(50):
        # A step of 0.4 s, polled ten times a second, of which the others wait 0.3 s for rank 1.
        steps = polled(SlowRankWatch(lambda rank: 0), {0: 0.25, 1: 1.0}, polls=100, polls_per_step=4, seed=seed)
        assert steps and steps[0] < 20, (seed, steps)


def test_equal_ranks_are_rarely_named_by_chance() -> None:
    verdicts = [
        polled(SlowRankWatch(lambda rank: 0), {0: 0.6, 1: 0.6, 2: 0.6}, polls=SAMPLES, polls_per_step=4, seed=seed)
        for seed in range(200)
    ]
    # At 200 polls a share of 0.84 of one against 0.6 of the others lies six standard deviations away.
    assert sum(map(bool, verdicts)) <= 2, verdicts


def named_in_steps(ranks: int, slow: int | None, seed: int, steps: int = 400) -> list[tuple[int, int]]:
    """Returns (step, rank) of each verdict on ranks that end every step together, polled ten times a second."""
    draw, watch = random.Random(seed), SlowRankWatch(lambda rank: 0)
    named, start_s, polled_s = [], 0.0, 0.0
    for step in range(steps):
        busy_s = [0.1 * draw.lognormvariate(0.0, 0.2) + 0.3 * (rank == slow) for rank in range(ranks)]
        # Each step has work that nobody waits for, and its end, when all wait for the slowest.
        end_s = start_s + max(busy_s) + 0.02
        while polled_s < end_s:
            stamps = [
                RankStamp(
                    rank=rank, pid=1, generation=0, step=9 + step, micro=0, phase="backward", since=0.0,
                    waits_for="" if polled_s - start_s < busy_s[rank] else "all_reduce over replicate",
                )
                for rank in range(ranks)
            ]  # fmt: skip
            named += [(step, verdict.rank) for verdict in watch.poll(stamps)]
            polled_s += 0.1
        start_s = end_s
    return named


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_slowed_rank_is_named_and_undisturbed_runs_name_nobody(ranks: int) -> None:
    for seed in range(10):
        assert named_in_steps(ranks, None, seed) == []
        step, rank = named_in_steps(ranks, seed % ranks, seed, steps=20)[0]
        assert step < 20 and rank == seed % ranks


def test_plans_are_made_ahead_by_another_process() -> None:
    asked = []

    def plan(count: int) -> str:
        asked.append(count)
        if count == 5:
            raise PlanError("no layout of 5")
        return f"layout of {count}"

    ahead = PlanPrefetcher(plan)
    ahead.learn(8, "the first")
    ahead.start([7, 5])
    end = time.monotonic() + 20
    while ahead._helper and time.monotonic() < end:
        ahead._collect()
        time.sleep(0.01)
    assert ahead.answer(8) == ("the first", True) and ahead.answer(7) == ("layout of 7", True)
    with pytest.raises(PlanError, match="no layout of 5"):
        ahead.answer(5)
    assert asked == [], "this process planned nothing"
    assert ahead.answer(6) == ("layout of 6", False) and asked == [6]
    ahead.close()


@pytest.fixture
def forkless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without room for another process."""

    def fork() -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", fork)


@pytest.mark.usefixtures("forkless")
def test_a_process_that_cannot_be_forked_leaves_nothing_open(tmp_path: Path) -> None:
    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(LaunchError, match="can't be started: Resource temporarily unavailable"):
        Helper(lambda: None)
    with pytest.raises(LaunchError, match="can't be started: Resource temporarily unavailable"):
        Keeper(tmp_path, lambda: None, 1.0)
    assert os.listdir("/proc/self/fd") == descriptors


@pytest.mark.usefixtures("forkless")
def test_training_goes_on_where_neither_plans_nor_checkpoints_can_be_made_beside_it(tmp_path: Path) -> None:
    ahead = PlanPrefetcher(lambda count: f"layout of {count}")
    ahead.start([7])
    assert ahead.answer(7) == ("layout of 7", False)
    told: list[tuple[str, dict]] = []
    writer = DiskWriter(tmp_path, CheckpointConfig(), Origin(), lambda kind, **data: told.append((kind, data)))
    shard, segment, control = TensorShard("w", (4,), "float32", ((0, 4),)), Segment(), SupervisorRequests()
    snapshots = SnapshotWriter(
        [segment], rank=0, generation=0, tensors=digest([shard]), local_shards=[shard], saved_shards=[(0, shard)]
    )
    snapshots.save(3, {"w": torch.arange(4.0)}, {})
    snapshots.wait()
    writer.poll([segment], Layout(), control)
    assert [(kind, data["step"]) for kind, data in told] == [("checkpoint_failed", 3)] and not writer.busy
    assert control.written[0] == 3, "ranks that wait for it are not left waiting"
    control.close()


def test_snapshots_are_as_frequent_as_a_hundredth_of_a_step_allows() -> None:
    def plan(step_s: float | None, size: int) -> Plan:
        prediction = Prediction(memory={"parameters": size}, step_s=step_s)
        return Plan(layout=Layout(), prediction=prediction, ranks=1, reason="")

    assert choose_snapshot_interval(plan(1.0, 1000), None) == 1
    assert choose_snapshot_interval(plan(1.0, 2 * 10**8), None) in (10, 11)
    assert choose_snapshot_interval(plan(0.001, 10**12), None) == 100
    assert choose_snapshot_interval(plan(None, 1), None) == 10
    assert choose_snapshot_interval(plan(1.0, 10**12), 3) == 3
    assert choose_snapshot_interval(plan(0.5, 1000), None, send_s=2.1) == 5, "the next one waits until it has arrived"


@pytest.mark.parametrize(
    ("whole", "ranks", "rows", "found"),
    [
        ("replicate=8", 7, 8, "replicate=7,rows=2-1x6"),
        ("pp=2,shard=2,tp=2", 6, 8, "pp=2,shard=3,rows=3x2-2"),
        ("pp=2,tp=2", 2, 8, "pp=2"),
        ("shard=2,tp=2", 3, 8, "shard=3,rows=3x2-2"),
        ("shard=4,zero=2", 3, 9, "shard=3,zero=2"),
    ],
)
def test_what_is_left_of_a_layout(whole: str, ranks: int, rows: int, found: str) -> None:
    layouts = _similar_layouts(Layout.parse(whole), ranks, rows)
    assert all(layout.world == ranks for layout in layouts)
    assert layouts[0] == Layout.parse(found), list(map(str, layouts))


def test_uneven_shares() -> None:
    texts = [str(uneven_shares(rows, readers)) for rows, readers in ((8, 3), (8, 4), (7, 5))]
    assert texts == ["3x2-2", "", "2x2-1x3"]


def test_faults_are_parsed_and_refused() -> None:
    (kill, slow) = parse_faults("kill:rank=3,step=20,phase=backward; slow:rank=1,step=2,seconds=0.5")
    assert kill == Fault(kind="kill", rank=3, step=20, phase="backward") and Fault.parse(str(kill)) == kill
    assert slow.seconds == 0.5 and str(slow) == "slow:rank=1,step=2,seconds=0.5"
    for text, why in [
        ("kil:rank=1", "did you mean 'kill'"),
        ("kill:step=3", "names no rank"),
        ("kill:rank=x", "rank=x is no number"),
        ("kill:rank=1,when=3", "'when' is unknown"),
    ]:
        with pytest.raises(ConfigError, match=why):
            parse_faults(text)


def test_a_fault_happens_once_at_its_place(tmp_path: Path) -> None:
    happened = []
    known = [Fault(kind="nan", rank=1, step=2, phase="reduce")]

    def faults(rank: int) -> Faults:
        return Faults(
            tmp_path, rank, 0, known,
            spoil=lambda: happened.append("nan") is None, flip=lambda fault: happened.append("flip") is None,
        )  # fmt: skip

    def step(which: Faults, number: int) -> None:
        which.begin_step(number)
        for phase in ("data", "forward", "reduce"):
            which.reach(phase)

    mine, other = faults(1), faults(0)
    for number in (1, 2, 3):
        step(mine, number)
        step(other, number)
    assert happened == ["nan"]
    step(faults(1), 2)
    assert happened == ["nan"], "the ranks that come after know that it happened"
    mark = ask(tmp_path, Fault(kind="flip", rank=1, step=5))
    step(mine, 4)
    assert not mark.exists()
    step(mine, 5)
    assert happened == ["nan", "flip"] and mark.exists()


def test_sick_numbers() -> None:
    health = Health(RecoveryConfig(spike=2.0, largest_norm=50.0))
    assert health.judge(9.0, 1.0) is None, "before there are enough losses none is a spike"
    for _ in range(LEAST):
        assert health.judge(1.0, 1.0) is None
    assert health.limits == (2.0, 50.0)
    assert "2 times the median" in str(health.judge(2.5, 1.0)) and health.judge(1.9, 1.0) is None
    assert "largest_norm = 50" in str(health.judge(1.0, 51.0))
    assert "isn't finite" in str(health.judge(1.0, float("nan")))
    again = Health(RecoveryConfig(spike=2.0))
    again.restore(health.state())
    assert again.limits == (2.0, float("inf")) and Health(RecoveryConfig()).limits is None
    with pytest.raises(ConfigError, match="spike"):
        RecoveryConfig(spike=0.5).check()
    with pytest.raises(ConfigError, match="somebody must start"):
        RecoveryConfig(on_sick="rewind", enabled=False).check()


@pytest.mark.parametrize(("available", "found"), [(7000, (True, True)), (2500, (False, True)), (1000, (False, False))])
def test_copies_are_left_out_where_memory_is_short(available: int, found: tuple[bool, bool]) -> None:
    prediction = Prediction(memory={"parameters": 400, "optimizer": 600, "activations": 10**9})
    plan = Plan(layout=Layout.parse("replicate=2,shard=2"), prediction=prediction, ranks=4, reason="")
    assert state_bytes(plan, 4) == 2000 and state_bytes(plan, 2) == 1000
    room = fit_local_copies(plan, 2, available)
    assert (room.snapshots, room.disk) == found
    there = dataclasses.replace(prediction, host=3000)  # of each rank, before the copies
    less = fit_local_copies(dataclasses.replace(plan, prediction=there), 2, available + 6000)
    assert (less.snapshots, less.disk) == found


def test_a_copy_of_islands_has_the_outer_weights_and_momentum_once() -> None:
    prediction = Prediction(memory={"parameters": 400, "optimizer": 600, "outer": 800})
    plan = Plan(layout=Layout.parse("islands=2,replicate=2,shard=2"), prediction=prediction, ranks=8, reason="")
    assert state_bytes(plan, 8) == 4 * 1000 + 2 * 800


@pytest.mark.parametrize("phase", ["checkpoint", "evaluate"])
def test_a_disk_or_an_evaluation_may_take_longer_than_ever(phase: str, tmp_path: Path) -> None:
    path = tmp_path / "progress.bin"
    reset_progress(path, 1)
    watch = HangWatch(path, 0, 1, None)
    writer = ProgressWriter(path, 0, 0)
    for stamped in (phase, "forward", phase, "forward"):
        writer.stamp(stamped, 5)
        watch.poll()
        time.sleep(0.01)
    assert watch._limit_s(watch.poll()) == LEAST_LIMIT_S
    writer.stamp(phase, 6)
    assert watch._limit_s(watch.poll()) == UNLEARNED_LIMIT_S


def test_no_checkpoint_begins_before_every_rank_has_left_its_part(tmp_path: Path) -> None:
    part = TensorShard("w", (4,), "float32", ((0, 4),))
    segments = [Segment(), Segment()]
    told: list[tuple[str, dict]] = []
    writer = DiskWriter(tmp_path, CheckpointConfig(), Origin(), lambda kind, **data: told.append((kind, data)))
    control = SupervisorRequests()

    def leave(rank: int, kept: list) -> None:
        one = SnapshotWriter(
            segments[rank : rank + 1],
            rank=rank,
            generation=0,
            tensors=digest([part]),
            local_shards=[part],
            saved_shards=kept,
        )
        one.save(3, {"w": torch.arange(4.0)}, {})
        one.wait()

    leave(0, [(0, part)])
    writer.poll(segments, Layout(), control)
    assert not writer.busy, "rank 1 has not even opened its own"
    leave(1, [])
    checksum = os.pread(segments[1].fd, 4, 56)
    os.pwrite(segments[1].fd, bytes(4), 56)
    writer.poll(segments, Layout(), control)
    assert not writer.busy, "rank 1 was preempted in the middle of its header"
    os.pwrite(segments[1].fd, checksum, 56)
    writer.poll(segments, Layout(), control)
    other = SupervisorRequests()
    writer.finish(30)
    assert [kind for kind, _ in told] == ["checkpoint_saved"] and (tmp_path / "step-00000003").is_dir()
    writer.poll(segments, Layout(), other)
    assert other.written[0] == 0, "those who come after are told of their own alone"
    writer.close()
