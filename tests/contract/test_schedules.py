"""Every schedule that has a file, over many sizes: it is whole, runs to its end, keeps what it states, is torch's."""

from __future__ import annotations

from collections import Counter
from functools import cache
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from meshwright.errors import PlanError
from meshwright.schedules.action import Action, ActionKind, Schedule
from meshwright.schedules.costs import ActionCosts
from meshwright.schedules.simulate import Simulation, simulate
from meshwright.schedules.spec import ScheduleSpec, known_schedules

RANKS = (1, 2, 3, 4, 8)
TORCH = {
    "interleaved": "ScheduleInterleaved1F1B",
    "loopedbfs": "ScheduleLoopedBFS",
    "zerobubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


def sizes(spec: ScheduleSpec) -> list[tuple[int, int, int]]:
    """(ranks, stages per rank, micro-batches) that the schedule takes, among full, ragged and too few micro-batches."""
    found = []
    for ranks in RANKS:
        for stages in (spec.least_stages, spec.least_stages + 1):
            for microbatches in sorted({1, 2, ranks - 1, ranks, ranks + 1, 2 * ranks, 2 * ranks + 2, 3 * ranks} - {0}):
                try:
                    spec.check(ranks, stages, microbatches)
                except PlanError:
                    continue
                found.append((ranks, stages, microbatches))
    return found


ALL = [pytest.param(spec, id=name) for name, spec in known_schedules().items()]
every = pytest.mark.parametrize("spec", ALL)


@cache
def simulated(spec: ScheduleSpec) -> list[tuple[tuple[int, int, int], Simulation]]:
    found = []
    for size in sizes(spec):
        schedule = spec.build(*size)
        found.append((size, simulate(schedule, ActionCosts.uniform(schedule.stages))))
    return found


@every
def test_runs_everything_once_and_in_order(spec: ScheduleSpec) -> None:
    assert len(simulated(spec)) > 10
    for (ranks, stages, microbatches), seen in simulated(spec):
        ends: dict[tuple[int, ActionKind, int], float] = {}
        starts: dict[tuple[int, ActionKind, int], float] = {}
        count: Counter[tuple[int, ActionKind, int]] = Counter()
        for span in seen.timeline:
            for part in span.action.parts:
                key = (part.stage, part.kind, part.microbatch)
                count[key] += 1
                starts[key], ends[key] = span.start_s, span.end_s
        assert set(count.values()) == {1}
        for stage in range(ranks * stages):
            for microbatch in range(microbatches):
                ahead = (stage, ActionKind.FORWARD, microbatch)
                whole, halves = (stage, ActionKind.BACKWARD, microbatch), (stage, ActionKind.INPUT, microbatch)
                assert (whole in count) != (halves in count)
                back = whole if whole in count else halves
                assert ends[ahead] <= starts[back]
                weight = (stage, ActionKind.WEIGHT, microbatch)
                assert (weight in count) == (halves in count)
                if weight in count:
                    assert ends[halves] <= starts[weight]
                if stage:
                    assert ends[stage - 1, ActionKind.FORWARD, microbatch] <= starts[ahead]


@every
def test_bubble_is_as_stated(spec: ScheduleSpec) -> None:
    stated = [(seen.bubble, spec.bubble(*size)) for size, seen in simulated(spec)]
    stated = [(seen, most) for seen, most in stated if most is not None]
    assert (spec.bubble_text == "simulated only") == (not stated)
    for seen, most in stated:
        assert seen <= most + 1e-12


@every
def test_peak_live_is_as_stated_and_reached(spec: ScheduleSpec) -> None:
    peaks = [(max(seen.peak_live_rank), spec.peak_live(*size)) for size, seen in simulated(spec)]
    for seen, most in peaks:
        assert 0 < seen <= most
    assert any(seen == most for seen, most in peaks)


@every
def test_states_its_placement_and_its_split(spec: ScheduleSpec) -> None:
    for (ranks, stages, _), seen in simulated(spec):
        expected = tuple(spec.placement.rank_of(stage, ranks) for stage in range(ranks * stages))
        assert seen.schedule.placement == expected
        if ranks > 1:
            assert seen.schedule.splits_backward == spec.splits_backward


@every
def test_unsplit_each_backward_stands_once_where_its_first_half_did(spec: ScheduleSpec) -> None:
    for size, _ in simulated(spec):
        split, whole = spec.build(*size), spec.build(*size).unsplit()
        assert whole.splits_backward is False and (spec.splits_backward or whole == split)
        kept = [
            [str(item).replace("I", "B") for item in row if item.kind is not ActionKind.WEIGHT] for row in split.actions
        ]
        assert kept == [list(map(str, row)) for row in whole.actions]
        simulate(whole, ActionCosts.uniform(whole.stages))  # it deadlocks nowhere


@every
def test_text_both_ways(spec: ScheduleSpec) -> None:
    for size, _ in simulated(spec):
        schedule = spec.build(*size)
        assert Schedule.from_csv(schedule.to_csv(), name=spec.name) == schedule
        assert Schedule.from_json(schedule.to_json()) == schedule


@every
def test_torch_takes_the_csv_and_adds_sends(spec: ScheduleSpec, tmp_path) -> None:
    for (ranks, stages, microbatches), seen in simulated(spec)[:: max(1, len(simulated(spec)) // 8)]:
        path = tmp_path / "schedule.csv"
        path.write_text(seen.schedule.to_csv())
        runtime = torch_schedules._PipelineScheduleRuntime(fake_stages(ranks, stages), microbatches)
        runtime._load_csv(str(path))
        assert [runtime.stage_index_to_group_rank[stage] for stage in range(ranks * stages)] == list(
            seen.schedule.placement
        )
        for rank, row in enumerate(seen.schedule.actions):
            lowered = [str(action) for action in runtime.pipeline_order_with_comms[rank] if action.is_compute_op]
            assert lowered == [str(action) for action in row]


@every
def test_refuses_what_makes_no_sense(spec: ScheduleSpec) -> None:
    for size in ((0, spec.least_stages, 8), (4, spec.least_stages, 0), (4, spec.least_stages - 1, 8)):
        with pytest.raises(PlanError, match="take"):
            spec.build(*size)


def fake_stages(ranks: int, stages_per_rank: int) -> list[SimpleNamespace]:
    facts = {"num_stages": ranks * stages_per_rank, "group_size": ranks, "group_rank": 0, "submod": None}
    return [SimpleNamespace(stage_index=lap * ranks, is_last=False, **facts) for lap in range(stages_per_rank)]


@pytest.mark.parametrize("name", TORCH)
def test_is_torch_s_own_table(name: str) -> None:
    spec = known_schedules()[name]
    for ranks, stages, microbatches in sizes(spec):
        theirs = getattr(torch_schedules, TORCH[name])(fake_stages(ranks, stages), microbatches).pipeline_order
        rows = spec.build(ranks, stages, microbatches).actions
        for rank, row in enumerate(rows):
            assert [str(action) for action in row] == [str(action) for action in theirs[rank] if action is not None]


def torch_single(name: str, ranks: int, microbatches: int) -> list[list[str]]:
    """Torch's table of a schedule with one stage per rank, less waits and gradient sums."""
    sizes_of_it = SimpleNamespace(_num_stages=ranks, _n_microbatches=microbatches)
    order = getattr(torch_schedules, name)._get_pipeline_order(sizes_of_it)
    rows = [[action for action in order[rank] if action is not None] for rank in range(ranks)]
    return [[str(action) for action in row if action.is_compute_op] for row in rows]


def test_gpipe_is_torch_s_own_table() -> None:
    for ranks, _, microbatches in sizes(known_schedules()["gpipe"]):
        rows = known_schedules()["gpipe"].build(ranks, 1, microbatches).actions
        assert [[str(action) for action in row] for row in rows] == torch_single("ScheduleGPipe", ranks, microbatches)


def test_1f1b_is_torch_s_own_table_but_for_its_last_rank() -> None:
    """Torch's table counts the forwards of the last rank from 1; the order its loop runs is compared below."""
    checked = 0
    for ranks, _, microbatches in sizes(known_schedules()["1f1b"]):
        if microbatches < ranks:
            continue
        rows = known_schedules()["1f1b"].build(ranks, 1, microbatches).actions
        theirs = torch_single("Schedule1F1B", ranks, microbatches)
        assert [[str(action) for action in row] for row in rows[:-1]] == theirs[:-1]
        last = [str(Action(part.stage, part.kind, part.microbatch)) for part in rows[-1]]
        off_by_one = [f"{p.stage}{p.kind.value}{p.microbatch + (p.kind is ActionKind.FORWARD)}" for p in rows[-1]]
        assert theirs[-1] in (last, off_by_one)
        checked += 1
    assert checked > 10


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 4), (4, 4), (4, 8), (3, 7)])
def test_1f1b_is_what_torch_s_loop_runs(ranks: int, microbatches: int) -> None:
    rows = known_schedules()["1f1b"].build(ranks, 1, microbatches).actions
    for rank in range(ranks):
        ran: list[str] = []
        loop = MagicMock(_n_microbatches=microbatches, _num_stages=ranks)
        loop._check_inputs.return_value = ([None] * microbatches, [None] * microbatches)
        loop._stage.stage_index = rank
        for ask in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
            getattr(loop._stage, ask).return_value = []
        loop._stage.forward_one_chunk.side_effect = lambda chunk, *a, **k: ran.append(f"{rank}F{chunk}")  # noqa: B023
        loop._stage.backward_one_chunk.side_effect = lambda chunk, **k: ran.append(f"{rank}B{chunk}")  # noqa: B023
        torch_schedules.Schedule1F1B._step_microbatches(loop)
        assert ran == [str(action) for action in rows[rank]]
