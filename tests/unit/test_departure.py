"""A node of islands that leaves at SIGTERM: what it asks for, when it ends, and when the whole run ends instead."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.launch.signals import InterruptCounter
from meshwright.resilience.departure import Departure
from meshwright.resilience.drain_requests import DrainRequest, read_requests, write_request
from meshwright.resilience.generation_ranks import LeftRun


def leaving(folder: Path, stop_s: float = 60.0) -> tuple[InterruptCounter, Departure]:
    """Returns a node of islands to which SIGTERM was sent, and which has asked to leave."""
    interrupts = InterruptCounter()
    interrupts.leaves_at_sigterm = True
    departure = Departure(folder, 1, interrupts, stop_s)
    departure.poll()
    assert not read_requests(folder)
    interrupts.record(signal.SIGTERM)
    departure.poll()
    return interrupts, departure


def told(folder: Path, kind: str, **fields: Any) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": kind, "rank": -1, "time": time.time(), **fields}) + "\n")


def order(nodes: list[int], holders: list[int]) -> Any:
    return SimpleNamespace(nodes=nodes, state=SimpleNamespace(holders=dict(enumerate(holders))))


def test_sigterm_asks_for_leave_once_and_a_second_one_ends_the_run(tmp_path: Path) -> None:
    interrupts, departure = leaving(tmp_path)
    assert interrupts.count == 0 and interrupts.terminated
    assert read_requests(tmp_path) == [DrainRequest(node=1, why="SIGTERM")]
    interrupts.record(signal.SIGTERM)
    assert interrupts.count == 1
    departure.withdraw()
    assert not read_requests(tmp_path)


def test_other_signals_and_other_layouts_end_the_run() -> None:
    for leaves, number in ((True, signal.SIGINT), (False, signal.SIGTERM)):
        interrupts = InterruptCounter()
        interrupts.leaves_at_sigterm = leaves
        interrupts.record(number)
        assert interrupts.count == 1 and interrupts.leaving_since is None


def test_a_node_without_ranks_ends_when_the_others_have_its_part_of_the_state(tmp_path: Path) -> None:
    _, departure = leaving(tmp_path)
    departure.end_without_ranks(order([0, 1], [0, 1]))  # it has ranks still
    departure.end_without_ranks(order([0], [0, 1]))  # they read from it
    told(tmp_path, "restored", step=5)
    departure._read_at = 0.0
    with pytest.raises(LeftRun, match="nothing of its round is lost") as left:
        departure.end_without_ranks(order([0], [0, 1]))
    assert left.value.exit_status == 143
    with pytest.raises(LeftRun):
        departure.end_without_ranks(order([0], [0, 0]))


def test_a_round_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    _, departure = leaving(tmp_path, stop_s=0.0)
    time.sleep(0.01)
    with pytest.raises(LeftRun, match="gave its open round up"):
        departure.poll()


def test_a_node_that_waits_for_others_ends_in_time_too(tmp_path: Path) -> None:
    """No rank runs: it searches for who leads, or hears nothing from that."""
    _, departure = leaving(tmp_path)
    departure.end_in_time()
    departure._interrupts.leaving_since = time.monotonic() - 61
    with pytest.raises(LeftRun, match="gave its open round up") as left:
        departure.end_in_time()
    assert left.value.exit_status == 143


def test_a_refused_leave_ends_the_run_on_all_nodes(tmp_path: Path) -> None:
    interrupts, departure = leaving(tmp_path)
    told(tmp_path, "drain_refused", node=0, device=None, why="another node's")
    departure._read_at = 0.0
    departure.poll()
    assert interrupts.count == 0
    told(tmp_path, "drain_refused", node=1, device=None, why="too few")
    departure._read_at = 0.0
    departure.poll()
    assert interrupts.count == 1 and not read_requests(tmp_path) and departure.saves_alone


def test_what_a_person_drained_stays_drained(tmp_path: Path) -> None:
    write_request(tmp_path, DrainRequest(node=1, why="fan"))
    Departure(tmp_path, 1, InterruptCounter(), 1.0).withdraw()
    assert len(read_requests(tmp_path)) == 1
